"""A detector of speech for tests, which goes by loudness alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.server.realtime.vad import Float, Silero, VadState

LOUD = 0.02


class LoudnessVad(Silero):
    """Loud windows are speech."""

    def __init__(self) -> None:
        pass

    def run(self, windows: Float, states: Sequence[VadState]) -> Float:
        loud = np.sqrt((windows**2).mean(axis=1)) > LOUD
        return np.where(loud, 0.95, 0.01).astype(np.float32)

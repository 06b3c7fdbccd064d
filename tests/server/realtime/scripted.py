"""A detector of speech that listens to loudness alone; and, until all tests import them from where
they are, other names of the scripted engine and its sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.server.realtime.vad import Float, Silero, VadState
from tests.server.scripted_engine import ScriptedEngine as TalkEngine
from tests.server.scripted_session import (
    RATE,
    Ask,
    ScriptedSession,
    plain,
    say,
    short,
    tone,
)

__all__ = [
    "RATE", "Ask", "LoudnessVad", "ScriptedSession", "TalkEngine", "plain", "say",
    "short", "tone",
]  # fmt: skip

LOUD = 0.02


class LoudnessVad(Silero):
    """What is loud is speech."""

    def __init__(self) -> None:
        pass

    def run(self, windows: Float, states: Sequence[VadState]) -> Float:
        loud = np.sqrt((windows**2).mean(axis=1)) > LOUD
        return np.where(loud, 0.95, 0.01).astype(np.float32)

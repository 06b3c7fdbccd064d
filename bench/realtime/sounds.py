"""What the speakers of this benchmark say: made-up speech, no two turns alike. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stretto.engine.session import INPUT_RATE
from tests.server.realtime.sounds import speech

Samples = npt.NDArray[np.float32]
BASE_S = 24.0
ABOUT = (
    "synthetic speech (harmonics of a voice, vowels that change with each syllable), no recording "
    "of a person"
)


BEEP_S = 0.05


class Clips:
    """Turns of any length. Each has its own noise, so that none is in a cache. Each begins with a
    beep, its loudest sound: a clip that grows louder would raise the floor of its features, and the
    windows that this changes would be encoded again, in some runs and not in others."""

    def __init__(self, seed: int = 0) -> None:
        self._base = speech(BASE_S, seed=seed)
        self._random = np.random.default_rng(seed)

    def clip(self, seconds: float, beep: bool = True) -> Samples:
        """Without a beep: what is said behind a clip that had one."""
        num = round(seconds * INPUT_RATE)
        start = int(self._random.integers(len(self._base)))
        said = np.resize(np.roll(self._base, -start), num)
        noise: Samples = self._random.standard_normal(num, np.float32)
        said += np.float32(0.003) * noise
        if beep:
            times = np.arange(min(num, round(BEEP_S * INPUT_RATE))) / INPUT_RATE
            said[: len(times)] = 0.9 * np.sin(2 * np.pi * 500 * times).astype(np.float32)
        return said

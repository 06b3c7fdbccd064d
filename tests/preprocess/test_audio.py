"""Long sounds are cut into windows where they are quiet."""

from __future__ import annotations

import numpy as np

from stretto.preprocess.audio import cut_sound

RATE = 16_000


def test_windows_end_where_it_is_quiet() -> None:
    samples = np.full(10 * RATE, 10_000, np.int16)
    samples[int(3.7 * RATE) : int(3.9 * RATE)] = 0
    samples[int(7.4 * RATE) : int(7.7 * RATE)] = 0
    parts = cut_sound(samples, 4.0)
    assert sum(len(p) for p in parts) == len(samples)
    ends = np.cumsum([len(p) for p in parts]) / RATE
    assert 3.7 <= ends[0] <= 3.9
    assert 7.4 <= ends[1] <= 7.7

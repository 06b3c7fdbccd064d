"""What the log of a request counts."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.engine.events import AudioChunk
from stretto.server.request_log import RequestLog
from stretto.types import RequestId


def test_underruns_are_counted_as_a_player_hears_them() -> None:
    now = [0.0]

    class Clocked(RequestLog):
        def elapsed(self) -> float:
            return now[0]

    request_log = Clocked(RequestId("r"), "r", arrived=0.0, sample_rate=1000)
    for now[0] in (1.0, 1.4, 2.0, 2.2):  # packets of 0.5 s; the third comes just in time
        request_log.record(AudioChunk(0, np.zeros(500, np.float32)))
    assert request_log.underrun == pytest.approx(0.0)
    now[0] = 4.0  # what there was, 2.0 s from 1.0 on, had been played at 3.0
    request_log.record(AudioChunk(0, np.zeros(500, np.float32)))
    assert request_log.underrun == pytest.approx(1.0)
    assert request_log.rtf == pytest.approx(4.0 / 2.5)

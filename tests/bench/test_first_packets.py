"""The replay of recorded packets: who would have waited, and what the rule would have cost."""

import pytest

from bench.report.first_packets import paces, replay


def answer(sent: float, *times: float) -> dict[str, object]:
    packets = [[t, 0.056 if i == 0 else 0.08] for i, t in enumerate(times)]
    return {"sent": sent, "packets": packets}


def test_a_stream_behind_a_slow_one_is_held_and_does_not_wait() -> None:
    quick = answer(0.0, 0.1, 0.12, 0.14)
    slow = answer(1.0, 0.1, 0.17, 0.24)
    newcomer = answer(1.2, 0.05, 0.12, 0.19)
    found = replay([quick, slow, newcomer])
    assert found["wait"][2] > 0.01
    assert found["wait, held"][2] == 0
    assert 0.014 < found["first, held"][2] - found["first"][2] < 0.02
    assert found["first, held"][1] == found["first"][1], "nobody was slow just before it"


def test_nobody_is_held_where_frames_come_fast() -> None:
    found = replay([answer(0.01 * i, 0.05, 0.07, 0.09) for i in range(5)])
    assert found["first"] == found["first, held"]
    assert not any(found["wait"])


def test_a_packet_of_several_frames_counts_for_each() -> None:
    ((when, each),) = paces([{"sent": 1.0, "packets": [[0.1, 0.056], [0.18, 0.16]]}])
    assert (when, each) == pytest.approx((1.18, 0.04))

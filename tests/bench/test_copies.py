"""The link that `copies` measures, without a GPU: chunks of several runs arrive whole."""

import pytest
import torch

from bench.connectors.copies import HIDDEN, ON, Link, told


def test_rows_arrive_in_the_other_process() -> None:
    link = Link(None, ON, upload=False)
    try:
        rows = torch.full((64, HIDDEN), 0.5, dtype=torch.bfloat16)
        for count in (1, 30):  # more than there are slots
            link.begin()
            for _ in range(count):
                link.send(rows, None)
            assert link.end() == 0.5 * count
    finally:
        link.close()


def test_a_way_is_told_beside_the_runs_in_which_nothing_was_sent() -> None:
    def run(whole: float) -> dict:
        return {"whole_ms": whole, "step_ms": [1.0, 3.0], "gap_us": [100.0], "loop_us": [5.0, 7.0]}

    found = told("all on", 64, [run(10.0), run(30.0)], [run(5.0), run(20.0)])
    assert found["times"] == 2.0
    assert found["idle_share"] == pytest.approx(0.2 / 40.0)
    assert (found["step_ms_p50"], found["gap_us_p99"]) == (3.0, 100.0)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.loadtest.stats import summarize


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    got = summarize(values)
    assert got is not None
    want = np.percentile(values, [50, 90, 99, 100])
    assert [got.p50, got.p90, got.p99, got.max] == pytest.approx(want.tolist(), abs=1e-6)
    assert got.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert got.count == len(values)


def test_missing_values_are_left_out() -> None:
    assert summarize([]) is None
    assert summarize([None, None]) is None
    got = summarize([None, 2.0, None, 4.0])
    assert got is not None
    assert (got.count, got.p50) == (2, 3.0)

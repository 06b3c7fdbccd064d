from __future__ import annotations

import pytest

from stretto.observe.trace_records import TraceContext, merge_steps
from tests.observe.spans import SPAN, TRACE, Step


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_callers_trace_is_gone_on_with(flags: str, sampled: bool) -> None:
    it = TraceContext.of(f"00-{TRACE}-{SPAN}-{flags}", "vendor=1")
    assert (it.trace, it.parent_id) == (TRACE, int(SPAN, 16))
    assert (it.sampled, it.state) == (sampled, "vendor=1")
    assert it.span_id != it.parent_id
    part = it.child()
    assert (part.trace_id, part.parent_id, part.sampled) == (it.trace_id, it.span_id, sampled)
    assert part.span_id != it.span_id


def test_a_later_version_may_hold_more() -> None:
    assert TraceContext.of(f"cc-{TRACE}-{SPAN}-01-more").trace == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",  # which this version has not
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_malformed_begins_a_trace(header: str) -> None:
    it = TraceContext.of(header)
    assert it.trace != TRACE
    assert (it.parent_id, it.sampled) == (None, None)
    assert it.trace_id
    assert it.span_id


def test_a_long_state_is_left_out() -> None:
    assert TraceContext.of(f"00-{TRACE}-{SPAN}-01", "a=" + "b" * 600).state == ""


def test_steps_of_one_kind_become_one() -> None:
    steps = [
        Step("thinker", "prefill", 0.0, 0.1),
        Step("thinker", "decode", 0.1, 0.2),
        Step("talker", "decode", 0.15, 0.3),
        Step("thinker", "decode", 0.2, 0.4),
    ]
    merged = merge_steps(steps)
    assert [(*k, v.start, v.stop, v.count) for k, v in merged.items()] == [
        ("thinker", "prefill", 0.0, 0.1, 1),
        ("thinker", "decode", 0.1, 0.4, 2),
        ("talker", "decode", 0.15, 0.3, 1),
    ]

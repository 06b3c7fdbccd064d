"""What is read off the trace of a served load."""

from __future__ import annotations

from typing import Any

import pytest

from bench.plan.runs import FRAME_S, OPENING_S
from bench.plan.trace import (
    LEAST,
    PROMPT,
    Ran,
    admit_ms,
    alone_ms,
    announced_ms,
    between_ms,
    by_size,
    decode_shares,
    delivery_ms,
    filled,
    frames_prompt_share,
    host_ms,
    least_squares,
    of_the_loop,
    opening_ms,
    overlaps,
    prompt_shares,
    shape_of,
    traced_steps,
    varies,
    vocoder_beside,
    vocoder_shares,
)
from stretto.planner.table import BINS, bin_of

SHAPES = [(1, 1), (1, 8), (4, 1), (4, 4)]


def ran(lane: str, rows: int, start_ms: float, ms: float, prompt: bool = False, tokens: int = 0, size: int = -1) -> Ran:
    own = size if size >= 0 else PROMPT if prompt else bin_of(rows)
    return Ran(lane, prompt, rows, tokens or rows, start_ms / 1e3, ms, own)


def test_what_ran_beside_what() -> None:
    text, frames = ran("text", 3, 0.0, 10.0), ran("frames", 5, 4.0, 4.0, True)
    call = ran("vocoder", 1, 6.0, 1.0, size=3)
    overlaps([text, frames, call])
    assert text.beside == pytest.approx({(None, None): 6.0, (PROMPT, None): 3.0, (PROMPT, 3): 1.0})
    assert frames.beside == pytest.approx({(2, None): 3.0, (2, 3): 1.0})
    assert call.beside == pytest.approx({(2, 3): 1.0})
    assert text.part(lambda other, _: other is None) == pytest.approx(0.6)


def served(rng_ms: float, share: float, slowed: float) -> list[Ran]:
    """Steps of four rows that take 5 ms alone: some of them alone, some beside frames for a while, some of these beside
    a call of the vocoder too."""
    steps: list[Ran] = []
    for i in range(60):
        start, beside = 100.0 * i, rng_ms * (i % 6)
        call = 0.5 * (i % 3) if beside > 2 else 0.0
        got = share * (beside - call) + share * slowed * call
        steps.append(ran("text", 4, start, beside + 5.0 - got))
        steps += [ran("frames", 8, start, beside)] if beside else []
        steps += [ran("vocoder", 2, start + 0.5, call, size=2)] if call else []
    overlaps(steps)
    return [s for s in steps if s.lane == "text"]


def test_shares_are_found_again() -> None:
    steps = served(1.0, 0.6, 0.5)
    assert alone_ms(steps) == [(4, 5.0, 10)]
    shares = decode_shares(steps, lambda rows: 5.0)
    [(own, other, share, _)] = shares
    assert (BINS[own], BINS[other]) == (4, 8)
    assert share == pytest.approx(0.6, abs=0.002)
    assert vocoder_shares(steps, lambda rows: 5.0, filled(shares)) == {2: pytest.approx(0.5, abs=0.01)}


def test_what_was_not_seen_is_as_the_nearest() -> None:
    share = filled([(2, 3, 0.5, 10), (4, 3, 0.7, 10), (4, PROMPT, 0.9, 10)])
    assert [share(own, 3) for own in (0, 2, 4, 7)] == [0.5, 0.5, 0.7, 0.7]
    assert share(0, 7) == 0.5, "no such size of the other: its nearest, then the nearest of its own"
    assert share(0, PROMPT) == 0.9


def test_prompts_are_told_by_the_pass_that_holds_them() -> None:
    """A small pass takes 9 ms alone and gets on at half its speed beside frames, a large one 20 ms and at a quarter."""
    steps: list[Ran] = []
    for i in range(40):
        small, beside = i % 2 == 0, 2.0 * (i % 5)
        alone, share, tokens = (9.0, 0.5, 110 + i % 8) if small else (20.0, 0.25, 900 + i)
        steps.append(ran("text", 3, 200.0 * i, beside + alone - share * beside, True, tokens))
        steps += [ran("frames", 8, 200.0 * i, beside)] if beside else []
    overlaps(steps)
    alone_ms, shares = prompt_shares([s for s in steps if s.lane == "text"], (128, 1024), {})
    assert alone_ms == pytest.approx({128: 9.0, 1024: 20.0}, abs=0.01)
    eight = bin_of(8)
    assert shares == {True: {eight: pytest.approx(0.5, abs=0.01)}, False: {eight: pytest.approx(0.25, abs=0.01)}}
    beside = ran("frames", 2, 0.0, 8.0, True, 226)
    overlaps([beside, ran("text", 2, 0.0, 8.0, True, 216)])
    assert frames_prompt_share([beside], lambda tokens: tokens / 56.5) == 0.5


def test_what_would_be_less_than_the_least_share_is_that() -> None:
    """And the others make up for it; rows that fit nothing are left out."""
    rows = [{"a": 1.0, "b": 0.1 * i} for i in range(10)] * 4
    wanted = [1.0 - 0.01 * i for i in range(10)] * 4
    found = least_squares([*rows, {"a": 1.0}], [*wanted, 2.0])
    assert found["b"] == LEAST
    assert found["a"] == pytest.approx(0.955 - LEAST * 0.45)


def test_calls_are_told_by_the_shape_that_they_run_in() -> None:
    assert [shape_of(SHAPES, *call) for call in ((1, 1), (1, 2), (2, 1), (3, 2), (4, 8))] == [
        (1, 1), (1, 8), (4, 1), (4, 4), (4, 4),
    ]  # fmt: skip
    calls = [ran("vocoder", 2, 20.0 * i, 3.0 + i, size=2) for i in range(3)] + [ran("vocoder", 1, 90.0, 1.0, size=0)]
    overlaps([*calls, ran("text", 1, 0.0, 60.0)])
    assert vocoder_beside(calls) == {2: 4.0}, "the last had nothing beside it"


Loop = list[tuple[str, float, float]]


def test_the_hosts_time_for_a_step_is_that_of_its_turn_in_the_loop() -> None:
    result: dict[str, Any] = {
        "steps": [
            ["thinker", "prefill", 1, 108, 1.0, 0.010],
            ["thinker", "decode", 1, 1, 1.010, 0.002],
            ["code2wav", "decode", 3, 2, 1.1, 0.001],
        ],
        "loop": [
            ["launch thinker", 0.990, 0.003], ["launch thinker", 1.001, 0.001], ["retire thinker", 1.0101, 0.0005],
            ["retire thinker", 1.0125, 0.0002], ["launch code2wav", 1.09, 0.0004], ["retire code2wav", 1.1011, 0.0001],
        ],
    }  # fmt: skip
    prompt, decode, call = traced_steps(result, SHAPES)
    assert [s.size for s in (prompt, decode, call)] == [PROMPT, 0, SHAPES.index((4, 4))]
    assert (prompt.launch_ms, prompt.retire_ms, prompt.prompts) == (pytest.approx(3.0), pytest.approx(0.5), 1)
    assert decode.launch_ms == pytest.approx(1.0)
    assert decode.noticed_s == pytest.approx(0.0005)
    assert call.retire_ms == pytest.approx(0.1)
    with pytest.raises(ValueError, match="zip"):
        of_the_loop([prompt], [])


def test_prompts_cost_the_host_more_than_the_rows_beside_them() -> None:
    steps = [ran("text", 1, 0.0, 1.0), ran("text", 2, 1.0, 1.0), ran("text", 3, 2.0, 1.0, True, 109 + 108)]
    for s, launch, retire in zip(steps, (0.3, 0.4, 2.8), (0.1, 0.2, 0.9), strict=True):
        s.launch_ms, s.retire_ms = launch, retire
    assert steps[2].prompts == 2
    found = host_ms(steps)
    assert found == {
        "launch": [(1, 0.3), (2, 0.4)], "retire": [(1, 0.1), (2, 0.2)], "launch_prompts": [(2, 2.5)],
        "retire_prompts": [(2, 0.8)],
    }  # fmt: skip
    assert by_size([(3, 1.0), (4, 2.0), (8, 5.0)]) == [(3.5, 1.5), (8, 5.0)]
    assert varies(steps, {"text": found}, prompts=True) == [1.0] * 200
    wide = [ran("text", 8, 0.0, 1.0) for _ in range(2)]
    for s, launch in zip(wide, (0.5, 1.5), strict=True):
        s.launch_ms, s.retire_ms = launch, launch
    spread = varies(wide, {"text": {"launch": [(8.0, 1.0)], "retire": [(8.0, 1.0)]}}, prompts=False)
    assert (min(spread), max(spread)) == (0.5, 1.5)
    assert sum(spread) == pytest.approx(200, abs=0.1)


def test_what_lies_between_two_turns_is_the_hosts_too() -> None:
    calls = [ran("vocoder", 3, 10.0, 1.0), ran("vocoder", 9, 30.0, 1.0)]
    loop: Loop = [
        ("retire talker", 0.0, 0.001), ("launch code2wav", 0.0015, 0.001), ("retire code2wav", 0.012, 0.001),
        ("launch talker", 0.0132, 0.001), ("launch code2wav", 0.0146, 0.001), ("retire code2wav", 0.031, 0.001),
        ("launch talker", 0.050, 0.001),
    ]  # fmt: skip
    found = between_ms(calls, loop)
    assert found["send"] == [(3, pytest.approx(0.5)), (9, pytest.approx(0.4))]
    assert found["push"] == [(3, pytest.approx(0.2))], "behind the second call it slept"
    assert admit_ms([("admit", 0.0, 0.0007), ("admit", 0.00071, 0.0003), ("admit", 0.5, 0.0009)]) == (0.8, 0.3)


def test_the_way_to_the_host_and_back() -> None:
    samples = [
        {"sent": 1.0 + i, "end": 0.5, "first_text": 0.0208, "packets": [[0.1 + 0.0005 * i, FRAME_S - OPENING_S]]}
        for i in range(3)
    ]
    run = {"began": 100.0, "samples": samples}
    loop: Loop = [("admit", 100.0 + t, 0.0) for t in (0.5, 1.003, 2.004, 3.005)]
    assert announced_ms(run, loop) == [3.0, 4.0, 5.0], "the first was of one that does not count"
    loop += [("retire thinker", 101.0 + i + 0.019, 0.001) for i in range(3)]
    assert opening_ms(run, loop) == pytest.approx(0.8)


def test_packets_of_a_call_come_one_after_the_other() -> None:
    """0.4 ms to the listener, 0.05 ms of the server for a packet and 0.02 ms for each frame in it."""
    loop: Loop = [("retire code2wav", 10.0 * i, 0.0) for i in range(31)]
    samples: list[dict[str, Any]] = [{"sent": 0.0, "packets": []} for _ in range(4)]
    for call in range(30):
        ms = 0.4
        for n, sample in enumerate(samples[: 1 + call % 4]):
            frames = 1 + (call + n) % 5 if sample["packets"] else 1
            ms += 0.05 + 0.02 * frames
            opening = 0.0 if sample["packets"] else OPENING_S
            sample["packets"].append([10.0 * call + ms / 1e3, frames * FRAME_S - opening])
    assert delivery_ms([{"began": 0.0, "samples": samples}], loop) == pytest.approx((0.4, 0.05, 0.02), abs=1e-3)

"""When frames leave: a player that starts with the first packet never waits, and packets grow where
there is time."""

import random
from itertools import pairwise

import pytest

from stretto.loadtest.player import Packet, play
from stretto.models.qwen3_omni.config import OPENING_S
from stretto.models.speech.pacing import (
    FORGET_AFTER_S,
    MIN_FIRST_PACKET,
    RECENT_S,
    SLACK_S,
    STALLED_S,
    FrameTiming,
    PacketPacing,
    select_due,
)
from stretto.models.speech.talker_stage import FRAME_S


def pacing(
    size: int, max_size: int, ramp: int | None, timing: FrameTiming | None = None
) -> PacketPacing:
    return PacketPacing(size, max_size, ramp, timing or FrameTiming(FRAME_S, OPENING_S))


def vocoder(frames: int) -> float:
    """Seconds that a packet takes to the listener: longer for large ones, by less than the
    margin."""
    return 0.004 + 0.002 * frames


def sent(times: list[float], pace: PacketPacing) -> list[Packet]:
    """Packets of a stream whose frames are made at these times, as they reach the listener."""
    packets, waiting = [], 0
    for i, now in enumerate(times):
        pace.frame_made(now)
        waiting += 1
        if pace.is_due(waiting, False, now) or i == len(times) - 1:
            pace.packet_sent(waiting, now)
            sound = FRAME_S * waiting - (0 if packets else OPENING_S)
            packets.append(Packet(now + vocoder(waiting), sound))
            waiting = 0
    return packets


def sizes(packets: list[Packet]) -> list[int]:
    return [
        round((p.seconds + (OPENING_S if i == 0 else 0)) / FRAME_S) for i, p in enumerate(packets)
    ]


@pytest.mark.parametrize("every", [0.002, 0.0035, 0.01, 0.02, 0.03, 0.04, 0.05])
def test_a_player_from_the_first_packet_never_waits(every: float) -> None:
    packets = sent([every * i for i in range(200)], pacing(1, 8, 2))
    playback = play(packets)
    assert playback is not None
    assert playback.wait == 0
    assert sizes(packets)[0] == 1
    assert sum(sizes(packets)) == 200


def test_packet_size_follows_the_speed_of_the_device() -> None:
    fast = sizes(sent([0.003 * i for i in range(125)], pacing(1, 8, 2)))
    assert fast[:5] == [1, 2, 4, 8, 8]
    slow = sizes(sent([0.07 * i for i in range(20)], pacing(1, 8, 2)))
    assert slow[:10] == [1] * 10


@pytest.mark.parametrize("seed", range(20))
def test_uneven_frames_do_not_make_it_wait_either(seed: int) -> None:
    """Frames that take between 2 and 40 ms, in runs, as when prompts of others come in between."""
    rng = random.Random(seed)
    times, now = [], 0.0
    while len(times) < 300:
        pause = rng.choice([0.002, 0.005, 0.015, 0.04])
        for _ in range(rng.randint(1, 12)):
            now += pause * rng.uniform(0.5, 1.0)
            times.append(now)
    playback = play(sent(times, pacing(1, 8, 2)))
    assert playback is not None
    assert playback.wait == 0


def begins(pace: PacketPacing, frames: list[float]) -> float:
    """When the first packet of a stream with these frames leaves, if somebody looks every
    millisecond."""
    for ms in range(1000):
        now = frames[0] + ms / 1000
        waiting = sum(t <= now for t in frames)
        pace.last = frames[waiting - 1]
        if pace.is_due(waiting, False, now):
            return now
    raise AssertionError("it never leaves")


def test_first_packet_waits_only_on_a_slow_device() -> None:
    sound = FRAME_S - OPENING_S
    timing = FrameTiming(FRAME_S, OPENING_S)
    assert begins(pacing(1, 8, 2, timing), [5.0]) == 5.0
    timing.observe(0.01, 4.5)
    timing.observe(sound - SLACK_S, 4.9)
    assert begins(pacing(1, 8, 2, timing), [5.0]) == 5.0
    timing.observe(0.075, 4.95)
    assert begins(pacing(1, 8, 2, timing), [5.0]) == pytest.approx(
        5.0 + 0.075 + SLACK_S - sound, abs=0.001
    )
    assert begins(pacing(1, 8, 2, timing), [5.0, 5.004]) == pytest.approx(5.004, abs=0.001), (
        "two frames play long enough"
    )
    assert begins(pacing(4, 8, 2, timing), [5.0] * 4) == 5.0
    timing.observe(0.01, 5.0)
    assert timing.slowest_s == 0.075, "one that is fast says nothing"
    later = 4.95 + RECENT_S + 0.01
    assert begins(pacing(1, 8, 2, timing), [later]) == later, "what was long ago does not count"
    timing.observe(0.02, later)
    assert timing.slowest_s == 0.02


@pytest.mark.parametrize("every", [0.025, 0.03, 0.04, 0.05])
def test_a_device_that_is_slow_at_best_sends_two_frames_first(every: float) -> None:
    """Even if it did nothing for minutes: a lone stream's next frames may be late, and there is
    nothing in hand."""
    timing = FrameTiming(FRAME_S, OPENING_S)
    sent([every * i for i in range(20)], pacing(1, 8, 2, timing))
    late = [600.0, 600 + 1.2 * every, 600 + 3.4 * every]
    packets = sent([*late, *(late[-1] + every * i for i in range(1, 20))], pacing(1, 8, 2, timing))
    assert sizes(packets)[0] == 2
    playback = play(packets)
    assert playback is not None
    assert playback.wait == 0


def test_a_cpu_is_slow_until_a_frame_was_quick_and_needs_more_room() -> None:
    sound = FRAME_S - OPENING_S
    timing = FrameTiming.on_cpu(FRAME_S, OPENING_S)
    assert begins(pacing(1, 8, 2, timing), [5.0, 5.04, 5.08]) == pytest.approx(5.08, abs=0.001)
    for quick, held in ((0.015, True), (0.01, False)):
        timing.observe(quick, 5.1)
        assert (timing.first_packet_delay(sound, 9.0) > 0) == held
        assert (
            FrameTiming(FRAME_S, OPENING_S, fastest_s=quick).first_packet_delay(sound, 9.0) == 0
        ), "no GPU waits for that"


def test_slow_frames_of_a_quick_device_do_not_make_it_a_slow_one() -> None:
    sound = FRAME_S - OPENING_S
    timing = FrameTiming(FRAME_S, OPENING_S)
    timing.observe(0.01, 1.0)
    for step in range(20):  # a burst of prompts
        timing.observe(0.07, 1.0 + 0.07 * step)
    assert timing.first_packet_delay(sound, 9.0) == 0
    now = 1000.0
    timing.observe(0.07, now)
    assert timing.fastest_s < 0.011, "time without frames says nothing"
    for _ in range(round(4 * FORGET_AFTER_S / 0.03)):  # always slow: so is the device
        now += 0.03
        timing.observe(0.03, now)
        timing.observe(
            0.03, now
        )  # frames of another stream in the same step are no more of a reason
    assert timing.first_packet_delay(sound, now + 1) == pytest.approx(
        MIN_FIRST_PACKET * 0.03 - sound
    )


def test_a_quick_device_is_forgotten_by_time_and_not_by_streams() -> None:
    timing = FrameTiming(FRAME_S, OPENING_S)
    timing.observe(0.01, 1.0)
    for step in range(100):
        for _ in range(128):
            timing.observe(0.05, 1.0 + 0.05 * step)
    assert timing.fastest_s < 0.011


def test_waiting_for_text_or_listener_is_no_measure_of_speed() -> None:
    timing = FrameTiming(FRAME_S, OPENING_S)
    busy = pacing(1, 8, 2, timing)
    for now in (1.0, 3.0, 3.01, 5.0, 5.01):
        busy.frame_made(now)
        assert timing.fastest_s < 0.011
    assert timing.slowest_s == pytest.approx(0.01)


@pytest.mark.parametrize("seed", range(20))
def test_newcomers_in_a_burst_of_prompts_never_wait(seed: int) -> None:
    """Frames of all streams take 20 ms, and 40 to 70 while prompts are read; streams begin at any
    moment after the first of those."""
    rng = random.Random(seed)
    timing = FrameTiming(FRAME_S, OPENING_S)
    running = pacing(1, 8, 2, timing)
    steps, now = [], 0.0
    for burst in range(6):
        for _ in range(10):
            now += rng.uniform(0.04, 0.07) if burst % 2 else 0.02
            steps.append(now)
    starts = {rng.randrange(13, 20) + 20 * k for k in range(3) for _ in range(2)}
    for start in starts:
        timing.slowest_s, timing.slowest_at = 0.0, 0.0
        running.last = None
        for t in steps[: start + 1]:
            running.frame_made(t)
        timing.observe(0.07, steps[start])  # another stream had the longest step
        pace = pacing(1, 1, None, timing)
        first = begins(pace, steps[start : start + 3])
        have = sum(t <= first for t in steps[start:])
        packets = [Packet(first, FRAME_S * have - OPENING_S)]
        packets += [Packet(t, FRAME_S) for t in steps[start + have :]]
        playback = play(packets)
        assert playback is not None
        assert playback.wait == 0


def test_set_sizes_are_limits() -> None:
    quick = [0.001 * i for i in range(60)]
    assert set(sizes(sent(quick, pacing(1, 1, 2)))) == {1}
    assert sizes(sent(quick, pacing(4, 25, None)))[:3] == [
        4,
        25,
        25,
    ]
    assert sizes(sent(quick, pacing(4000, 4000, None))) == [60], "all at the end"


def test_due_packets_take_others_along_but_a_first_does_not() -> None:
    def pace(size: int, begun: float | None = 0.0) -> PacketPacing:
        return PacketPacing(
            size, 8, 2, timing=FrameTiming(FRAME_S, OPENING_S), first_sent=begun, sent=100, last=0.0
        )

    assert select_due([(pace(8), 8, False), (pace(8), 4, False), (pace(8), 3, False)], 0.0) == [
        True,
        True,
        False,
    ]
    assert select_due([(pace(1, None), 1, False), (pace(8), 7, False)], 0.0) == [True, False]
    assert select_due([(pace(8), 7, False), (pace(4), 3, False)], 0.0) == [False, False]


def test_frames_of_a_request_that_waits_for_text_leave_in_time() -> None:
    pace = PacketPacing(8, 8, 2, timing=FrameTiming(FRAME_S, OPENING_S), first_sent=0.0, sent=100)
    runs_out = 100 * FRAME_S - OPENING_S
    assert not pace.is_due(3, True, runs_out - 1.01 * STALLED_S)
    assert pace.is_due(3, True, runs_out - 0.99 * STALLED_S)
    assert not pace.is_due(3, False, runs_out - 0.99 * STALLED_S)
    assert not pace.is_due(0, True, runs_out)


def test_streams_that_began_at_different_times_fall_into_step() -> None:
    """The vocoder's calls: as few as for one stream, however many there are."""
    paces = [pacing(1, 8, 2) for _ in range(6)]
    waiting = [0] * 6
    calls: list[int] = []
    for step in range(120):
        now = 0.005 * step
        for i, pace in enumerate(paces):
            if step >= 3 * i:  # each begins a little later
                pace.frame_made(now)
                waiting[i] += 1
        go = select_due([(p, n, False) for p, n in zip(paces, waiting, strict=True)], now)
        for i, left in enumerate(go):
            if left and waiting[i]:
                paces[i].packet_sent(waiting[i], now)
                waiting[i] = 0
        if any(go):
            calls.append(step)
    late = [b - a for a, b in pairwise([c for c in calls if c > 40])]
    assert min(late) >= 4

"""When frames leave: a player that starts with the first packet never waits, and packets grow where
there is time."""

import random
from itertools import pairwise

import pytest

from stretto.loadtest.player import Packet, play
from stretto.models.qwen3_omni.config import OPENING_S
from stretto.models.speech.talker_stage import FRAME_S
from stretto.stage.pacing import FORGET_S, LATELY_S, ROOM, SLACK_S, STALLED_S, Pace, Rhythm, leaving


def vocoder(frames: int) -> float:
    """Seconds that a packet takes to the listener: longer for large ones, by less than the
    margin."""
    return 0.004 + 0.002 * frames


def sent(times: list[float], pace: Pace) -> list[Packet]:
    """Packets of a stream whose frames are made at these times, as they reach the listener."""
    packets, waiting = [], 0
    for i, now in enumerate(times):
        pace.came(now)
        waiting += 1
        if pace.due(waiting, False, now) or i == len(times) - 1:
            pace.left(waiting, now)
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
    packets = sent([every * i for i in range(200)], Pace(1, 8, 2, Rhythm(FRAME_S, OPENING_S)))
    heard = play(packets)
    assert heard is not None
    assert heard.wait == 0
    assert sizes(packets)[0] == 1
    assert sum(sizes(packets)) == 200


def test_packets_grow_fast_on_a_fast_device_and_stay_small_on_a_slow_one() -> None:
    fast = sizes(sent([0.003 * i for i in range(125)], Pace(1, 8, 2, Rhythm(FRAME_S, OPENING_S))))
    assert fast[:5] == [1, 2, 4, 8, 8]
    slow = sizes(sent([0.07 * i for i in range(20)], Pace(1, 8, 2, Rhythm(FRAME_S, OPENING_S))))
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
    heard = play(sent(times, Pace(1, 8, 2, Rhythm(FRAME_S, OPENING_S))))
    assert heard is not None
    assert heard.wait == 0


def begins(pace: Pace, frames: list[float]) -> float:
    """When the first packet of a stream with these frames leaves, if somebody looks every
    millisecond."""
    for ms in range(1000):
        now = frames[0] + ms / 1000
        waiting = sum(t <= now for t in frames)
        pace.last = frames[waiting - 1]
        if pace.due(waiting, False, now):
            return now
    raise AssertionError("it never leaves")


def test_a_first_packet_waits_only_while_frames_take_longer_than_it_plays() -> None:
    sound = FRAME_S - OPENING_S
    rhythm = Rhythm(FRAME_S, OPENING_S)
    assert begins(Pace(1, 8, 2, rhythm), [5.0]) == 5.0
    rhythm.took(0.01, 4.5)
    rhythm.took(sound - SLACK_S, 4.9)
    assert begins(Pace(1, 8, 2, rhythm), [5.0]) == 5.0
    rhythm.took(0.075, 4.95)
    assert begins(Pace(1, 8, 2, rhythm), [5.0]) == pytest.approx(
        5.0 + 0.075 + SLACK_S - sound, abs=0.001
    )
    assert begins(Pace(1, 8, 2, rhythm), [5.0, 5.004]) == pytest.approx(5.004, abs=0.001), (
        "two frames play long enough"
    )
    assert begins(Pace(4, 8, 2, rhythm), [5.0] * 4) == 5.0
    rhythm.took(0.01, 5.0)
    assert rhythm.worst_s == 0.075, "one that is fast says nothing"
    later = 4.95 + LATELY_S + 0.01
    assert begins(Pace(1, 8, 2, rhythm), [later]) == later, "what was long ago does not count"
    rhythm.took(0.02, later)
    assert rhythm.worst_s == 0.02


@pytest.mark.parametrize("every", [0.025, 0.03, 0.04, 0.05])
def test_a_device_that_is_slow_at_best_sends_two_frames_first(every: float) -> None:
    """Even if it did nothing for minutes: a lone stream's next frames may be late, and there is
    nothing in hand."""
    rhythm = Rhythm(FRAME_S, OPENING_S)
    sent([every * i for i in range(20)], Pace(1, 8, 2, rhythm))
    late = [600.0, 600 + 1.2 * every, 600 + 3.4 * every]
    packets = sent([*late, *(late[-1] + every * i for i in range(1, 20))], Pace(1, 8, 2, rhythm))
    assert sizes(packets)[0] == 2
    heard = play(packets)
    assert heard is not None
    assert heard.wait == 0


def test_a_cpu_is_slow_until_a_frame_was_quick_and_needs_more_room() -> None:
    sound = FRAME_S - OPENING_S
    rhythm = Rhythm.on_cpu(FRAME_S, OPENING_S)
    assert begins(Pace(1, 8, 2, rhythm), [5.0, 5.04, 5.08]) == pytest.approx(5.08, abs=0.001)
    for quick, held in ((0.015, True), (0.01, False)):
        rhythm.took(quick, 5.1)
        assert (rhythm.hold(sound, 9.0) > 0) == held
        assert Rhythm(FRAME_S, OPENING_S, quick_s=quick).hold(sound, 9.0) == 0, (
            "no GPU waits for that"
        )


def test_slow_frames_of_a_quick_device_do_not_make_it_a_slow_one() -> None:
    sound = FRAME_S - OPENING_S
    rhythm = Rhythm(FRAME_S, OPENING_S)
    rhythm.took(0.01, 1.0)
    for step in range(20):  # a burst of prompts
        rhythm.took(0.07, 1.0 + 0.07 * step)
    assert rhythm.hold(sound, 9.0) == 0
    now = 1000.0
    rhythm.took(0.07, now)
    assert rhythm.quick_s < 0.011, "time without frames says nothing"
    for _ in range(round(4 * FORGET_S / 0.03)):  # all are slow for a long time: so is the device
        now += 0.03
        rhythm.took(0.03, now)
        rhythm.took(0.03, now)  # frames of another stream in the same step are no more of a reason
    assert rhythm.hold(sound, now + 1) == pytest.approx(ROOM * 0.03 - sound)


def test_a_quick_device_is_forgotten_by_time_and_not_by_streams() -> None:
    rhythm = Rhythm(FRAME_S, OPENING_S)
    rhythm.took(0.01, 1.0)
    for step in range(100):
        for _ in range(128):
            rhythm.took(0.05, 1.0 + 0.05 * step)
    assert rhythm.quick_s < 0.011


def test_who_waits_for_text_or_for_a_listener_says_nothing_about_the_device() -> None:
    rhythm = Rhythm(FRAME_S, OPENING_S)
    busy = Pace(1, 8, 2, rhythm)
    for now in (1.0, 3.0, 3.01, 5.0, 5.01):
        busy.came(now)
        assert rhythm.quick_s < 0.011
    assert rhythm.worst_s == pytest.approx(0.01)


@pytest.mark.parametrize("seed", range(20))
def test_newcomers_in_a_burst_of_prompts_never_wait(seed: int) -> None:
    """Frames of all streams take 20 ms, and 40 to 70 while prompts are read; streams begin at any
    moment after the first of those."""
    rng = random.Random(seed)
    rhythm, running = Rhythm(FRAME_S, OPENING_S), Pace(1, 8, 2, Rhythm(FRAME_S, OPENING_S))
    running.rhythm = rhythm
    steps, now = [], 0.0
    for burst in range(6):
        for _ in range(10):
            now += rng.uniform(0.04, 0.07) if burst % 2 else 0.02
            steps.append(now)
    starts = {rng.randrange(13, 20) + 20 * k for k in range(3) for _ in range(2)}
    for start in starts:
        rhythm.worst_s, rhythm.at = 0.0, 0.0
        running.last = None
        for t in steps[: start + 1]:
            running.came(t)
        rhythm.took(0.07, steps[start])  # another stream had the longest step
        pace = Pace(1, 1, None, rhythm)
        first = begins(pace, steps[start : start + 3])
        have = sum(t <= first for t in steps[start:])
        packets = [Packet(first, FRAME_S * have - OPENING_S)]
        packets += [Packet(t, FRAME_S) for t in steps[start + have :]]
        heard = play(packets)
        assert heard is not None
        assert heard.wait == 0


def test_stated_sizes_are_kept_to() -> None:
    quick = [0.001 * i for i in range(60)]
    assert set(sizes(sent(quick, Pace(1, 1, 2, Rhythm(FRAME_S, OPENING_S))))) == {1}
    assert sizes(sent(quick, Pace(4, 25, None, Rhythm(FRAME_S, OPENING_S))))[:3] == [4, 25, 25]
    assert sizes(sent(quick, Pace(4000, 4000, None, Rhythm(FRAME_S, OPENING_S)))) == [60], (
        "all at the end"
    )


def test_those_that_are_due_take_others_along_and_a_first_packet_does_not() -> None:
    def pace(size: int, begun: float | None = 0.0) -> Pace:
        return Pace(size, 8, 2, rhythm=Rhythm(FRAME_S, OPENING_S), begun=begun, sent=100, last=0.0)

    assert leaving([(pace(8), 8, False), (pace(8), 4, False), (pace(8), 3, False)], 0.0) == [
        True,
        True,
        False,
    ]
    assert leaving([(pace(1, None), 1, False), (pace(8), 7, False)], 0.0) == [True, False]
    assert leaving([(pace(8), 7, False), (pace(4), 3, False)], 0.0) == [False, False]


def test_frames_of_a_request_that_waits_for_text_leave_in_time() -> None:
    pace = Pace(8, 8, 2, rhythm=Rhythm(FRAME_S, OPENING_S), begun=0.0, sent=100)
    runs_out = 100 * FRAME_S - OPENING_S
    assert not pace.due(3, True, runs_out - 1.01 * STALLED_S)
    assert pace.due(3, True, runs_out - 0.99 * STALLED_S)
    assert not pace.due(3, False, runs_out - 0.99 * STALLED_S)
    assert not pace.due(0, True, runs_out)


def test_streams_that_began_at_different_times_fall_into_step() -> None:
    """The vocoder's calls: as few as for one stream, however many there are."""
    paces = [Pace(1, 8, 2, Rhythm(FRAME_S, OPENING_S)) for _ in range(6)]
    waiting = [0] * 6
    calls: list[int] = []
    for step in range(120):
        now = 0.005 * step
        for i, pace in enumerate(paces):
            if step >= 3 * i:  # each begins a little later
                pace.came(now)
                waiting[i] += 1
        go = leaving([(p, n, False) for p, n in zip(paces, waiting, strict=True)], now)
        for i, left in enumerate(go):
            if left and waiting[i]:
                paces[i].left(waiting[i], now)
                waiting[i] = 0
        if any(go):
            calls.append(step)
    late = [b - a for a, b in pairwise([c for c in calls if c > 40])]
    assert min(late) >= 4

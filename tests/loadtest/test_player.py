from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.loadtest.player import Packet, Playback, gaps, play

ticks = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 10)), min_size=1, max_size=8)


def by_hand(packets: list[tuple[int, int]], prebuffer: int) -> tuple[int, int, int, int]:
    """A player that looks at its buffer every tick: (start, stop, underruns, wait)."""
    now, in_hand, start, underruns, wait = 0, 0, None, 0, 0
    waiting = False
    left = list(packets)
    while left or in_hand:
        while left and left[0][0] <= now:
            in_hand += left.pop(0)[1]
        if start is None and ((in_hand >= prebuffer and in_hand > 0) or not left):
            start = now
        if start is not None:
            if in_hand:
                in_hand, waiting = in_hand - 1, False
            else:
                underruns, wait, waiting = underruns + (not waiting), wait + 1, True
        now += 1
    assert start is not None
    return start, now, underruns, wait


@given(ticks, st.integers(0, 30))
def test_equals_a_player_that_is_stepped_through_time(
    steps: list[tuple[int, int]], prebuffer: int
) -> None:
    at, packets = 0, []
    for wait, length in steps:
        at += wait
        packets.append((at, length))
    got = play([Packet(float(at), float(length)) for at, length in packets], float(prebuffer))
    assert got is not None
    assert (got.start, got.stop, got.underruns, got.wait) == by_hand(packets, prebuffer)


def test_nothing_to_play() -> None:
    assert play([]) is None
    assert gaps([]) == []


def test_a_late_packet_is_one_underrun() -> None:
    packets = [Packet(1.0, 0.5), Packet(1.75, 0.5), Packet(1.8, 0.5)]
    assert play(packets) == Playback(start=1.0, stop=2.75, underruns=1, wait=0.25)
    assert play(packets, prebuffer=0.6) == Playback(start=1.75, stop=3.25, underruns=0, wait=0.0)
    assert gaps(packets) == [0.75, 1.8 - 1.75]


def test_a_lead_longer_than_the_answer_waits_for_its_end() -> None:
    assert play([Packet(1.0, 0.5), Packet(3.0, 0.5)], prebuffer=60.0) == Playback(3.0, 4.0, 0, 0.0)

"""A simulated listener: from the packets' arrival times, what would have been heard. Pure
functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Packet:
    at: float  # seconds from the request, when it arrived
    seconds: float  # how long it sounds


@dataclass(frozen=True, slots=True)
class Playback:
    start: float  # when the first sample was played
    stop: float  # when the last one had been
    underruns: int  # how often the player had nothing to play
    wait: float  # for how long, in all


def play(packets: Sequence[Packet], prebuffer: float = 0.0) -> Playback | None:
    """What a player does that starts once `prebuffer` seconds are in hand (or all there is), and
    after each underrun goes on with the next packet. With 0 it starts at the first packet. None if
    there is nothing to play."""
    if not packets:
        return None
    in_hand = list(accumulate(p.seconds for p in packets))
    opening = next(
        (n for n, seconds in enumerate(in_hand) if seconds >= prebuffer), len(packets) - 1
    )
    start = packets[opening].at
    dry = start + in_hand[opening]  # when the player runs out of what it has
    underruns, wait = 0, 0.0
    for packet in packets[opening + 1 :]:
        if packet.at > dry:
            underruns += 1
            wait += packet.at - dry
            dry = packet.at
        dry += packet.seconds
    return Playback(start, dry, underruns, wait)


def gaps(packets: Sequence[Packet]) -> list[float]:
    """Seconds between one packet and the next."""
    return [b.at - a.at for a, b in pairwise(packets)]

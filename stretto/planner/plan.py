"""The search: how many sessions one card carries within the goal, and so how many cards it takes. Deterministic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from stretto.client.stats import percentile
from stretto.errors import Invalid
from stretto.planner.heard import Asked, Heard
from stretto.planner.replay import Card, replay
from stretto.planner.table import Table

WARM_S, LOOKED_S = 10.0, 25.0
"""Of each replay: until it is as busy as it gets, and what is looked at."""
MOST_PER_CARD = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that ask, listen to the answer, pause and ask again."""

    sessions: int
    asked: Asked
    pause_s: float

    def rate(self, table: Table) -> float:
        """Requests a second, of one session."""
        return 1.0 / (self.asked.frames * table.frame_s + self.pause_s)


@dataclass(frozen=True, slots=True)
class Goal:
    first_audio_p99_s: float
    stutters: float = 0.01  # share of answers in which a player who starts at once may ever wait


@dataclass(frozen=True, slots=True)
class Seen:
    """What listeners of one card met."""

    sessions: int
    first_audio_p50_s: float
    first_audio_p99_s: float
    rtf_p99: float
    stutters: float
    streams: float  # being made at once, on average
    cache: float  # of the KV caches, the largest part that was ever in use in one of them

    def meets(self, goal: Goal) -> bool:
        return self.first_audio_p99_s <= goal.first_audio_p99_s and self.stutters <= goal.stutters and self.rtf_p99 < 1


@dataclass(frozen=True, slots=True)
class Plan:
    cards: int
    seen: Seen  # with the sessions spread evenly over the cards
    most: int  # sessions that one card would carry
    or_more: bool  # one card carries all, so more were not tried
    speech_hours_per_hour: float

    def cost(self, price: float) -> float:
        """Of an hour of speech, by what a card costs an hour."""
        return self.cards * price / self.speech_hours_per_hour


def poisson(rate: float, asked: Asked, seed: int) -> Iterator[tuple[float, Asked]]:
    random, now = Random(seed), 0.0
    while True:
        now += random.expovariate(rate)
        yield now, asked


def look(table: Table, load: Load, sessions: int, seed: int = 0) -> Seen:
    """Replay this number of sessions on one card."""
    rate, card = sessions * load.rate(table), Card(table, seed=seed)
    heard = replay(card, poisson(rate, load.asked, seed), WARM_S + LOOKED_S)
    seen = [h for h in heard if h.arrived >= WARM_S] or heard
    if not seen:  # nobody came: then one who comes alone
        seen = replay(card, iter([(card.now, load.asked)]), card.now + 1.0)
    first, rtf = ([f(h) for h in seen] for f in (_first, _rtf))
    making = sum((h.end or 0.0) - h.arrived for h in seen) / LOOKED_S
    late = sum(h.waited > 0 for h in seen) / len(seen)
    return Seen(sessions, quantile(first, 0.5), quantile(first, 0.99), quantile(rtf, 0.99), late, making, card.cache)


def make_plan(table: Table, load: Load, goal: Goal) -> Plan:
    """The most sessions that a card carries within the goal, by halving; then the cards, and what they then carry."""
    one = look(table, load, 1)
    if not one.meets(goal):
        raise Invalid(
            f"no number of {table.gpu} meets the goal: a session alone on one has its first audio after "
            f"{1e3 * one.first_audio_p99_s:.0f} ms, speech made in {100 * one.rtf_p99:.0f} % of its length and "
            f"{100 * one.stutters:.0f} % of its answers wait", "first_audio_p99",
        )  # fmt: skip
    low, high, found = 1, 2, False
    while low < load.sessions and high <= MOST_PER_CARD and not found:
        if look(table, load, high).meets(goal):
            low, high = high, 2 * high
        else:
            found = True
    while found and high - low > max(1, low // 20):
        middle = (low + high) // 2
        if look(table, load, middle).meets(goal):
            low = middle
        else:
            high = middle
    cards = math.ceil(load.sessions / low)
    spoken = load.sessions * load.rate(table) * load.asked.frames * table.frame_s
    return Plan(cards, look(table, load, math.ceil(load.sessions / cards)), low, not found, spoken)


def quantile(values: Sequence[float], part: float) -> float:
    """As in the reports of measured runs."""
    return percentile(sorted(values), part)


def _first(heard: Heard) -> float:
    assert heard.first_audio is not None
    return heard.first_audio


def _rtf(heard: Heard) -> float:
    return heard.rtf

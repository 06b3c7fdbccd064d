"""Which hosts of an engine share a card, and whose turn it is to load there. On the event loop;
imports no torch.

A host sizes its KV pools by what is free when it loads. So hosts that share a card load one after
the other, and each is told which stages are to come after it, so that it leaves room for them (see
`stage/host/memory_plan.py`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stretto.hardware import card_of


@dataclass(slots=True, eq=False)
class Seat:
    """One host's share of a card."""

    stages: tuple[str, ...]
    loaded: bool = False


@dataclass(slots=True, eq=False)
class Cards:
    """Of one engine, over all its pipelines. Each host has its seat from the beginning."""

    _seats: defaultdict[int, list[Seat]] = field(default_factory=lambda: defaultdict(list))
    _turns: defaultdict[int, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )

    def seat(self, device: str, stages: tuple[str, ...]) -> Seat:
        seat, card = Seat(stages), card_of(device)
        if card is not None:
            self._seats[card].append(seat)
        return seat

    def shared(self, device: str) -> bool:
        card = card_of(device)
        return card is not None and len(self._seats[card]) > 1

    @asynccontextmanager
    async def turn(self, device: str, seat: Seat) -> AsyncIterator[tuple[tuple[str, ...], ...]]:
        """A host's time to load; yields the stages of each host that will load on the same card
        after it."""
        card = card_of(device)
        if card is None or not self.shared(device):
            yield ()
            return
        async with self._turns[card]:
            yield tuple(s.stages for s in self._seats[card] if s is not seat and not s.loaded)

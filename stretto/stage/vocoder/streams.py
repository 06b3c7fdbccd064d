"""A vocoder's streams and the slots that they hold. Used by `core.py`, on the loop thread."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stretto.stage.request import Reason
from stretto.types import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class Primer:
    """Frames of a cloned voice's clip that a stream starts with; their audio is discarded. The
    vocoder's state behind them is stored by `key`, for the next stream with the same primer."""

    key: bytes
    # [n, 16]
    codes: npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Stream:
    request: RequestId
    arrival: int
    slot: int | None = None
    # codes [n, 16] each
    pending: deque[npt.NDArray[np.int64]] = field(default_factory=deque)
    num_pending: int = 0
    # its first frames came
    since_ns: int = 0
    # frames
    launched: int = 0
    # frames whose samples are out
    done: int = 0
    # no more frames will come
    ended: Reason | None = None
    # when the sound sent so far runs out; None: nothing sent yet
    deadline: float | None = None
    in_flight: int = 0
    removed: bool = False
    primer: Primer | None = None

    @property
    def primed(self) -> int:
        """Frames of its primer, which come before its own in all counts here."""
        return len(self.primer.codes) if self.primer is not None else 0

    @property
    def num_ready(self) -> int:
        """Frames that one step may take: none behind the primer's last, where its state is kept."""
        left = self.primed - self.launched
        return min(self.num_pending, left) if left > 0 else self.num_pending

    @property
    def order(self) -> tuple[float, int]:
        return float("-inf") if self.deadline is None else self.deadline, self.arrival

    def add(self, codes: npt.NDArray[np.int64]) -> None:
        self.since_ns = self.since_ns or time.perf_counter_ns()
        self.pending.append(codes)
        self.num_pending += len(codes)

    def take(self, n: int, into: npt.NDArray[np.int64]) -> None:
        """The first n waiting frames, as columns of `into`."""
        self.num_pending -= n
        at = 0
        while at < n:
            head = self.pending.popleft()
            if len(head) > n - at:
                self.pending.appendleft(head[n - at :])
                head = head[: n - at]
            into[:, at : at + len(head)] = head.T
            at += len(head)


class Slots:
    """Which stream holds which slot, and which ones wait for one."""

    def __init__(self, count: int) -> None:
        # a heap: the lowest slots are used first
        self.free = list(range(count))
        self.waiting: deque[Stream] = deque()
        self.by_slot: dict[int, Stream] = {}

    def assign(self) -> Iterator[tuple[Stream, int]]:
        """Give slots to streams whose frames are there, the most urgent first."""
        if not self.free or not self.waiting:
            return
        for stream in sorted((s for s in self.waiting if s.num_pending), key=lambda s: s.order):
            if not self.free:
                break
            stream.slot = slot = heapq.heappop(self.free)
            self.by_slot[slot] = stream
            self.waiting.remove(stream)
            yield stream, slot

    def give_up(self, stream: Stream) -> None:
        """A stream is over, and with it what waits."""
        stream.pending.clear()
        stream.num_pending = 0
        if stream.slot is None:
            if stream in self.waiting:
                self.waiting.remove(stream)
        elif not stream.in_flight:
            self.release(stream)

    def release(self, stream: Stream) -> None:
        """The slot is free once no step in flight writes to it."""
        if stream.slot is not None:
            del self.by_slot[stream.slot]
            heapq.heappush(self.free, stream.slot)
            stream.slot = None

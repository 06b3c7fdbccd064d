"""A host as the engine sees it, wherever it runs: written to, listened to, watched. Asyncio;
imports no torch.

What a host sends is put on its pipeline's queue of reports, which the engine reads (see
`pipeline.py`); so is its death. How a host is started and how bytes get to it is for others:
`local_host.py` (a child on this machine) and `remote_host.py` (another machine). A `Launcher` makes
one or the other."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from stretto.errors import StageDead, StrettoError, WireError
from stretto.messages.hosts import Ping, Stats
from stretto.messages.requests import PREFIX, FromHost, ToHost, decode_from_host, encode, lengths
from stretto.preprocess.packed_prompt import Bytes

log = logging.getLogger(__name__)

HostState = Literal["starting", "ready", "dead"]
ENDED = "it ended"
LOOPBACK = "127.0.0.1"


class Unusable(StageDead):
    """A host that will not work however often it is started: of another version, say."""


@dataclass(frozen=True, slots=True, eq=False)
class HostMessage:
    """A message from a host, with the bytes that came behind it."""

    host: HostHandle
    message: FromHost
    blob: bytes


@dataclass(frozen=True, slots=True, eq=False)
class HostDied:
    """The last report of a host: nothing of it follows."""

    host: HostHandle


@dataclass(frozen=True, slots=True, eq=False)
class StagesLost:
    """Stages of a pipeline that requests can no longer reach, and why."""

    stages: frozenset[str]
    error: StrettoError


HostReports = asyncio.Queue[HostMessage | HostDied]
"""The reports of all hosts of a pipeline, in the order in which they came."""


class HostHandle(ABC):
    """`reports`: where its messages go, and a `HostDied`, once, when the host or its channel is
    gone. `number`: its place in the pipeline's placement."""

    def __init__(
        self, name: str, reports: HostReports, number: int = 0, device: str = "cpu"
    ) -> None:
        self.name = name
        self.number = number
        # as the host itself calls it
        self.device = device
        self.address = LOOPBACK  # at which other hosts reach it
        self.state: HostState = "starting"
        self.reason = ENDED  # why it died, as far as that is known
        self.malformed = False  # it sent what cannot be applied; the rest is ignored
        self.stats: Stats | None = None  # the latest
        # when it was pinged, if it has sent nothing since
        self.unanswered_since: float | None = None
        self._reports = reports
        self._incomplete = bytearray()  # the beginning of a message whose rest has not come yet
        self._writable = asyncio.Event()  # the channel takes more without growing its buffer
        self._writable.set()

    # -- how it is started and reached

    @property
    @abstractmethod
    def pid(self) -> int | None: ...

    @abstractmethod
    async def start(self) -> None:
        """Returns when it can be written to. `OSError`: it could not be started, which may be tried
        again."""

    @abstractmethod
    async def stop(self, timeout: float = 5.0) -> None:
        """End it, politely first. (One that is still loading does not listen, and has nothing to
        lose.)"""

    @abstractmethod
    def kill(self) -> None:
        """At once."""

    @abstractmethod
    def _write(self, data: Bytes) -> None:
        """Queue bytes; nothing waits. Before `start` has returned, they go nowhere."""

    @abstractmethod
    def _close(self) -> None:
        """Close what is still open of the channel."""

    # -- what every host has

    async def writable(self) -> None:
        """Waits until the write buffer is below its low-water mark, or the host is dead."""
        await self._writable.wait()

    def pause(self, on: bool) -> None:
        if on and self.state != "dead":
            self._writable.clear()
        else:
            self._writable.set()

    def send(self, message: ToHost, blob: Bytes = b"") -> None:
        """Queue a message. One to a dead host is dropped: its death is a report of its own."""
        if self.state == "dead":
            return
        self._write(encode(message, blob))
        if blob:
            self._write(blob)

    @property
    def offset(self) -> float:
        """Its monotonic clock less ours."""
        return 0.0

    def note_stats(self, stats: Stats) -> None:
        """It has answered a ping."""
        self.stats = stats

    def ping(self, number: int) -> None:
        self.send(Ping(number))
        if self.unanswered_since is None:
            self.unanswered_since = time.monotonic()

    def kill_if_silent(self, seconds: float) -> None:
        """Kill it if it has not answered a ping for `seconds`: it hangs, or was stopped."""
        if (
            self.state == "ready"
            and self.unanswered_since is not None
            and time.monotonic() - self.unanswered_since > seconds
        ):
            self.reason = f"it stalled: no answer for {seconds:g} s"
            self.kill()

    def receive(self, data: Bytes) -> None:
        """Take bytes from the host, and report the messages that they complete. Called by its
        channel."""
        if self.state == "dead":
            return
        self._incomplete += data
        at, size = 0, len(self._incomplete)
        try:
            with memoryview(self._incomplete) as view:
                while size - at >= PREFIX.size:
                    header, blob = lengths(view[at : at + PREFIX.size])
                    middle = at + PREFIX.size + header
                    end = middle + blob
                    if end > size:
                        break
                    message = decode_from_host(view[at + PREFIX.size : middle])
                    self.unanswered_since = None
                    if isinstance(message, Stats):
                        self.note_stats(message)
                    self._reports.put_nowait(HostMessage(self, message, bytes(view[middle:end])))
                    at = end
        except WireError as e:
            self.reject(e)
        else:
            del self._incomplete[:at]

    def reject(self, error: Exception) -> None:
        """It sent no message, or one that cannot be applied: it is dead, and what it has sent since
        is ignored."""
        if not isinstance(error, StrettoError | LookupError | ValueError):
            log.error("host %s: a message cannot be applied", self.name, exc_info=error)
        self.malformed = True
        self.reason = f"it cannot be understood: {error}"
        self.mark_dead()

    def mark_ready(self) -> None:
        """It has loaded its stages. Without effect if it has died since."""
        if self.state == "starting":
            self.state = "ready"

    def note_reason(self, reason: str) -> None:
        """It has reported itself why it is about to end."""
        self.reason = reason

    def mark_dead(self, reason: str | None = None) -> None:
        """The channel is gone, and so is the host, whatever its process still does. A reason that
        the host gave itself goes before `reason`."""
        if self.state != "dead":
            self.state = "dead"
            if reason is not None and self.reason == ENDED:
                self.reason = reason
            self._writable.set()
            self.kill()
            self._close()
            self._reports.put_nowait(HostDied(self))

    async def wait_exit(self) -> None:  # noqa: B027 - most are told why with the end
        """Wait until `reason` says how it ended, as far as that can be known."""

    def exit_error(self) -> StageDead:
        return StageDead(f"host {self.name} died: {self.reason}")


class Launcher(Protocol):
    """Makes the hosts of an engine."""

    def host(self, name: str, number: int, device: str, reports: HostReports) -> HostHandle:
        """A host that has not been started, for a device as the settings name it."""
        ...


class StateChanges:
    """Lets tasks wait until hosts and links are in some state. One for a pipeline; whoever changes
    a state calls `notify`."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.failure: str | None = None  # why the pipeline will not come up at all
        self._name = name
        self._timeout_s = timeout_s
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.notify()

    async def wait(self, predicate: Callable[[], bool]) -> None:
        """`StageDead`: it takes too long, or never will be."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self.failure is None and not predicate():
                    await self._next()
        except TimeoutError:
            raise StageDead(
                f"pipeline {self._name} did not come up in {self._timeout_s:.0f} s"
            ) from None
        if self.failure is not None:
            raise StageDead(self.failure)

    async def _next(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

"""A host as the orchestrator sees it, wherever it runs: spoken to, listened to, watched. Asyncio;
imports no torch.

How a host is started and how bytes get to it is for others: `process.py` (a child on this machine)
and `remote.py` (another machine). A `Launcher` makes one or the other."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from stretto.errors import StageDead, StrettoError
from stretto.messages.hosts import Ping, Stats
from stretto.messages.requests import PREFIX, FromHost, ToHost, decode_from_host, encode, lengths
from stretto.preprocess.packed_prompt import Bytes

HostState = Literal["starting", "ready", "dead"]
ENDED = "it ended"
LOOPBACK = "127.0.0.1"


class Unusable(StageDead):
    """A host that will not work however often it is started: of another version, say."""


class HostHandle(ABC):
    """`on_message` is called for each message, `on_death` once, when the host or its channel is
    gone."""

    def __init__(
        self, name: str, on_message: OnMessage, on_death: OnDeath, device: str = "cpu"
    ) -> None:
        # as the host itself calls it
        self.name = name
        self.device = device
        self.address = LOOPBACK  # at which other hosts reach it
        self.state: HostState = "starting"
        self.reason = ENDED  # why it died, as far as we were told
        self.stats: Mapping[str, float] = {}  # as it said last
        # when it was asked for a sign of life, if none has come since
        self.asked: float | None = None
        self._on_message = on_message
        self._on_death = on_death
        self._heard = bytearray()  # of a message that is not complete yet
        self._writable = asyncio.Event()  # the channel takes more without growing its buffer
        self._writable.set()

    # -- how it is started and reached

    @property
    @abstractmethod
    def pid(self) -> int | None: ...

    @abstractmethod
    async def start(self) -> None:
        """Until it can be written to. `OSError`: it could not be started, which may be tried
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
        """Of the channel, what is still open."""

    # -- what every host has

    async def writable(self) -> None:
        """Until what was sent has left, all but a little. A host that dies frees whoever waits for
        it."""
        await self._writable.wait()

    def pause(self, on: bool) -> None:
        if on and self.state != "dead":
            self._writable.clear()
        else:
            self._writable.set()

    def send(self, message: ToHost, blob: Bytes = b"") -> None:
        """Queue a message. A dead host swallows it: its death is told by `on_death`, once."""
        if self.state == "dead":
            return
        self._write(encode(message, blob))
        if blob:
            self._write(blob)

    @property
    def offset(self) -> float:
        """Its monotonic clock less ours."""
        return 0.0

    def told(self, stats: Stats) -> None:  # noqa: B027 - a child of ours has our clock: nothing to learn
        """It has answered a ping."""

    def ping(self, number: int) -> None:
        self.send(Ping(number))
        if self.asked is None:
            self.asked = time.monotonic()

    def end_if_silent(self, seconds: float) -> None:
        """Kill it if it has not answered a ping for `seconds`: it hangs, or was stopped."""
        if (
            self.state == "ready"
            and self.asked is not None
            and time.monotonic() - self.asked > seconds
        ):
            self.reason = f"it stalled: no answer for {seconds:g} s"
            self.kill()

    def take(self, data: Bytes) -> None:
        """Bytes from the host: as many messages as they complete."""
        if self.state == "dead":
            return
        self._heard += data
        at, size = 0, len(self._heard)
        try:
            with memoryview(self._heard) as heard:
                while size - at >= PREFIX.size:
                    header, blob = lengths(heard[at : at + PREFIX.size])
                    middle = at + PREFIX.size + header
                    if middle + blob > size:
                        break
                    self.asked = None
                    message = decode_from_host(heard[at + PREFIX.size : middle])
                    self._on_message(self, message, bytes(heard[middle : middle + blob]))
                    at = middle + blob
        except (
            StrettoError,
            LookupError,
            ValueError,
        ) as e:  # nonsense: no frame, or a message that fits nothing here
            self.reason = f"it cannot be understood: {e}"
            self.lost()
        else:
            del self._heard[:at]

    def lost(self, reason: str | None = None) -> None:
        """The channel is gone, and so is the host, whatever its process still does. What it said
        itself of its end is the better reason."""
        if self.state != "dead":
            self.state = "dead"
            if reason is not None and self.reason == ENDED:
                self.reason = reason
            self._writable.set()
            self.kill()
            self._close()
            self._on_death(self)

    async def buried(self) -> None:  # noqa: B027 - most are told why with the end
        """Wait until `reason` says how it ended, as far as that can be known."""

    def death(self) -> StageDead:
        return StageDead(f"host {self.name} died: {self.reason}")


OnMessage = Callable[[HostHandle, FromHost, bytes], None]
OnDeath = Callable[[HostHandle], None]


class Launcher(Protocol):
    """Where the hosts of an engine come from."""

    def host(self, name: str, device: str, on_message: OnMessage, on_death: OnDeath) -> HostHandle:
        """A host that has not been started, for a device as the settings name it."""
        ...

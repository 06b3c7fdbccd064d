"""A host process as the orchestrator sees it: started, spoken to, watched. Asyncio; imports no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from stretto.errors import StageDead, StrettoError
from stretto.orchestrator.messages import PREFIX, FromHost, Ping, Quit, ToHost, decode_from_host, encode, lengths
from stretto.prompt.packed import Bytes

State = Literal["starting", "ready", "dead"]


class HostProcess:
    """`on_message` is called for each message, `on_death` once, when the process or its channel is gone."""

    def __init__(
        self,
        name: str,
        on_message: Callable[[HostProcess, FromHost, bytes], None],
        on_death: Callable[[HostProcess], None],
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.reason = "it ended"  # why it died, as far as we were told
        self.stats: Mapping[str, float] = {}  # as it said last
        self.asked: float | None = None  # when it was asked for a sign of life, if none has come since
        self._on_message, self._on_death = on_message, on_death
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._heard = bytearray()  # of a message that is not complete yet
        self._writable = asyncio.Event()  # the channel takes more without growing its buffer
        self._writable.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "stretto.stage.host",
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: _Ear(self), sock=ours)

    async def writable(self) -> None:
        """Until what was sent has left, all but a little. A host that dies frees whoever waits for it."""
        await self._writable.wait()

    def pause(self, on: bool) -> None:
        if on and self.state != "dead":
            self._writable.clear()
        else:
            self._writable.set()

    def send(self, message: ToHost, blob: Bytes = b"") -> None:
        """Queue a message. A dead host swallows it: its death is told by `on_death`, once."""
        if self._transport is None or self.state == "dead":
            return
        self._transport.write(encode(message, blob))
        if blob:
            self._transport.write(blob)

    def ping(self, number: int) -> None:
        self.send(Ping(number))
        if self.asked is None:
            self.asked = time.monotonic()

    def end_if_silent(self, seconds: float) -> None:
        """Kill it if it has not said a word for so long after it was asked to: it hangs, or was stopped."""
        if self.state == "ready" and self.asked is not None and time.monotonic() - self.asked > seconds:
            self.reason = f"it stalled: no answer for {seconds:g} s"
            self.kill()

    async def stop(self, timeout: float = 5.0) -> None:
        """End it, politely first. (One that is still loading does not listen, and has nothing to lose.)"""
        if self.state == "starting":
            self.kill()
        self.send(Quit())
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), timeout)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self.state = "dead"
        if self._transport is not None:
            self._transport.close()

    def kill(self) -> None:
        """At once. (Not by `Process.kill`, which would first look whether it has ended, and so take its exit status
        away from whoever waits for it.)"""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def take(self, data: bytes) -> None:
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
        except (StrettoError, LookupError, ValueError) as e:  # nonsense: no frame, or a message that fits nothing here
            self.reason = f"it cannot be understood: {e}"
            self.lost()
        else:
            del self._heard[:at]

    def lost(self) -> None:
        """The channel is gone, and so is the host, whatever its process still does."""
        if self.state != "dead":
            self.state = "dead"
            self._writable.set()
            self.kill()
            if self._transport is not None:
                self._transport.close()  # else its descriptor would stay until this object is collected
            self._on_death(self)

    def death(self) -> StageDead:
        return StageDead(f"host {self.name} died: {self.reason}")


class _Ear(asyncio.Protocol):
    """What the event loop calls. Plain callbacks: a stream's reader wakes a task for every few bytes, and a host says
    a few thousand things a second."""

    def __init__(self, host: HostProcess) -> None:
        self.host = host

    def data_received(self, data: bytes) -> None:
        self.host.take(data)

    def pause_writing(self) -> None:
        self.host.pause(True)

    def resume_writing(self) -> None:
        self.host.pause(False)

    def connection_lost(self, error: Exception | None) -> None:
        self.host.lost()

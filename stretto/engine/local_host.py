"""A host that is a child process of this one, on a socket pair. Asyncio; imports no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from stretto._process import HOST_ENVIRONMENT, end_of, seen_end, start_apart
from stretto.config.placement import visible_device
from stretto.engine.host_handle import ENDED, HostHandle, HostReports
from stretto.hardware import cards
from stretto.messages.hosts import Quit
from stretto.preprocess.packed_prompt import Bytes

EXIT_S = 2.0  # for a process whose channel is gone to be gone too


class HostProcess(HostHandle):
    """`environment` is added to ours."""

    def __init__(
        self,
        name: str,
        reports: HostReports,
        number: int = 0,
        device: str = "cpu",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, reports, number, device)
        self._environment = environment or {}
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with ExitStack() as ends:
            ends.enter_context(theirs)
            ends.enter_context(ours)
            self._process = await start_apart(
                sys.executable,
                "-m",
                "stretto.stage.host.process",
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**HOST_ENVIRONMENT, **os.environ, **self._environment},
            )
            theirs.close()
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(
                lambda: _HostProtocol(self), sock=ours
            )
            ends.pop_all()  # the transport has it now

    async def stop(self, timeout: float = 5.0) -> None:
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
        self._close()

    def kill(self) -> None:
        """At once. (Not by `Process.kill`, which would first look whether it has ended, and so take
        its exit status away from whoever waits for it.)"""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _write(self, data: Bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()  # else its descriptor would stay until this object is collected

    def mark_dead(self, reason: str | None = None) -> None:
        if self.state != "dead" and self._process is not None and self.reason == ENDED:
            self.reason = seen_end(self._process.pid) or ENDED
        super().mark_dead(reason)

    async def wait_exit(self) -> None:
        """Wait until the process is gone, so that `reason` says how it ended, but not for long: the
        process may hang in a driver."""
        if self._process is not None and self.reason == ENDED:
            with suppress(TimeoutError):
                self.reason = end_of(await asyncio.wait_for(self._process.wait(), EXIT_S)) or ENDED


class _HostProtocol(asyncio.Protocol):
    """What the event loop calls. Plain callbacks: a stream's reader wakes a task for every few
    bytes, and a host sends a few thousand messages a second."""

    def __init__(self, host: HostProcess) -> None:
        self.host = host

    def data_received(self, data: bytes) -> None:
        self.host.receive(data)

    def pause_writing(self) -> None:
        self.host.pause(True)

    def resume_writing(self) -> None:
        self.host.pause(False)

    def connection_lost(self, error: Exception | None) -> None:
        self.host.mark_dead()


class LocalLauncher:
    """Children of this process, each shown the card that it uses and no other."""

    def __init__(self, found: Sequence[str] | None = None) -> None:
        self._cards = cards() if found is None else found

    def host(self, name: str, number: int, device: str, reports: HostReports) -> HostHandle:
        device_name, environment = visible_device(device, self._cards)
        return HostProcess(name, reports, number, device_name, environment)

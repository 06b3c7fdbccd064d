"""Hosts on other machines: an agent there starts the host and dials back; this is the
engine's end.

Control goes over one ZeroMQ connection per host, encrypted and authenticated (`invitation.py`).
Both ends watch it: the connection's end is an event of the socket's monitor, at once where a
process died, within `SILENCE_MS` where a machine or the network is gone. Everything is on the event
loop: ZeroMQ's own thread does the handshake, the heartbeats and the reading, and its descriptors
wake us. They are edge-triggered, so each turn goes on until nothing is left to do. Imports no
torch."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from stretto.engine.host_handle import HostHandle, HostReports, Unusable
from stretto.engine.invitation import (
    DATA,
    ENDED,
    HEARTBEAT_MS,
    HELLO,
    MOST_BYTES,
    PIECE,
    QUEUED,
    SILENCE_MS,
    Hello,
    Invitation,
    new_nonce,
    reachable,
)
from stretto.errors import StageDead
from stretto.messages.hosts import Quit, Stats
from stretto.preprocess.packed_prompt import Bytes
from stretto.transport.zmq_auth import PendingConnections, encrypt, key_of

log = logging.getLogger(__name__)

START_S = 60.0  # for an agent to be started and to dial back
HIGH = 4 << 20  # bytes that wait to be sent, above which whoever sends large things should wait
BURST = 64  # messages in one turn: others on the event loop want theirs
RETRY_S = 0.005
PINGS = 16  # whose time of asking is remembered
DRIFT = 1e-4
"""Seconds that two clocks may part in a second: twice what cheap quartz does."""
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENT = struct.Struct("<HI")


class Started(Protocol):
    """An agent that was started somewhere."""

    def on_end(self, callback: Callable[[StageDead], None]) -> None:
        """`callback` is called once, on the event loop, with the reason why the agent is over.
        `Unusable`: no other would do better."""
        ...

    def kill(self) -> None:
        """At once, with its host."""
        ...


class Starter(Protocol):
    """Starts agents on machines of its choice."""

    async def start(self, invitation: Invitation, number: int) -> Started:
        """Start the agent of host number `number`. `OSError`: it may be tried again; `StageDead`:
        it would fail again."""
        ...


@dataclass(slots=True)
class ClockOffset:
    """How far another machine's monotonic clock is from ours, by asking it the time: `offset` is
    their clock less ours, true within `error` at the time of `at`.

    An answer is off by at most half of its round trip, so the fastest recent one is used. Clocks
    drift, so the error of an old answer grows with time, until a new one is better."""

    offset: float = 0.0
    error: float = float("inf")
    at: float = 0.0

    def add(self, sent: float, received: float, theirs: float) -> None:
        """They were asked at `sent`, answered at `theirs` by their clock, and we received it at
        `received`."""
        error = (received - sent) / 2
        if 0 <= error <= self.error + DRIFT * (received - self.at):
            self.offset = theirs - (sent + received) / 2
            self.error = error
            self.at = received


class RemoteHost(HostHandle):
    """`address`: at which agents reach us."""

    def __init__(
        self,
        name: str,
        reports: HostReports,
        number: int,
        device: str,
        starter: Starter,
        secret: bytes,
        address: str,
    ) -> None:
        super().__init__(name, reports, number, device)
        self.clock = ClockOffset()
        self._starter = starter
        self._secret = secret
        self._own_address = address
        self._agent: Started | None = None
        self._agent_pid: int | None = None
        self._wire: _Wire | None = None
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._pinged_at: dict[int, float] = {}
        self._over = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The agent's process, on its own machine."""
        return self._agent_pid

    @property
    def offset(self) -> float:
        return self.clock.offset

    async def start(self) -> None:
        nonce = new_nonce()
        self._wire = wire = _Wire(self, nonce, self._secret, self._own_address)
        invitation = wire.invitation
        try:
            self._agent = await self._starter.start(invitation, self.number)
            self._agent.on_end(self._agent_ended)
            hello = await asyncio.wait_for(asyncio.shield(self._hello), START_S)
            hello.check_version()
        except TimeoutError:
            self._give_up()
            raise OSError(
                f"the agent of {self.name} did not dial {invitation.address} within {START_S:g} s"
            ) from None
        except BaseException:
            self._give_up()
            raise
        self.address = hello.address
        self._agent_pid = hello.pid

    def ping(self, number: int) -> None:
        if (
            self._agent_pid is not None
        ):  # nothing goes before `Configure`, which is sent when `start` returns
            super().ping(number)
            self._pinged_at[number] = time.monotonic()
            while len(self._pinged_at) > PINGS:
                self._pinged_at.pop(next(iter(self._pinged_at)))

    def note_stats(self, stats: Stats) -> None:
        super().note_stats(stats)
        sent = self._pinged_at.pop(stats.number, None)
        if sent is not None:
            self.clock.add(sent, time.monotonic(), stats.clock)

    async def stop(self, timeout: float = 5.0) -> None:
        if self.state == "starting":
            self._give_up()
        elif self.state == "ready":
            self.send(Quit())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), timeout)
        self.state = "dead"
        self._give_up()

    def kill(self) -> None:
        if self._agent is not None:
            self._agent.kill()

    def _give_up(self) -> None:
        self.kill()
        self._close()

    def _write(self, data: Bytes) -> None:
        if self._wire is not None and self._agent_pid is not None:
            self._wire.write(data)

    def _close(self) -> None:
        self._over.set()
        if not self._hello.done():
            self._hello.cancel()
        if self._wire is not None:
            self._wire.close()

    # -- what its wire and its agent say

    def greeted(self, hello: Hello) -> None:
        if not self._hello.done():
            self._hello.set_result(hello)

    def ended(self, reason: str) -> None:
        self._over.set()
        self.mark_dead(reason)

    def _agent_ended(self, reason: StageDead) -> None:
        if not self._hello.done():  # it never got through: `start` raises it
            again = OSError(f"the agent of {self.name} ended: {reason}")
            self._hello.set_exception(reason if isinstance(reason, Unusable) else again)
        elif self.state != "dead":
            self.ended(str(reason))


class _Wire:
    """The engine's end of one connection: a listener for one agent."""

    def __init__(self, host: RemoteHost, nonce: str, secret: bytes, address: str) -> None:
        self._host = host
        self._secret = secret
        try:
            s: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        except zmq.ZMQError as e:
            raise OSError(e.errno, f"no socket for {host.name}: {e}") from e
        self._socket = s
        try:
            self._monitor = self._listen(s, nonce, address)
        except zmq.ZMQError as e:
            s.close(0)
            raise OSError(e.errno, f"cannot listen at {address}: {e}") from e
        self._pending = PendingConnections()
        self._peer = b""
        self._peer_fd = -1
        self._out: deque[bytes | memoryview] = deque()
        self._queued = 0
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        self._fds = (int(s.FD), int(self._monitor.FD))
        for fd in self._fds:
            self._loop.add_reader(fd, self._poll)
        self._poll()

    def _listen(self, s: zmq.Socket[bytes], nonce: str, address: str) -> zmq.Socket[bytes]:
        """Listen for the agent; returns the socket on which the connection's events come."""
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        s.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send without room is refused, not lost
        s.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        s.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        s.set_hwm(QUEUED)
        s.ipv6 = ":" in address
        purpose = Invitation("", nonce, "").purpose
        encrypt(s, key_of(self._secret, purpose), listens=True)
        s.bind(f"tcp://{reachable(address, 0).removesuffix('0')}*")
        port = int(s.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.invitation = Invitation(reachable(address, port), nonce, self._host.name)
        # Not those of failed handshakes: they tell an error's number, no descriptor. The
        # connection's end follows.
        return s.get_monitor_socket(_GONE | zmq.EVENT_ACCEPTED)

    def write(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE):
            self._out.append(view[at : at + PIECE])
        self._queued += len(view)
        self._poll()

    def close(self) -> None:
        if self._socket.closed:
            return
        for fd in self._fds:
            self._loop.remove_reader(fd)
        if self._soon is not None:
            self._soon.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _poll(self) -> None:
        """Do what can be done now. Called when a descriptor becomes readable, and by `write`."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        for _ in range(BURST):
            if self._socket.closed:
                return
            if self._socket_ready():
                self._receive()
            elif self._out and self._peer and self._socket_ready(zmq.POLLOUT):
                if not self._send():
                    self._soon = self._loop.call_later(RETRY_S, self._poll)
                    return
            elif not self._read_monitor():
                self._watch_pending()
                return
        self._soon = self._loop.call_soon(self._poll)

    def _socket_ready(self, what: int = zmq.POLLIN) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & what)

    def _send(self) -> bool:
        piece = self._out[0]
        try:
            self._socket.send_multipart(
                [self._peer, DATA, piece], zmq.NOBLOCK, copy=len(piece) < 1 << 16
            )
        except zmq.Again:
            return False
        except zmq.ZMQError:  # the peer has left; its end is an event of the monitor
            self._out.clear()
            self._queued = 0
            return True
        self._out.popleft()
        self._queued -= len(piece)
        self._host.pause(self._queued > HIGH)
        return True

    def _receive(self) -> None:
        who, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if len(frames) != 2:
            self._refuse(who)
        elif not self._peer:
            self._handshake(who, frames[0].bytes, frames[1])
        elif who.bytes == self._peer:
            kind = frames[0].bytes
            if kind == DATA:
                self._host.receive(frames[1].buffer)
            elif kind == ENDED:
                self._host.ended(frames[1].bytes[:200].decode(errors="replace"))

    def _handshake(self, who: zmq.Frame, kind: bytes, frame: zmq.Frame) -> None:
        try:
            hello = msgspec.msgpack.decode(frame.bytes, type=Hello) if kind == HELLO else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            hello = None
        if hello is None or not hello.proves(self.invitation, self._secret):
            self._refuse(frame)
            return
        self._peer = who.bytes
        self._peer_fd = frame.get(zmq.SRCFD)
        self._pending.remove(self._peer_fd)
        self._pending.shut_down(all_pending=True)
        self._host.greeted(hello)

    def _refuse(self, frame: zmq.Frame) -> None:
        self._pending.refuse(frame.get(zmq.SRCFD))
        log.warning("%s: somebody dialled who does not know the cluster's secret", self._host.name)

    def _read_monitor(self) -> bool:
        """Read the monitor: who connected and who left. False: nobody. Events come late: a peer's
        arrival may be read after its hello, and after the departure of an earlier connection that
        had the same descriptor."""
        looked = left = False
        while self._monitor_readable():
            looked = True
            event, fd = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_ACCEPTED and fd == self._peer_fd:
                left = False
            elif event == zmq.EVENT_ACCEPTED:
                self._pending.add(fd)
            else:
                left = left or fd == self._peer_fd
                self._pending.remove(fd)
        if left:
            while (
                not self._socket.closed and self._socket_ready()
            ):  # its last words, which came before the event
                self._receive()
            self._host.ended("the connection to its machine ended")
        return looked

    def _monitor_readable(self) -> bool:
        events = self._monitor.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def _watch_pending(self) -> None:
        self._pending.shut_down(all_pending=bool(self._peer))
        if self._pending:
            self._soon = self._loop.call_later(self._pending.time_left() + RETRY_S, self._poll)


class RemoteLauncher:
    """Hosts whose agents `starter` starts, in the order of the placement. They call their device by
    `device`."""

    def __init__(self, starter: Starter, secret: bytes, address: str) -> None:
        self._starter = starter
        self._secret = secret
        self._address = address

    def host(self, name: str, number: int, device: str, reports: HostReports) -> HostHandle:
        return RemoteHost(name, reports, number, device, self._starter, self._secret, self._address)

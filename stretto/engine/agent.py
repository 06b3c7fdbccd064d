"""The agent: starts a host on its machine, as its child, and relays bytes between it and the
engine far away.

Run by whatever starts things there (a Ray actor), in one thread, from `run` to its end. The host is
the same program on the same socket pair as on the engine's machine and knows nothing of this.
The agent dials the engine and says hello. When the connection ends, the host is killed; when
the host ends, or the process that this machine's hosts depend on, the agent sends the reason and
the connection ends. Nothing is buffered but one message each way: whoever is slow slows the other.
Imports no torch."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import zmq

from stretto._process import HOST_ENVIRONMENT
from stretto.engine.host_handle import Unusable
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
)
from stretto.errors import StageDead
from stretto.transport.zmq_auth import encrypt, key_of

DIAL_S = 10.0
LINGER_MS = 2000
ORPHANED = "the process that keeps its machine's hosts died"
END_S = 5.0  # for a host to end by itself, when the engine sends nothing more
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT = struct.Struct("<HI")


class Agent:
    """`address`: of this machine, as other hosts reach it. `keeper`: a process without which the
    host must not go on, since nobody would end it."""

    def __init__(
        self,
        invitation: Invitation,
        secret: bytes,
        address: str,
        version: str | None = None,
        keeper: int | None = None,
    ) -> None:
        more = {} if version is None else {"version": version}
        self._invitation = invitation
        self._hello = Hello.make(invitation, secret, address, os.getpid(), **more)
        self._key = key_of(secret, invitation.purpose)
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = keeper

    def run(self) -> str:
        """Serve until the host or the engine is gone; returns which. `StageDead`: the host was not
        started."""
        with zmq.Context() as context:
            dealer = context.socket(zmq.DEALER)
            try:
                monitor = self._dial(dealer)
                return self._serve(dealer, monitor)
            finally:
                self.kill()
                dealer.disable_monitor()
                dealer.close(LINGER_MS)

    def kill(self) -> None:
        """Any thread."""
        if self._process is not None:
            self._process.kill()

    def _dial(self, dealer: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        dealer.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        dealer.set_hwm(QUEUED)
        dealer.ipv6 = self._invitation.address.startswith("[")
        encrypt(dealer, self._key)
        monitor = dealer.get_monitor_socket(
            _GONE | _REFUSED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        where = self._invitation.address
        dealer.connect(f"tcp://{where}")
        deadline, connected = time.monotonic() + DIAL_S, False
        while (left := deadline - time.monotonic()) > 0:
            if monitor.poll(int(1000 * left)):
                event = _event_of(monitor)
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    dealer.send_multipart([HELLO, msgspec.msgpack.encode(self._hello)])
                    return monitor
                # Who has another secret is not understood: it is disconnected without a word.
                if event & _REFUSED or (connected and event & _GONE):
                    raise Unusable(
                        f"the engine at {where} refused its agent: the cluster's secrets differ"
                    )
                if event & _GONE:
                    raise StageDead(f"nobody listens at {where}")
                connected = True
        raise StageDead(
            f"no answer from {where} within {DIAL_S:g} s: not reachable, or the cluster's secrets "
            f"differ"
        )

    def _serve(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto.stage.host.process", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**HOST_ENVIRONMENT, **os.environ},
            )
            theirs.close()
            ours.setblocking(False)
            with _watched(self._keeper) as keeper:
                end = _Relay(dealer, monitor, ours, keeper).run()
        if end == ORPHANED:
            self._process.kill()
            self._send_end(dealer, ORPHANED)
            return ORPHANED
        if end is None:
            return "the engine is gone"
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        self._send_end(dealer, f"its process {how}")
        return f"the host {how}"

    def _send_end(self, dealer: zmq.Socket[bytes], why: str) -> None:
        with suppress(zmq.Again):
            dealer.send_multipart([ENDED, why.encode()], zmq.NOBLOCK)


@contextmanager
def _watched(pid: int | None) -> Iterator[int | None]:
    """A descriptor that is readable when this process has ended; None where there is none, or the
    kernel gives none."""
    try:
        descriptor = None if pid is None else os.pidfd_open(pid)
    except ProcessLookupError:
        raise StageDead(ORPHANED) from None
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


class _Relay:
    """Bytes both ways, and at most one message of each in hand."""

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        host: socket.socket,
        keeper: int | None,
    ) -> None:
        self.dealer = dealer
        self.monitor = monitor
        self.host = host
        self.keeper = keeper
        self.inward = memoryview(b"")  # for the host, which has no room
        self.outward = b""  # for the engine

    def run(self) -> str | None:
        """Relay until the host has closed its end, or its keeper is gone; None: the engine is
        gone."""
        poller = zmq.Poller()
        poller.register(self.monitor, zmq.POLLIN)
        if self.keeper is not None:
            poller.register(self.keeper, zmq.POLLIN)
        while True:
            poller.register(
                self.dealer,
                (0 if self.inward else zmq.POLLIN) | (zmq.POLLOUT if self.outward else 0),
            )
            poller.register(
                self.host, (0 if self.outward else zmq.POLLIN) | (zmq.POLLOUT if self.inward else 0)
            )
            ready: dict[Any, int] = dict(poller.poll())
            if self.monitor in ready and _event_of(self.monitor) & (_GONE | _REFUSED):
                return None
            if self.keeper in ready:
                return ORPHANED
            if self.dealer in ready and not self.inward:
                self._receive()
            if self.inward:
                self._write_host()
            if self.host.fileno() in ready and not self.outward and not self._read_host():
                return "it ended"
            if self.outward:
                self._send()

    def _receive(self) -> None:
        with suppress(zmq.Again):
            kind, data = self.dealer.recv_multipart(zmq.NOBLOCK)
            if kind == DATA:
                self.inward = memoryview(data)

    def _write_host(self) -> None:
        try:
            self.inward = self.inward[self.host.send(self.inward) :]
        except BlockingIOError:
            pass
        except OSError:
            self.inward = memoryview(b"")  # it is ending; the next read says so

    def _read_host(self) -> bool:
        try:
            self.outward = self.host.recv(PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self.outward)

    def _send(self) -> None:
        with suppress(zmq.Again):
            self.dealer.send_multipart([DATA, self.outward], zmq.NOBLOCK)
            self.outward = b""


def _event_of(monitor: zmq.Socket[bytes]) -> int:
    frame, _address = monitor.recv_multipart()
    event: int = _EVENT.unpack(frame)[0]
    return event

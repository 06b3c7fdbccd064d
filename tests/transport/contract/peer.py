"""Other processes for the contract suite, to be killed.

Importing torch takes seconds, so a *nursery* process is started once, imports it, and forks a peer
for each request (it has a single thread, and says so, hence a fork is safe). A request is a JSON
line with a socket attached; the peer then speaks JSON lines on that socket. Run as a script it is
the nursery; imported, it is the way to ask it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from stretto.errors import StrettoError
from stretto.transport.contract import Endpoint, Receiver, Sender
from tests.transport.contract.links import (
    KITS,
    LONG_S,
    Footprint,
    Kit,
    check_numbered,
    numbered,
    take,
)

ROOT = Path(__file__).parents[3]


class Lines:
    """JSON lines on a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("r", encoding="utf-8")

    def send(self, **fields: Any) -> None:
        self._sock.sendall(json.dumps(fields).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise EOFError("the other process is gone")
        fields_read: dict[str, Any] = json.loads(line)
        return fields_read

    def close(self) -> None:
        self._file.close()
        self._sock.close()


@dataclass(slots=True)
class Peer:
    """A process that plays one end of a link."""

    pid: int
    lines: Lines

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait_gone(self) -> None:
        """Until the kernel has closed all that the process had open."""
        try:
            while True:
                self.lines.receive()
        except (EOFError, ConnectionResetError):
            self.lines.close()


class Nursery:
    def __enter__(self) -> Self:
        self._sock, theirs = socket.socketpair()
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=env,
        )
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._process.wait()

    def peer(self, kit: str, role: str, **fields: Any) -> Peer:
        """Roles: `send`, `receive` and `audit` (see the functions of these names)."""
        ours, theirs = socket.socketpair()
        request = json.dumps({"kit": kit, "role": role, **fields}).encode()
        socket.send_fds(
            self._sock, [len(request).to_bytes(4, "little") + request], [theirs.fileno()]
        )
        theirs.close()
        pid = int.from_bytes(self._sock.recv(4), "little")
        return Peer(pid, Lines(ours))


def _serve(sock: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    while True:
        head, fds, _flags, _ = socket.recv_fds(sock, 4, 1)
        if not head:
            return
        request = sock.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        pid = os.fork()
        if pid == 0:
            sock.close()
            _play(json.loads(request), Lines(socket.socket(fileno=fds[0])))
            os._exit(0)
        os.close(fds[0])
        sock.sendall(pid.to_bytes(4, "little"))


def _play(request: dict[str, Any], lines: Lines) -> None:
    kit = KITS[request["kit"]]
    options = replace(kit.options, generation=request.get("generation", 0))
    try:
        if request["role"] == "audit":
            _audit(kit, lines)
        elif request["role"] == "send":
            endpoint = msgspec.json.decode(request["endpoint"], type=Endpoint)
            sender = kit.connector.connect(endpoint, options)
            lines.send(ready=True)
            _send(sender, request, lines)
        else:
            receiver = kit.connector.listen("test-link.0", options)
            lines.send(endpoint=msgspec.json.encode(receiver.endpoint).decode())
            _receive(receiver, request, lines)
    except (StrettoError, AssertionError) as error:
        lines.send(error=type(error).__name__, message=str(error))
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the test is over


def _audit(kit: Kit, lines: Lines) -> None:
    """Use a link and close it, three times over; tell what is there after the last that was not
    after the first."""
    first: Footprint | None = None
    left, pause = "", threading.Event()
    for _ in range(3):
        sender, receiver = kit.pair(slot_bytes=1 << 20)
        for number in range(8):
            assert sender.put(numbered(number, 200_000), LONG_S)
            take(receiver).release()
        sender.close()
        receiver.close()
        del sender, receiver
        # A thread that has ended is still listed for a moment: the first time too, or it would hide
        # one that stays.
        pause.wait(0.05)
        first = first or Footprint.now()
        deadline = time.monotonic() + LONG_S
        while (left := Footprint.now().beyond(first)) and time.monotonic() < deadline:
            pause.wait(0.01)
    lines.send(left=left)


def _send(sender: Sender, request: dict[str, Any], lines: Lines) -> None:
    """Put numbered chunks (`count`, or without end), then stay until told to close."""
    for number in range(request.get("count", sys.maxsize)):
        while not sender.put(numbered(number, request["size"]), LONG_S):
            pass
    lines.send(done=True)
    lines.receive()
    sender.close()


def _receive(receiver: Receiver, request: dict[str, Any], lines: Lines) -> None:
    """Take, check and release (`hold` keeps the last so many), until the link ends."""
    held: list[Any] = []
    number = 0
    while number < request.get("count", sys.maxsize):
        chunk = receiver.take(LONG_S)
        if chunk is None:
            continue
        check_numbered(chunk, number, request["size"])
        number += 1
        held.append(chunk)
        if len(held) > request.get("hold", 0):
            held.pop(0).release()
    lines.send(done=True)
    lines.receive()
    receiver.close()


if __name__ == "__main__":
    import stretto.transport.shm
    import stretto.transport.tcp  # noqa: F401

    with socket.socket(fileno=int(sys.argv[1])) as control:
        _serve(control)

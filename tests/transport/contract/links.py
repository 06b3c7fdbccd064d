"""What the contract suite is run against: the connectors, and chunks whose bytes follow from their
number."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from stretto.errors import Invalid
from stretto.transport import wire
from stretto.transport.contract import Chunk, Connector, LinkOptions, Receiver, Sender
from stretto.transport.registry import connectors
from stretto.types import Mark, RequestId, Span

# for what must happen: generous, since machines are busy, and never reached when all is well
LONG_S = 60.0
SECRET = b"a secret that the tests share..."


def _options(**details: str) -> LinkOptions:
    return LinkOptions(
        slots=4, slot_bytes=1 << 16, secret=SECRET, connect_timeout_s=LONG_S, details=details
    )


@dataclass(frozen=True, slots=True)
class Kit:
    """One way to set a link up."""

    label: str
    name: str
    options: LinkOptions = field(default_factory=lambda: _options())

    @property
    def connector(self) -> Connector:
        return connectors.get(self.name)

    def pair(self, **changed: object) -> tuple[Sender, Receiver]:
        options = replace(self.options, **changed)  # type: ignore[arg-type]
        receiver = self.connector.listen("test-link.0", options)
        return self.connector.connect(receiver.endpoint, options), receiver


KITS = {
    kit.label: kit
    for kit in (
        Kit("shm", "shm"),
        Kit("tcp", "tcp"),
        Kit("mooncake", "mooncake"),
    )
}


@cache
def missing(name: str) -> str:
    """Why a connector cannot run here, or nothing."""
    try:
        connectors.get(name)
    except Invalid as error:
        return str(error)
    return ""


def pattern(number: int, size: int) -> torch.Tensor:
    """Bytes that no other number has at the same place."""
    return ((torch.arange(size, dtype=torch.int64) * 31 + number * 17) % 251).to(torch.uint8)


def numbered(number: int, size: int = 1000, request: str = "r0") -> Chunk:
    return wire.chunk(
        RequestId(request),
        Span(number, number + 1),
        Mark.MORE,
        {"rows": pattern(number, size)},
        seq=number,
    )


def check_numbered(chunk: Chunk, number: int, size: int = 1000) -> None:
    assert chunk.header.seq == number
    assert chunk.header.span == Span(number, number + 1)
    assert torch.equal(chunk.tensors["rows"], pattern(number, size))


def take(receiver: Receiver, timeout: float = LONG_S) -> Chunk:
    chunk = receiver.take(timeout)
    assert chunk is not None, "nothing came"
    return chunk


def eventually(holds: Callable[[], bool]) -> None:
    """For news that a network carries without anybody waiting for it."""
    pause = threading.Event()
    while not holds():
        pause.wait(0.01)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a link may not leave behind in this process or on this machine."""

    descriptors: int
    threads: int
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Footprint:
        # Semaphores are never ours: they come and go with other programs of the machine.
        segments = frozenset(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), segments)

    def beyond(self, before: Footprint, spare: int = 0) -> str:
        """What there is now that was not there before, in words. `spare` descriptors more are no
        matter."""
        found = []
        if self.descriptors > before.descriptors + spare:
            found.append(f"{self.descriptors - before.descriptors} descriptors")
        if self.threads > before.threads:
            found.append(f"{self.threads - before.threads} threads")
        if new := self.segments - before.segments:
            found.append(f"segments {sorted(new)}")
        return ", ".join(found)


def check_invited(kit: Kit, receiver: Receiver) -> None:
    """The sender for which `receiver` listens gets in, and all is well."""
    with ThreadPoolExecutor(
        1
    ) as pool:  # beside the receiver, which may first have to get rid of others
        connecting = pool.submit(kit.connector.connect, receiver.endpoint, kit.options)
        eventually(lambda: receiver.take(0.0) is None and connecting.done())
        sender = connecting.result()
    try:
        for number in range(3):
            assert sender.put(numbered(number), LONG_S)
            chunk = take(receiver)
            check_numbered(chunk, number)
            chunk.release()
    finally:
        sender.close()


def listening(address: str) -> bool:
    """Whether a unix socket of this name exists in the kernel."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        return any(address in line for line in table)

"""Ways to move a payload to another process: our connectors, and plain sockets. Used by the program
`connectors`."""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from stretto.transport import wire
from stretto.transport.contract import Chunk, ChunkHeader, Endpoint, LinkOptions
from stretto.transport.registry import Registry
from stretto.types import SECRET_BYTES, Mark, RequestId, Span

SLOT_BYTES = (8 << 20) + (1 << 16)
OPTIONS = LinkOptions(
    slots=4, slot_bytes=SLOT_BYTES, secret=bytes(SECRET_BYTES)
)  # the same in both processes
WAIT_S = 60.0
_LENGTH = struct.Struct("<Q")


class Lane(Protocol):
    """One process's two ends: what it receives on and what it sends on."""

    def listen(self) -> str: ...

    def connect(self, address: str) -> None: ...

    def send(self, size: int) -> None: ...

    def receive(self) -> None: ...

    def done(self) -> None:
        """Release the memory of what was received, if needed. Not part of a hop."""
        ...


class UnixSocket:
    """A stream socket, a length before each payload, buffers that are reused."""

    def listen(self) -> str:
        self._listener = socket.socket(socket.AF_UNIX)
        address = f"bench-{secrets.token_hex(8)}"
        self._listener.bind("\0" + address)
        self._listener.listen()
        return address

    def connect(self, address: str) -> None:
        self._out = socket.socket(socket.AF_UNIX)
        self._out.connect("\0" + address)
        self._in, _ = self._listener.accept()
        self._source = memoryview(bytearray(SLOT_BYTES))
        self._target = memoryview(bytearray(2 * SLOT_BYTES))
        self._start = self._stop = 0  # what was received and not yet handed out

    def send(self, size: int) -> None:
        _LENGTH.pack_into(self._source, 0, size)
        self._out.sendall(self._source[: _LENGTH.size + size])

    def done(self) -> None:
        pass

    def _receive_payload(self) -> memoryview:
        # Asks for all that may be there, so that a small message takes one call or less.
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start > SLOT_BYTES:
            rest = bytes(self._target[self._start : self._stop])
            self._target[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        self._fill(_LENGTH.size)
        (size,) = _LENGTH.unpack_from(self._target, self._start)
        self._fill(_LENGTH.size + size)
        payload = self._target[self._start + _LENGTH.size : self._start + _LENGTH.size + size]
        self._start += _LENGTH.size + size
        return payload

    def _fill(self, size: int) -> None:
        while self._stop - self._start < size:
            self._stop += self._in.recv_into(self._target[self._stop :])


class UnixTensor(UnixSocket):
    """The least that moves a tensor: its bytes after their length, received as a view. There is no
    type, owner or order, and nothing is checked."""

    def connect(self, address: str) -> None:
        super().connect(address)
        self._tensor = torch.zeros(SLOT_BYTES, dtype=torch.uint8)

    def send(self, size: int) -> None:
        self._source[_LENGTH.size : _LENGTH.size + size] = self._tensor.numpy()[:size].data
        super().send(size)

    def receive(self) -> None:
        self._taken = torch.frombuffer(self._receive_payload(), dtype=torch.uint8)


class UnixChunk(UnixSocket):
    """The same with the wire format: encode into the buffer, send it, decode as views. It may cache
    views of its buffers as a slot does, so that only the transport differs, not the format."""

    def __init__(self) -> None:
        self._chunks = Chunks()
        self._pages: dict[int, wire.Page] = {}

    def connect(self, address: str) -> None:
        super().connect(address)
        self._page = wire.Page(self._source[_LENGTH.size :])

    def send(self, size: int) -> None:
        length = wire.encode_into(self._page, self._chunks.next(size))
        _LENGTH.pack_into(self._source, 0, length)
        self._out.sendall(self._source[: _LENGTH.size + length])

    def receive(self) -> None:
        payload = self._receive_payload()
        start = self._start - len(payload)
        page = self._pages.get(start)
        if page is None:
            if len(self._pages) >= 64:
                self._pages.clear()
            page = self._pages[start] = wire.Page(self._target[start:])
        self._taken = wire.read(page, len(payload))

    def done(self) -> None:
        self._taken.release()


@dataclass(slots=True)
class Chunks:
    """Chunks of one tensor each; headers are made once per size."""

    _made: dict[int, tuple[ChunkHeader, dict[str, torch.Tensor]]] = field(default_factory=dict)

    def next(self, size: int) -> Chunk:
        if size not in self._made:
            tensors = {"rows": torch.zeros(size, dtype=torch.uint8)}
            made = wire.chunk(RequestId("bench"), Span(0, 1), Mark.MORE, tensors)
            self._made[size] = (made.header, tensors)
        header, tensors = self._made[size]
        return Chunk(header, tensors)


class ConnectorChunk:
    def __init__(self, name: str) -> None:
        self._connector = Registry().get(name)
        self._chunks = Chunks()

    def listen(self) -> str:
        self._in = self._connector.listen("bench.0", OPTIONS)
        return msgspec.json.encode(self._in.endpoint).decode()

    def connect(self, address: str) -> None:
        self._out = self._connector.connect(msgspec.json.decode(address, type=Endpoint), OPTIONS)

    def send(self, size: int) -> None:
        assert self._out.put(self._chunks.next(size), WAIT_S)

    def receive(self) -> None:
        chunk = self._in.take(WAIT_S)
        assert chunk is not None
        self._taken = chunk

    def done(self) -> None:
        self._taken.release()


LANES = (
    "unix tensor",
    "unix chunk",
    "shm chunk",
    "tcp chunk",
    "mooncake chunk",
)


def make_lane(name: str) -> Lane:
    match name:
        case "unix tensor":
            return UnixTensor()
        case "unix chunk":
            return UnixChunk()
        case _:
            return ConnectorChunk(name.partition(" ")[0])

"""What a hop costs between two processes: our connectors beside plain means of the system, in one run.

    python bench/connectors.py                   # all lanes, about two minutes
    python bench/connectors.py --quick shm unix  # some lanes, few rounds
    python bench/connectors.py --pinned shm unix # one core for each of the two processes; --one-core: for both

A *lane* is a way to get a payload to another process. The `bytes` lanes move bare bytes, the `chunk` lanes move a chunk
(typed header, checks, a tensor on both sides); `unix chunk` is the plain socket with our wire format on it, so each
of ours has a peer that does the same work, and `unix tensor` the least that brings a tensor over a socket. A hop is
one way, by the machine's one clock: from the call that sends to
the return of the call that receives, in a process that was asleep, so a wake-up is in it. Processes take turns.
Throughput is a stream of payloads one way until the receiver has the last: a socket's receiver has them in its own
memory, a ring's in shared memory, as views. Lanes take turns in short bursts, so that the machine's noise hits all
alike. Page faults per message tell whether memory is allocated per message."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import zmq

from bench.env import describe, quantile
from stretto.connector import wire
from stretto.connector.contract import Chunk, ChunkHeader, Endpoint, LinkOptions
from stretto.connector.notes import Kind, Note
from stretto.connector.registry import connectors
from stretto.connector.shm import ShmInward, ShmOutward
from stretto.errors import Invalid
from stretto.types import Mark, RequestId, Span

SIZES = (64, 4 << 10, 256 << 10, 8 << 20)
SLOT_BYTES = (8 << 20) + (1 << 16)
PINGS = {64: 100, 4 << 10: 100, 256 << 10: 40, 8 << 20: 6}  # per burst
STREAM = {64: 300, 4 << 10: 300, 256 << 10: 60, 8 << 20: 10}
OPTIONS = LinkOptions(slots=4, slot_bytes=SLOT_BYTES)
WAIT_S = 60.0
_LENGTH = struct.Struct("<Q")


class Lane(Protocol):
    """One process's two ends: what it receives on and what it sends on."""

    def listen(self) -> str: ...

    def connect(self, address: str) -> None: ...

    def send(self, size: int) -> None: ...

    def receive(self) -> None: ...

    def done(self) -> None:
        """Give back the memory of what was received, where that is a thing to do. Not part of a hop."""
        ...


class UnixBytes:
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

    def receive(self) -> None:
        self._receive_payload()

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


class UnixTensor(UnixBytes):
    """The least that gets a tensor to a tensor: its bytes behind their length, received as a view. Neither side says
    what they are, whose, or in which order, and nothing is checked."""

    def connect(self, address: str) -> None:
        super().connect(address)
        self._tensor = torch.zeros(SLOT_BYTES, dtype=torch.uint8)

    def send(self, size: int) -> None:
        self._source[_LENGTH.size : _LENGTH.size + size] = self._tensor.numpy()[:size].data
        super().send(size)

    def receive(self) -> None:
        self._taken = torch.frombuffer(self._receive_payload(), dtype=torch.uint8)


class UnixChunk(UnixBytes):
    """The same with the wire format: encode into the buffer, send it, decode as views. It may remember views of its
    buffers as a slot does, so that what differs is the way and not the format."""

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


class ZmqBytes:
    def __init__(self, transport: str) -> None:
        self._transport = transport

    def listen(self) -> str:
        self._in = zmq.Context.instance().socket(zmq.PULL)
        self._in.set_hwm(8)
        self._in.bind("tcp://127.0.0.1:*" if self._transport == "tcp" else f"ipc://@bench-{secrets.token_hex(8)}")
        return self._in.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        self._out = zmq.Context.instance().socket(zmq.PUSH)
        self._out.set_hwm(8)
        self._out.connect(address)
        self._source = memoryview(bytearray(SLOT_BYTES))

    def send(self, size: int) -> None:
        self._out.send(self._source[:size], copy=False)

    def receive(self) -> None:
        self._in.recv(copy=False)

    def done(self) -> None:
        pass


class QueueBytes:
    """`multiprocessing.Queue`: pickles the array into a pipe, from a thread of its own."""

    def __init__(self, inward: Any, outward: Any) -> None:
        self._in, self._out = inward, outward
        self._source = np.zeros(SLOT_BYTES, dtype=np.uint8)

    def listen(self) -> str:
        return ""

    def connect(self, address: str) -> None:
        pass

    def send(self, size: int) -> None:
        self._out.put(self._source[:size])

    def receive(self) -> None:
        self._in.get(timeout=WAIT_S)

    def done(self) -> None:
        pass


class ShmBytes:
    """The shm connector's slots and notes, without the wire format."""

    def listen(self) -> str:
        receiver = connectors.get("shm").listen("bench.0", OPTIONS)
        self._in: ShmInward = receiver._carrier  # type: ignore[attr-defined]
        return msgspec.json.encode(receiver.endpoint).decode()

    def connect(self, address: str) -> None:
        sender = connectors.get("shm").connect(msgspec.json.decode(address, type=Endpoint), OPTIONS)
        self._out: ShmOutward = sender._carrier  # type: ignore[attr-defined]
        self._source = memoryview(bytearray(SLOT_BYTES))
        self._free = list(range(OPTIONS.slots))
        self._arrived: list[tuple[Note, wire.Page]] = []

    def send(self, size: int) -> None:
        while not self._free:
            self._take_back(WAIT_S)
        slot = self._free.pop()
        self._out.pages[slot].memory[:size] = self._source[:size]
        self._out.ship(slot, 0, size)

    def _take_back(self, timeout: float) -> None:
        self._free += [slot for _kind, slot, *_ in self._out.notes(timeout)]

    def receive(self) -> None:
        while not self._arrived:
            self._arrived = self._in.arrivals(WAIT_S)
        self._taken, _page = self._arrived.pop(0)

    def done(self) -> None:
        _kind, slot, seq, *_ = self._taken
        self._in.reply(Kind.RELEASE, slot, seq)


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
    def __init__(self, name: str, **details: str) -> None:
        self._connector = connectors.get(name)
        self._options = replace(OPTIONS, details=details)
        self._chunks = Chunks()

    def listen(self) -> str:
        self._in = self._connector.listen("bench.0", self._options)
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
    "unix bytes",
    "unix tensor",
    "shm bytes",
    "zmq ipc bytes",
    "zmq tcp bytes",
    "mp.Queue",
    "unix chunk",
    "shm chunk",
    "shm chunk, spinning",
    "tcp chunk",
    "mooncake chunk",
)


def make_lane(name: str, queues: tuple[Any, Any]) -> Lane:
    match name.split():
        case ["unix", "bytes"]:
            return UnixBytes()
        case ["unix", "tensor"]:
            return UnixTensor()
        case ["unix", "chunk"]:
            return UnixChunk()
        case ["shm", "bytes"]:
            return ShmBytes()
        case ["zmq", transport, "bytes"]:
            return ZmqBytes(transport)
        case ["mp.Queue"]:
            return QueueBytes(*queues)
        case ["shm", "chunk,", "spinning"]:
            return ConnectorChunk("shm", look_us="100")
        case [connector, "chunk"]:
            return ConnectorChunk(connector)
    raise ValueError(name)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def pin(core: int) -> None:
    """On one core of those allowed. Left alone, the scheduler keeps two processes that take turns now on one core and
    now on two, for seconds at a time, and a hop over two takes more than twice as long: lanes are only comparable
    where they are placed alike. Two cores are how stages run; one flatters whatever does least after the send."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[core % len(allowed)]})


def other_side(name: str, control: Connection, queues: tuple[Any, Any], core: int | None) -> None:
    """The second process: does what it is told, `(what, size, count)`."""
    if core is not None:
        pin(core)
    torch.set_num_threads(1)
    lane = make_lane(name, queues)
    control.send(lane.listen())
    lane.connect(control.recv())
    control.send("ready")
    while (order := control.recv()) is not None:
        what, size, count = order
        before = faults()
        sent, received = [], []
        for _ in range(count):
            lane.receive()
            received.append(time.perf_counter_ns())
            lane.done()
            if what == "echo":
                sent.append(time.perf_counter_ns())
                lane.send(size)
        if what == "sink":
            lane.send(64)
        control.send((faults() - before, sent, received))


@dataclass(slots=True)
class Track:
    """One lane, open, with what was measured on it."""

    name: str
    lane: Lane
    control: Connection
    process: Any
    hops_us: dict[int, list[float]] = field(default_factory=dict)
    bursts_us: dict[int, list[list[float]]] = field(default_factory=dict)  # the same by round
    stream_gb_s: dict[int, list[float]] = field(default_factory=dict)
    faults: dict[int, list[float]] = field(default_factory=dict)  # per message, both processes, while streaming

    def ping(self, size: int, count: int) -> list[float]:
        self.control.send(("echo", size, count))
        sent, received = [], []
        for _ in range(count):
            sent.append(time.perf_counter_ns())
            self.lane.send(size)
            self.lane.receive()
            received.append(time.perf_counter_ns())
            self.lane.done()
        _faults, sent_there, received_there = self.control.recv()
        pairs = [*zip(sent, received_there), *zip(sent_there, received)]
        return [round((stop - start) / 1000, 2) for start, stop in pairs]

    def stream(self, size: int, count: int) -> tuple[float, float]:
        self.control.send(("sink", size, count))
        before = faults()
        start = time.perf_counter()
        for _ in range(count):
            self.lane.send(size)
        self.lane.receive()
        took = time.perf_counter() - start
        self.lane.done()
        faulted = faults() - before + self.control.recv()[0]
        return round(size * count / took / 1e9, 5), round(faulted / count, 3)

    def round(self, size: int, kept: bool) -> None:
        hops = self.ping(size, PINGS[size])
        rate, faulted = self.stream(size, STREAM[size])
        if kept:
            self.hops_us.setdefault(size, []).extend(hops)
            self.bursts_us.setdefault(size, []).append(hops)
            self.stream_gb_s.setdefault(size, []).append(rate)
            self.faults.setdefault(size, []).append(faulted)

    def close(self) -> None:
        self.control.send(None)
        self.process.join()


def open_track(name: str, context: Any, core: int | None) -> Track:
    ours, theirs = context.Pipe()
    queues = (context.Queue(), context.Queue())
    process = context.Process(target=other_side, args=(name, theirs, queues, core), daemon=True)
    process.start()
    lane = make_lane(name, (queues[1], queues[0]))
    address = lane.listen()
    there = ours.recv()
    ours.send(address)
    lane.connect(there)
    assert ours.recv() == "ready"
    return Track(name, lane, ours, process)


def table(tracks: list[Track]) -> str:
    lines = [f"{'':20}" + "".join(f"{_words(size):>30}" for size in SIZES)]
    lines.append(f"{'':20}" + f"{'hop p50  p99 us    GB/s':>30}" * len(SIZES))
    for track in tracks:
        cells = []
        for size in SIZES:
            hops = track.hops_us[size]
            rate = quantile(track.stream_gb_s[size], 0.5)
            cells.append(f"{quantile(hops, 0.5):12.1f} {quantile(hops, 0.99):9.1f} {rate:7.3f}")
        lines.append(f"{track.name:20}" + "".join(f"{cell:>30}" for cell in cells))
    return "\n".join(lines)


def _words(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


PAIRS = (
    ("shm bytes", "unix bytes"),
    ("shm chunk", "unix chunk"),
    ("shm chunk", "unix tensor"),
    ("shm chunk, spinning", "unix chunk"),
)


def ratios(tracks: list[Track], part: float = 0.5) -> dict[str, float]:
    """What is claimed: ours against the plain socket, of the same round each, and then the middle one of the rounds
    (or another part of them). `shm chunk / unix tensor` is a typed, checked chunk against bytes that nobody checks."""
    by_name = {track.name: track for track in tracks}
    found = {}
    for ours, plain in PAIRS:
        if ours in by_name and plain in by_name:
            a, b = by_name[ours], by_name[plain]
            for size in SIZES:
                hops = [quantile(x, 0.5) / quantile(y, 0.5) for x, y in zip(a.bursts_us[size], b.bursts_us[size])]
                found[f"{ours} / {plain}: hop p50 at {_words(size)}"] = round(quantile(hops, part), 3)
            rates = [x / y for x, y in zip(a.stream_gb_s[8 << 20], b.stream_gb_s[8 << 20])]
            found[f"{ours} / {plain}: throughput at 8 MiB"] = round(quantile(rates, part), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", help="parts of lane names; default: all")
    parser.add_argument("--quick", action="store_true", help="three rounds instead of twelve")
    parser.add_argument("--pinned", action="store_true", help="the two processes on two different cores")
    parser.add_argument("--one-core", action="store_true", help="both processes on one core")
    parser.add_argument("--out", type=Path, help="file for the JSON result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in LANES if not args.lanes or any(part in name for part in args.lanes)]
    try:
        connectors.get("mooncake")
    except Invalid as error:
        print(error)
        names = [name for name in names if "mooncake" not in name]
    context = multiprocessing.get_context("spawn")
    core = 1 if args.pinned else 0 if args.one_core else None
    tracks = [open_track(name, context, core) for name in names]
    if core is not None:
        pin(0)  # after the children, which would inherit it
    rounds = 3 if args.quick else 12
    for index in range(rounds + 1):
        for size in SIZES:
            for step in range(len(tracks)):
                # Each round starts with another lane, so that none always follows the same neighbour.
                tracks[(index + step) % len(tracks)].round(size, kept=index > 0)
    for track in tracks:
        track.close()
    print(table(tracks))
    low, high = ratios(tracks, 0.25), ratios(tracks, 0.75)
    for claim, value in ratios(tracks).items():
        print(f"{claim}: {value} ({low[claim]} to {high[claim]})")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"env": describe() | _versions(), "ratios": ratios(tracks)}
        result |= {"quartiles": {claim: [low[claim], high[claim]] for claim in low}, "lanes": _lanes(tracks)}
        args.out.write_text(json.dumps(result) + "\n")


def _versions() -> dict[str, Any]:
    return {"zmq": zmq.zmq_version(), "pyzmq": zmq.pyzmq_version(), "msgspec": msgspec.__version__}


def _lanes(tracks: list[Track]) -> dict[str, Any]:
    return {
        track.name: {
            _words(size): {
                "hop_us": {"p50": quantile(track.hops_us[size], 0.5), "p99": quantile(track.hops_us[size], 0.99)},
                "gb_s": quantile(track.stream_gb_s[size], 0.5),
                "faults_per_message": quantile(track.faults[size], 0.5),
                "hop_us_p50_by_round": [quantile(burst, 0.5) for burst in track.bursts_us[size]],
                "gb_s_by_round": track.stream_gb_s[size],
            }
            for size in SIZES
        }
        for track in tracks
    }


if __name__ == "__main__":
    main()

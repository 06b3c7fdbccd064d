"""A link between two processes with a GPU: device -> host -> shared memory -> host -> device, and what it costs.

    python bench/link_gpu.py --out bench/results/link_gpu.json

For payloads of 1, 64, 2,500 and 10,000 rows of 2048 bf16: bytes per second through the whole path, next to that of
one pinned copy of the same size; the time of one hop; and the gap between consecutive steps of a decode loop on the
sending side (events around each graph launch), alone and with the link busy.

Three arrangements: the receiver as a thread of this process (one interpreter lock for four threads), as a process of
its own with the same GPU (which two processes get by turns), and as a process that does not upload, which shows the
sending half alone, as it would be with a GPU on each side."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto.connector.contract import Endpoint, LinkOptions
from stretto.connector.courier import Incoming, Outgoing
from stretto.connector.registry import connectors
from stretto.connector.switches import OverlapSwitches
from stretto.stage.outbox import Outbox
from stretto.stage.payload.chunker import ChunkPolicy, Confirmed
from stretto.stage.payload.copies import DeviceToHost, HostToDevice, adopt
from stretto.stage.payload.ring import Ring
from stretto.stage.payload.schema import ThinkerRows, unpack
from stretto.types import RequestId, Span

ROWS = (1, 64, 2500, 10000)
HIDDEN = 2048
SLOT_BYTES = 48 << 20
SLOTS = 8


def receive(pipe: Connection, upload: bool) -> None:
    """The other process: uploads chunks as they land (or leaves them) and says after each run what it got."""
    device = torch.device("cuda" if upload else "cpu")
    if upload:
        torch.cuda.init()
    receiver = connectors.get("shm").listen("bench", LinkOptions(slots=SLOTS, slot_bytes=SLOT_BYTES))
    pipe.send_bytes(msgspec.msgpack.encode(receiver.endpoint))
    woken = threading.Semaphore(0)
    uploader = HostToDevice(device, OverlapSwitches(), ThinkerRows.HOST) if upload else None
    into = Incoming(receiver, "bench", woken.release, uploader=uploader)
    into.start()
    while (count := msgspec.msgpack.decode(pipe.recv_bytes(), type=int)) > 0:
        total = torch.zeros((), dtype=torch.float64, device=device)
        while count:
            woken.acquire()
            while (chunk := into.poll()) is not None:
                adopt(chunk)
                rows = unpack(ThinkerRows, chunk)
                assert rows is not None
                total += rows.hidden[-1, -1]
                count -= 1
                chunk.release()
        if upload:
            torch.cuda.synchronize()
        pipe.send_bytes(msgspec.msgpack.encode(float(total)))
    into.close()


class Sending:
    """The sending side: an outbox, its courier, and the process at the other end."""

    def __init__(self, *, apart: bool, upload: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        make = context.Process if apart else threading.Thread
        self.other = make(target=receive, args=(theirs, upload))
        self.other.start()
        endpoint = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Endpoint)
        sender = connectors.get("shm").connect(endpoint, LinkOptions())
        self.woken = threading.Semaphore(0)
        self.out = Outgoing(sender, "bench", self.woken.release, stream=torch.cuda.Stream(), capacity=SLOTS)
        self.down = DeviceToHost(Ring(64, 1 << 20, pin=True), torch.device("cuda"), OverlapSwitches())
        self.out.start()

    def send(self, payload: torch.Tensor, count: int) -> None:
        """`count` chunks of the same rows; returns when all are on the other device."""
        rows = len(payload)
        self.pipe.send_bytes(msgspec.msgpack.encode(count))
        ids = torch.zeros(rows, dtype=torch.int32, device="cuda")
        box = Outbox(ThinkerRows, RequestId("r"), ChunkPolicy(rows, rows), self.out.offer)
        for i in range(count):
            while (placed := self.down.place({"ids": ids, "hidden": payload})) is None:
                self.out.wake_when_sent()
                box.flush()
                self.woken.acquire(timeout=0.01)
            span = Span(i * rows, (i + 1) * rows)
            box.add(
                ThinkerRows(span, placed.tensors["ids"], (span,), placed.tensors["hidden"]),
                lease=placed.lease,
                event=placed.event,
            )
            while not box.send(Confirmed(span.stop)):
                self.woken.acquire(timeout=0.01)
                if box.flush():
                    break
        while not box.flush():
            self.woken.acquire(timeout=0.01)
        got = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=float)
        assert got == count * float(payload[-1, -1]), "other rows arrived than were sent"
        assert not self.out.faults()

    def close(self) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(0))
        self.out.close()
        self.other.join()


def pinned_copy(rows: int) -> dict[str, float]:
    """What one pinned copy of this size gives, each way, in GB/s."""
    device = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
    host = torch.empty_like(device, device="cpu", pin_memory=True)
    out = {}
    for name, (to, source) in {"d2h": (host, device), "h2d": (device, host)}.items():
        for _ in range(3):
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        out[name] = 50 * device.nbytes / (time.perf_counter() - start) / 1e9
    return out


def decode_gaps(steps: int, during: threading.Thread | None) -> list[float]:
    """Idle time in µs between consecutive launches of a captured step of about a millisecond, two in flight."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.mm(a, a, out=out)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(5):
                torch.mm(a, a, out=out)
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)]
        if during is not None:
            during.start()
        for i, (begin, end) in enumerate(marks):
            begin.record(stream)
            graph.replay()
            end.record(stream)
            if i >= 2:
                marks[i - 2][1].synchronize()
    torch.cuda.synchronize()
    if during is not None:
        during.join()
    return [marks[i][1].elapsed_time(marks[i + 1][0]) * 1e3 for i in range(20, steps - 1)]


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "mean": round(statistics.fmean(values), 2)}


def measure(rows: int, link: Sending) -> dict[str, Any]:
    payload = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
    count = 2000 if rows < 1000 else 1_000_000 // rows
    link.send(payload, 20)
    start = time.perf_counter()
    link.send(payload, count)
    seconds = time.perf_counter() - start
    hops = []
    for _ in range(100):
        start = time.perf_counter()
        link.send(payload, 1)
        hops.append((time.perf_counter() - start) * 1e6)
    copy = pinned_copy(rows)
    speed = count * payload.nbytes / seconds / 1e9
    return {
        "bytes": payload.nbytes,
        "path_gb_s": round(speed, 2),
        "path_us": round(seconds / count * 1e6, 1),
        "pinned_gb_s": {name: round(value, 2) for name, value in copy.items()},
        "share_of_pinned": round(speed / min(copy.values()), 3),
        "hop_and_answer_us": quantiles(hops),
    }


def gaps(link: Sending) -> dict[str, Any]:
    """Of the decode loop: alone, beside small chunks, beside large ones."""
    out = {"alone": quantiles(decode_gaps(1000, None))}
    for name, rows, count in (("small", 64, 4000), ("large", 2500, 1500)):
        payload = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        busy = threading.Thread(target=link.send, args=(payload, count))
        out[f"beside {name} chunks"] = quantiles(decode_gaps(1000, busy))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.init()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, apart, upload in (
        ("one process", False, True),
        ("two processes, one GPU", True, True),
        ("sending half", True, False),
    ):
        link = Sending(apart=apart, upload=upload)
        result[name] = {"rows": {rows: measure(rows, link) for rows in ROWS}, "gap_us": gaps(link)}
        link.close()
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""A link between two processes with a GPU: device -> host -> shared memory -> host -> device, and what it costs.

    python bench/link_gpu.py --out bench/results/link_gpu.json

For payloads of 1, 64, 2,500 and 10,000 rows of 2048 bf16: bytes per second through the whole path, the time of one hop,
where the time goes at both ends, and the gap between consecutive steps of a decode loop on the sending side (events
around each graph launch), alone and with the link busy.

What it is held against: `share_of_pinned` is the path's speed over that of a pinned copy of the same size, one way,
the slower of the two ways. Beside it, for the same size, the speed of both ways at once on two streams (what a link
that overlaps them perfectly on one GPU could reach) and of one after the other (what one without overlap could).

Three arrangements: the receiver as a process of its own with the same GPU (which two processes get by turns), with one,
two, four and eight copies in flight; as a process that does not upload, which shows the sending half alone, as it would
be with a GPU on each side; and as a thread of this process (one interpreter lock for four threads)."""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import threading
import time
from dataclasses import replace
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
from stretto.types import SECRET_BYTES, RequestId, Span

ROWS = (1, 64, 2500, 10000)
HIDDEN = 2048
SLOT_BYTES = 48 << 20
SLOTS = 8
MOST = 4000  # chunks in a run
DEFAULT = LinkOptions(secret=bytes(SECRET_BYTES))  # the same in both processes


class Report(msgspec.Struct):
    """What the receiving side says after each run."""

    total: float  # of the last elements, so that they are known to be there
    cpu_s: float
    take_s: float  # from arrival to hand-over, upload's launch included
    queue_s: float  # from there to the loop
    stalls: int


def receive(pipe: Connection, upload: bool) -> None:
    """The other process: uploads chunks as they land (or leaves them) and says after each run what it got."""
    device = torch.device("cuda" if upload else "cpu")
    if upload:
        torch.cuda.init()
    receiver = connectors.get("shm").listen("bench", replace(DEFAULT, slots=SLOTS, slot_bytes=SLOT_BYTES))
    pipe.send_bytes(msgspec.msgpack.encode(receiver.endpoint))
    woken = threading.Semaphore(0)
    uploader = HostToDevice(device, OverlapSwitches(), ThinkerRows.HOST) if upload else None
    into = Incoming(receiver, "bench", woken.release, uploader=uploader)
    into.start()
    last = torch.zeros(MOST, dtype=torch.bfloat16, device=device)
    while (count := msgspec.msgpack.decode(pipe.recv_bytes(), type=int)) > 0:
        cpu, before = time.process_time(), copy.deepcopy(into.metrics)
        last.zero_()
        got = 0
        while got < count:
            woken.acquire()
            while (chunk := into.poll()) is not None:
                adopt(chunk)
                rows = unpack(ThinkerRows, chunk)
                assert rows is not None
                last[got : got + 1].copy_(rows.hidden.view(-1)[-1:])
                got += 1
                chunk.release()
        total = float(last.double().sum())
        after = into.metrics
        report = Report(
            total,
            time.process_time() - cpu,
            after.take.total_s - before.take.total_s,
            after.queue.total_s - before.queue.total_s,
            after.stalls - before.stalls,
        )
        pipe.send_bytes(msgspec.msgpack.encode(report))
    into.close()


class Sending:
    """The sending side: an outbox, its courier, and the process at the other end."""

    def __init__(self, *, apart: bool, upload: bool, copies: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        make = context.Process if apart else threading.Thread
        self.other = make(target=receive, args=(theirs, upload))
        self.other.start()
        endpoint = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Endpoint)
        sender = connectors.get("shm").connect(endpoint, replace(DEFAULT, copies=copies))
        self.woken = threading.Semaphore(0)
        self.out = Outgoing(sender, "bench", self.woken.release, stream=torch.cuda.Stream(), capacity=SLOTS)
        self.down = DeviceToHost(Ring(64, 1 << 20, pin=True), torch.device("cuda"), OverlapSwitches())
        self.out.start()

    def send(self, payload: torch.Tensor, count: int) -> Report:
        """`count` chunks of the same rows; returns when all are on the other device."""
        rows = len(payload)
        self.pipe.send_bytes(msgspec.msgpack.encode(count))
        ids = torch.zeros(rows, dtype=torch.int32, device=payload.device)
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
        report = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Report)
        assert report.total == count * float(payload[-1, -1]), "other rows arrived than were sent"
        assert not self.out.faults()
        return report

    def close(self) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(0))
        self.out.close()
        self.other.join()


def pinned_copy(rows: int) -> dict[str, float]:
    """What pinned copies of this size give, in GB/s of payload: each way, one after the other, both at once."""
    down_from, up_to = (torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16) for _ in range(2))
    down_to, up_from = (torch.empty_like(up_to, device="cpu", pin_memory=True) for _ in range(2))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def speed(*copies: tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]) -> float:
        for i in range(55):
            if i == 5:
                torch.cuda.synchronize()
                start = time.perf_counter()
            for stream, to, source in copies:
                with torch.cuda.stream(stream):
                    to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 50 * up_to.nbytes / (time.perf_counter() - start) / 1e9

    return {
        "d2h": speed((one, down_to, down_from)),
        "h2d": speed((one, up_to, up_from)),
        "one after the other": speed((one, down_to, down_from), (one, up_to, up_from)),
        "both at once": speed((one, down_to, down_from), (other, up_to, up_from)),
    }


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


def measure(rows: int, link: Sending, ceiling: dict[str, float]) -> dict[str, Any]:
    payload = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
    count = min(MOST, 1500 if rows < 1000 else 1_000_000 // rows)
    link.send(payload, 20)
    before, cpu, start = copy.deepcopy(link.out.metrics), time.process_time(), time.perf_counter()
    report = link.send(payload, count)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = link.out.metrics
    hops = []
    for _ in range(60):
        start = time.perf_counter()
        link.send(payload, 1)
        hops.append((time.perf_counter() - start) * 1e6)
    speed = count * payload.nbytes / seconds / 1e9
    per_chunk = {
        "whole": seconds,
        "sender: cpu of all threads": cpu,
        "sender: waiting for the courier": after.queue.total_s - before.queue.total_s,
        "sender: pack to sent (copy and credit included)": after.put.total_s - before.put.total_s,
        "receiver: cpu of all threads": report.cpu_s,
        "receiver: arrival to hand-over": report.take_s,
        "receiver: waiting for the loop": report.queue_s,
    }
    return {
        "bytes": payload.nbytes,
        "path_gb_s": round(speed, 2),
        "share_of_pinned": round(speed / min(ceiling["d2h"], ceiling["h2d"]), 3),
        "share_of_both_at_once": round(speed / ceiling["both at once"], 3),
        "us_per_chunk": {name: round(value / count * 1e6, 1) for name, value in per_chunk.items()},
        "stalls": {"sender": after.stalls - before.stalls, "receiver": report.stalls},
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
    ceiling = {rows: pinned_copy(rows) for rows in ROWS}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "pinned_gb_s": {rows: {name: round(v, 2) for name, v in found.items()} for rows, found in ceiling.items()},
    }
    for name, apart, upload, copies in (
        ("two processes, one GPU", True, True, (1, 2, 4, 8)),
        ("sending half", True, False, (1, 4)),
        ("one process", False, True, (4,)),
    ):
        result[name] = {}
        for most in copies:
            link = Sending(apart=apart, upload=upload, copies=most)
            # Small payloads go through the ring, whatever the number of copies: once is enough.
            sizes = ROWS if most == DEFAULT.copies else [rows for rows in ROWS if rows >= 1000]
            found: dict[str, Any] = {"rows": {rows: measure(rows, link, ceiling[rows]) for rows in sizes}}
            if most == DEFAULT.copies:
                found["gap_us"] = gaps(link)
            result[name][f"{most} copies"] = found
            link.close()
            for rows, cell in found["rows"].items():
                print(name, f"{most} copies, {rows} rows:", cell["path_gb_s"], "GB/s,", cell["share_of_pinned"])
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

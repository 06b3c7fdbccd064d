"""Copies of a link beside decode steps: two processes on one GPU, each overlap of the link switched
off in turn.

    python -m bench connectors --parts copies --out bench/results/copies_h200.json      # 2 min
    python -m bench connectors --parts copies --tiny  # tries it, on any GPU

The link is the one that serves between hosts: an outlet with its courier, shared memory, and a
courier with an inlet in another process, which uploads to the same GPU. The payload is rows of 2048
bf16 values that are on the device.

**Steps**: captured thinker steps in steady decode, two in flight, as a stage launches them. With
each step so many rows leave, as those of a prompt with media would. Measured for each way: the time
of a step and the gap to the next one by CUDA events, the share of the time in which no step runs,
and the loop thread's own time for a step. Ways take turns. `times` is the ratio of whole runs to
those of the same round in which nothing is sent.

**Path**: the same rows without steps, back to back. `of_pinned` is the speed as a share of a pinned
copy of the same size (the slower of the two directions). A hop is one chunk and the answer that it
has arrived. `sending half` is a receiver that does not upload, as with a GPU on each side. (Two
processes on one GPU run by turns.)"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from bench.harness.env import describe
from bench.harness.results import arguments, parser, quantile, write
from bench.harness.rounds import Ratio, turns
from bench.steps.decode import ready
from stretto.config.engine import OverlapSwitches
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.stage.links.copies import HostToDevice
from stretto.stage.links.inbox import Inlet
from stretto.stage.links.outbox import Outlet
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.stage import Transfer
from stretto.testing.qwen3_omni import released_config, tiny_config
from stretto.transport.contract import Endpoint, LinkOptions
from stretto.transport.courier import Incoming, Outgoing
from stretto.transport.registry import Registry
from stretto.types import SECRET_BYTES, Mark, RequestId, Span

HIDDEN = 2048
BENCH: Any = SimpleNamespace(receives={"bench": ThinkerRows})  # the stage at either end
OPTIONS = LinkOptions(
    slots=8, slot_bytes=48 << 20, secret=bytes(SECRET_BYTES)
)  # the same in both processes
ON = OverlapSwitches()
WAYS = {
    "all on": ON,
    "no async_d2h": replace(ON, async_d2h=False),
    "no async_h2d": replace(ON, async_h2d=False),
    "no payload_stream": replace(ON, payload_stream=False),
    "no zero_copy_encode": replace(ON, zero_copy_encode=False),
}
NOTHING = "nothing sent"
WARM = 10  # steps before those that count
SENT = {1: 1500, 64: 1500, 2500: 400, 10000: 100}  # rows -> chunks back to back
HOPS = 60


# ---- the other process


class Taker:
    """Takes chunks as they arrive and keeps the last element of each, as proof that it has
    arrived."""

    def __init__(self, pipe: Connection, switches: OverlapSwitches, upload: bool) -> None:
        device = torch.device("cuda" if upload else "cpu")
        receiver = Registry().get("shm").listen("bench", OPTIONS)
        pipe.send_bytes(msgspec.msgpack.encode(receiver.endpoint))
        self.woken = threading.Semaphore(0)
        uploader = HostToDevice(device, switches, ThinkerRows.HOST)
        self.incoming = Incoming(receiver, "bench", self.woken.release, uploader=uploader)
        self.inlet = Inlet("bench", BENCH)
        self.inlet.attach(self.incoming)
        self.incoming.start()
        self.last = torch.zeros(max(SENT.values()), dtype=torch.bfloat16, device=device)
        self.got, self.over = 0, False

    def _read(self, transfer: Transfer) -> None:
        self.over = transfer.mark is Mark.REQUEST_END
        if transfer.payload is not None:
            transfer.adopt()
            self.last[self.got : self.got + 1].copy_(transfer.payload.hidden.view(-1)[-1:])
            self.got += 1

    def take(self, id: RequestId) -> float:
        """All chunks of a request; the sum of what was kept."""
        self.got, self.over = 0, False
        self.inlet.start_receiving(id)
        while not self.over:
            arrived = False
            for came in self.inlet.receive():
                if not isinstance(came, Transfer):
                    raise came[1]
                self._read(came)
                arrived = True
            if not arrived:
                self.woken.acquire(timeout=1.0)
        return float(self.last[: self.got].double().sum())


def take_all(pipe: Connection, switches: OverlapSwitches, upload: bool) -> None:
    taker = Taker(pipe, switches, upload)
    while id := pipe.recv():
        pipe.send("open")
        pipe.send(taker.take(RequestId(id)))
    taker.incoming.close()


# ---- this one


class Link:
    """The sending end, and the process at the other one."""

    numbers = itertools.count()

    def __init__(
        self, stream: torch.cuda.Stream | None, switches: OverlapSwitches, *, upload: bool = True
    ) -> None:
        """`stream` is where the steps run; without one, rows are on the host."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.other = context.Process(target=take_all, args=(theirs, switches, upload), daemon=True)
        self.other.start()
        endpoint = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Endpoint)
        options = replace(OPTIONS, zero_copy=switches.zero_copy_encode)
        sender = Registry().get("shm").connect(endpoint, options)
        self.woken = threading.Semaphore(0)
        own = torch.cuda.Stream() if stream is not None and switches.payload_stream else stream
        self.outgoing = Outgoing(
            sender, "bench", self.woken.release, stream=own, async_d2h=switches.async_d2h
        )
        self.outgoing.start()
        self.outlet = Outlet("bench", BENCH)
        self.outlet.attach(self.outgoing)
        self.id = RequestId("")

    def begin(self) -> None:
        self.id = RequestId(f"r{next(self.numbers)}")
        self.outlet.start_sending(self.id)
        self.sent = 0  # rows
        self.pipe.send(self.id)
        assert self.pipe.recv() == "open"

    def send(self, rows: torch.Tensor, event: torch.cuda.Event | None) -> None:
        """Waits only where the link has no room."""
        start = self.sent
        span = Span(start, start + len(rows))
        ids = torch.zeros(len(rows), dtype=torch.int32)
        self.sent = span.stop
        sent = self.outlet.send(
            Transfer("bench", self.id, ThinkerRows(span, ids, (span,), rows), event=event)
        )
        while not sent:
            self.woken.acquire(timeout=0.01)
            sent = bool(self.outlet.flush())

    def end(self) -> float:
        """Wait until the other side has all of it; what it says it got."""
        if not self.outlet.send(Transfer("bench", self.id, None, Mark.REQUEST_END)):
            while not self.outlet.flush():
                self.woken.acquire(timeout=0.01)
        while not self.pipe.poll(1.0):
            if not self.other.is_alive():
                raise RuntimeError("the other process has died")
        total: float = self.pipe.recv()
        assert not self.outgoing.faults()
        return total

    def close(self) -> None:
        self.pipe.send(None)
        self.outgoing.close()
        self.other.join()


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Captured thinker steps."""

    graphs: DecodeGraphs
    mode: SamplingMode
    stream: torch.cuda.Stream
    batch: int
    context: int

    def run(self, count: int, link: Link | None, rows: torch.Tensor) -> dict[str, Any]:
        """`count` steps, two in flight; each sends rows if there is a link."""
        marks = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(WARM + count)
        ]
        host = np.zeros((3, self.batch), np.int64)
        host[0] = np.arange(self.batch)
        spent = []
        if link is not None:
            link.begin()
        with torch.cuda.stream(self.stream):
            for i, (begin, end) in enumerate(marks):
                start = time.perf_counter()
                host[1] = self.context + i
                begin.record()
                self.graphs.replay(host, self.mode)
                end.record()
                if link is not None:
                    link.send(rows, end)
                spent.append(1e6 * (time.perf_counter() - start))
                if i:
                    marks[i - 1][0].synchronize()
            self.stream.synchronize()
        if link is not None:
            wanted = len(marks) * float(rows[-1, -1])
            assert abs(link.end() - wanted) <= 1e-6 * abs(wanted), (
                "other rows arrived than were sent"
            )
        kept = marks[WARM:]
        return {
            "whole_ms": kept[0][0].elapsed_time(kept[-1][1]),
            "step_ms": [a.elapsed_time(b) for a, b in kept],
            "gap_us": [1e3 * a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(kept)],
            "loop_us": spent[WARM:],
        }


def told(
    name: str, rows: int, runs: list[dict[str, Any]], base: list[dict[str, Any]]
) -> dict[str, Any]:
    every = {key: [v for run in runs for v in run[key]] for key in ("step_ms", "gap_us", "loop_us")}
    middle = {
        f"{key}_{q}": quantile(every[key], at)
        for key in every
        for q, at in (("p50", 0.5), ("p99", 0.99))
    }
    ratio = Ratio.of([r["whole_ms"] for r in runs], [r["whole_ms"] for r in base])
    idle = sum(every["gap_us"]) / 1e3 / sum(r["whole_ms"] for r in runs)
    found = {"way": name, "rows": rows, "idle_share": idle, **middle}
    return found | {"times": ratio.middle, "times_quartiles": [ratio.low, ratio.high], "runs": runs}


def beside_steps(steps: Steps, args: argparse.Namespace, result: dict[str, Any]) -> None:
    links = {name: Link(steps.stream, switches) for name, switches in WAYS.items()}
    payloads = {
        rows: torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16) for rows in args.rows
    }
    ways: list[tuple[str, int]] = [
        (NOTHING, 0),
        *((name, rows) for rows in args.rows for name in WAYS),
    ]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {way: [] for way in ways}
    for number, (name, rows) in turns(ways, args.rounds + 1):
        run = steps.run(
            args.steps, links.get(name), payloads.get(rows, next(iter(payloads.values())))
        )
        if number:
            runs[name, rows].append(run)
    for (name, rows), found in runs.items():
        line = told(name, rows, found, runs[NOTHING, 0])
        result["steps"].append(line)
        print(
            f"{name:22}{rows:6} rows a step: step p50 {line['step_ms_p50']:6.3f} ms, gap p50 "
            f"{line['gap_us_p50']:6.1f} "
            f"p99 {line['gap_us_p99']:7.1f} us, idle {100 * line['idle_share']:4.1f} %, "
            f"loop {line['loop_us_p50']:5.0f} us; whole runs x {line['times']:.3f}",
            flush=True,
        )
    for link in links.values():
        link.close()


def pinned(rows: int) -> dict[str, float]:
    """GB/s of pinned copies of this size, each way."""
    there = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
    here = torch.empty_like(there, device="cpu", pin_memory=True)
    speeds = {}
    for name, (to, source) in {"d2h": (here, there), "h2d": (there, here)}.items():
        for i in range(55):
            if i == 5:
                torch.cuda.synchronize()
                start = time.perf_counter()
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        speeds[name] = 50 * there.nbytes / (time.perf_counter() - start) / 1e9
    return speeds


def path(result: dict[str, Any], args: argparse.Namespace) -> None:
    stream = torch.cuda.Stream()
    for name, upload in (("two processes, one GPU", True), ("sending half", False)):
        link = Link(stream, ON, upload=upload)
        for rows, count in SENT.items():
            payload = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
            seconds, hops = [], []
            for chunks in (20, *[count] * args.rounds, *[1] * HOPS):
                link.begin()
                start = time.perf_counter()
                for _ in range(chunks):
                    link.send(payload, done)
                assert link.end() != 0.0
                took = time.perf_counter() - start
                if chunks == 1:
                    hops.append(1e6 * took)
                elif chunks == count:
                    seconds.append(took)
            best = min(pinned(rows).values())
            speed = count * payload.nbytes / quantile(seconds, 0.5) / 1e9
            line = {
                "way": name,
                "rows": rows,
                "bytes": payload.nbytes,
                "gb_s": speed,
                "of_pinned": speed / best,
            }
            line |= {"hop_us_p50": quantile(hops, 0.5), "hop_us_p99": quantile(hops, 0.99)}
            result["path"].append(line | {"seconds": seconds, "hops_us": hops})
            print(
                f"{name:24}{rows:6} rows: {speed:6.2f} GB/s, {line['of_pinned']:.2f} of a pinned "
                f"copy; "
                f"a hop and its answer {line['hop_us_p50']:.0f} us",
                flush=True,
            )
        link.close()


@torch.inference_mode()
def main(given: Sequence[str]) -> int:
    p = parser("connectors --parts copies", __doc__)
    p.add_argument(
        "--batch", type=int, default=8, help="rows of a thinker step (default: %(default)s)"
    )
    p.add_argument(
        "--rows", type=int, nargs="+", default=[64, 1024], help="that leave with each step"
    )
    p.add_argument("--steps", type=int, default=80, help="of a run (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=5, help="of each way (default: %(default)s)")
    p.add_argument("--tiny", action="store_true", help="the tiny model, to try the program")
    args = p.parse_args(given)
    context = 1024
    config = parse(tiny_config() if args.tiny else released_config())
    result: dict[str, Any] = {
        "env": describe(),
        "arguments": arguments(args),
        "steps": [],
        "path": [],
    }
    thinker = Source.open(config, "cuda", torch.bfloat16, "dummy", False).thinker()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs, mode, _ = ready(thinker, args.batch, context, False, stream)
    beside_steps(Steps(graphs, mode, stream, args.batch, context - 1), args, result)
    write(args.out, result)
    path(result, args)
    write(args.out, result)
    return 0

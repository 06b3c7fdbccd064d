"""What a hop between two processes costs: our connectors beside plain sockets, in one run.

    # all lanes and sizes, paced hops; four minutes
    python -m bench connectors --out bench/results/connectors.json
    python -m bench connectors --quick shm unix                       # some lanes, few rounds
    python -m bench connectors --placement each  # the table with a core for each of two processes
    python -m bench connectors --only paced  # only the hops of 4 KiB, in every placement

A *lane* is a way to move a payload to another process (lanes.py). The `chunk` lanes move a chunk: a
typed header, checks, a tensor on both sides. `unix chunk` is a plain socket with our wire format on
it, so that each of ours has a counterpart that does the same work. `unix tensor` is the least that
moves a tensor over a socket. A hop is one way: from the call that sends to the return of the call
that receives, by the machine's one clock.

In the table, hops are *back to back*: two processes take turns. *Paced* hops come every few
milliseconds, as a stage sends chunks: both processes sleep in between, so each hop includes a whole
wake-up. These are measured in three placements, since an operating system that may choose keeps two
processes that take turns on one core for some seconds, and then on two. The last lines show how
much a thread that computes beside a receiver is slowed down by it.

Throughput is a stream of payloads one way until the receiver has the last one. A socket's receiver
has them in its own memory, a ring's receiver in shared memory, as views. Lanes take turns in short
bursts, so that the machine's noise hits all alike, and ratios are of the same round. Page faults
per message show whether memory is allocated per message."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.connectors.lanes import LANES, Lane, make_lane
from bench.harness.env import describe
from bench.harness.results import parser, quantile, write
from bench.harness.rounds import Ratio, turns
from stretto.errors import Invalid
from stretto.transport.registry import Registry

SIZES = (64, 4 << 10, 256 << 10, 8 << 20)
PINGS = {64: 100, 4 << 10: 100, 256 << 10: 40, 8 << 20: 6}  # per burst
STREAM = {64: 300, 4 << 10: 300, 256 << 10: 60, 8 << 20: 10}
BURSTS, BURST, WARM = 4, 60, 10
PACED = 25
PACE_S = (0.002, 0.004)
HOP = 4 << 10
HOP_LANES = ("unix chunk", "shm chunk")
PLACEMENTS = {"each": "a core each", "free": "unpinned", "shared": "one core for both"}


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def pin(core: int) -> None:
    """On one core of those allowed."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[core % len(allowed)]})


class Busy:
    """A thread that computes, as a stage loop does, beside the one that receives."""

    def __init__(self) -> None:
        self._stop = False
        self._turns = 0
        self.per_s = 0.0

    def __enter__(self) -> Busy:
        self._since = time.perf_counter()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop:
            for _ in range(1000):
                self._turns += 1

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self.per_s = self._turns / (time.perf_counter() - self._since)


def other_side(name: str, control: Connection, core: int | None) -> None:
    """The second process: does what it is told, `(what, size, count)`."""
    if core is not None:
        pin(core)
    torch.set_num_threads(1)
    lane = make_lane(name)
    control.send(lane.listen())
    lane.connect(control.recv())
    control.send("ready")
    while (order := control.recv()) is not None:
        what, size, count = order
        if what == "beside":
            with Busy() as busy:
                obey("take", lane, size, count)
            control.send(busy.per_s)
        else:
            control.send(obey(what, lane, size, count))


def obey(what: str, lane: Lane, size: int, count: int) -> tuple[int, list[int], list[int]]:
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
    return faults() - before, sent, received


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
    faults: dict[int, list[float]] = field(
        default_factory=dict
    )  # per message, both processes, while streaming

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

    def beside(
        self, size: int, count: int, pace_s: tuple[float, float], chance: random.Random
    ) -> float:
        """Loops per second of a thread that computes beside the receiver."""
        self.control.send(("beside", size, count))
        for _ in range(count):
            time.sleep(chance.uniform(*pace_s))
            self.lane.send(size)
        turns: float = self.control.recv()
        return turns

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
    process = context.Process(target=other_side, args=(name, theirs, core), daemon=True)
    process.start()
    lane = make_lane(name)
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
    return (
        f"{size} B"
        if size < 1024
        else f"{size >> 10} KiB"
        if size < 1 << 20
        else f"{size >> 20} MiB"
    )


PAIRS = (
    ("shm chunk", "unix chunk"),
    ("shm chunk", "unix tensor"),
)


def ratios(tracks: list[Track]) -> dict[str, Ratio]:
    """What is claimed: ours against the plain socket of the same round. `shm chunk / unix tensor`
    is a typed, checked chunk against bytes that nobody checks."""
    by_name = {track.name: track for track in tracks}
    found = {}
    for ours, plain in PAIRS:
        if ours in by_name and plain in by_name:
            a, b = by_name[ours], by_name[plain]
            for size in SIZES:
                hops = (
                    [quantile(burst, 0.5) for burst in track.bursts_us[size]] for track in (a, b)
                )
                found[f"{ours} / {plain}: hop p50 at {_words(size)}"] = Ratio.of(*hops)
            rates = (track.stream_gb_s[8 << 20] for track in (a, b))
            found[f"{ours} / {plain}: throughput at 8 MiB"] = Ratio.of(*rates)
    return found


class Placed:
    """Tracks in a placement: while it is open, this process is pinned as the placement says."""

    def __init__(self, names: list[str], placement: str) -> None:
        self._names = names
        self._placement = placement
        self._allowed = os.sched_getaffinity(0)

    def __enter__(self) -> list[Track]:
        context = multiprocessing.get_context("spawn")
        core = {"each": 1, "free": None, "shared": 0}[self._placement]
        self._tracks = [open_track(name, context, core) for name in self._names]
        if core is not None:
            pin(0)  # after the children, which would inherit it
        return self._tracks

    def __exit__(self, *_: object) -> None:
        for track in self._tracks:
            track.close()
        os.sched_setaffinity(0, self._allowed)


def measure_table(names: list[str], placement: str, rounds: int) -> list[Track]:
    with Placed(names, placement) as tracks:
        for size in SIZES:
            for index, track in turns(tracks, rounds + 1):
                track.round(size, kept=index > 0)
    return tracks


def back_to_back(tracks: list[Track], size: int, chance: random.Random) -> dict[str, list[float]]:
    """In short bursts that take turns; the first hops of each warm it up, and are not kept."""
    hops: dict[str, list[float]] = {track.name: [] for track in tracks}
    for _ in range(BURSTS):
        for track in chance.sample(tracks, len(tracks)):
            there_and_back = track.ping(size, BURST)
            hops[track.name] += there_and_back[WARM:BURST] + there_and_back[BURST + WARM :]
    return hops


def paced(
    tracks: list[Track], size: int, count: int, chance: random.Random
) -> dict[str, list[float]]:
    """One hop of each lane after the other, with a pause before each: noise hits all of them
    alike."""
    for track in tracks:
        track.control.send(("take", size, count))
    sent: dict[str, list[int]] = {track.name: [] for track in tracks}
    for _ in range(count):
        for track in chance.sample(tracks, len(tracks)):
            time.sleep(chance.uniform(*PACE_S))
            sent[track.name].append(time.perf_counter_ns())
            track.lane.send(size)
    hops = {}
    for track in tracks:
        _faults, _sent, received = track.control.recv()
        hops[track.name] = [
            round((stop - start) / 1000, 2) for start, stop in zip(sent[track.name], received)
        ]
    return hops


def measure_hops(placement: str, rounds: int, chance: random.Random) -> dict[str, Any]:
    """Hops of 4 KiB, back to back and paced, against the plain socket of the same round."""
    bursts: dict[str, dict[str, list[list[float]]]] = {}
    per_s: dict[str, dict[str, list[float]]] = {}
    with Placed(list(HOP_LANES), placement) as tracks:
        for index in range(rounds + 1):
            order = chance.sample(tracks, len(tracks))
            found = {"back to back": back_to_back(tracks, HOP, chance)}
            found["paced"] = paced(tracks, HOP, PACED, chance)
            beside = {
                "many": {track.name: track.beside(HOP, 500, (0.0, 0.0), chance) for track in order}
            }
            beside["paced"] = {
                track.name: track.beside(HOP, PACED, PACE_S, chance) for track in order
            }
            if not index:
                continue
            for way, lanes in found.items():
                for name, hops in lanes.items():
                    bursts.setdefault(way, {}).setdefault(name, []).append(hops)
            for way, rates in beside.items():
                for name, rate in rates.items():
                    per_s.setdefault(way, {}).setdefault(name, []).append(rate)
    result: dict[str, Any] = {
        way: {name: _against(of, name) for name in HOP_LANES} for way, of in bursts.items()
    }
    result["beside"] = {
        way: {name: _part(of, name) for name in HOP_LANES} for way, of in per_s.items()
    }
    return result


def _against(bursts: dict[str, list[list[float]]], name: str) -> dict[str, Any]:
    hops = [hop for burst in bursts[name] for hop in burst]
    middles = [quantile(burst, 0.5) for burst in bursts[name]]
    ratio = Ratio.of(middles, [quantile(burst, 0.5) for burst in bursts["unix chunk"]])
    return {
        "p50_us": quantile(hops, 0.5),
        "p99_us": quantile(hops, 0.99),
        "ratio": ratio.middle,
        "ratio_quartiles": [ratio.low, ratio.high],
        "p50_us_by_round": middles,
    }


def _part(per_s: dict[str, list[float]], name: str) -> dict[str, Any]:
    """Relative to the plain socket's receiver, which slows a thread beside it down as well."""
    return {
        "ratio": Ratio.of(per_s[name], per_s["unix chunk"]).middle,
        "turns_per_s": quantile(per_s[name], 0.5),
    }


def hop_table(placement: str, result: dict[str, Any]) -> str:
    lines = [f"hops of 4 KiB, {PLACEMENTS[placement]}"]
    for way in ("back to back", "paced"):
        for name, of in result[way].items():
            low, high = of["ratio_quartiles"]
            numbers = f"p50 {of['p50_us']:7.1f} us  p99 {of['p99_us']:8.1f} us"
            lines.append(
                f"  {way:13} {name:20} {numbers}  ratio {of['ratio']:.3f} ({low:.3f} to {high:.3f})"
            )
    for way, lanes in result["beside"].items():
        shares = ", ".join(f"{name} {of['ratio']:.3f}" for name, of in lanes.items())
        lines.append(f"  a thread beside a receiver of {way} chunks gets on at: {shares}")
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    p = parser("connectors --parts hops", __doc__)
    p.add_argument("lanes", nargs="*", help="parts of lane names; default: all")
    p.add_argument(
        "--quick", action="store_true", help="three rounds instead of 12 (paced: 8 instead of 24)"
    )
    p.add_argument("--placement", choices=list(PLACEMENTS), default="free", help="of the table")
    p.add_argument("--only", choices=("table", "paced"), help="(default: both)")
    args = p.parse_args(given)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"env": describe()}
    if args.only != "paced":
        result |= run_table(args.lanes, args.placement, 3 if args.quick else 12)
        write(args.out, result)
    if args.only != "table":
        chance = random.Random(0)
        result["hops"] = {}
        for placement in PLACEMENTS:
            result["hops"][placement] = found = measure_hops(
                placement, 8 if args.quick else 24, chance
            )
            print(hop_table(placement, found), flush=True)
            write(args.out, result)
    return 0


def run_table(wanted: list[str], placement: str, rounds: int) -> dict[str, Any]:
    names = [name for name in LANES if not wanted or any(part in name for part in wanted)]
    try:
        Registry().get("mooncake")
    except Invalid as error:
        print(error)
        names = [name for name in names if "mooncake" not in name]
    tracks = measure_table(names, placement, rounds)
    print(f"{PLACEMENTS[placement]}\n{table(tracks)}")
    claims = ratios(tracks)
    for claim, ratio in claims.items():
        print(f"{claim}: {ratio}")
    middles = {claim: ratio.middle for claim, ratio in claims.items()}
    quartiles = {claim: [ratio.low, ratio.high] for claim, ratio in claims.items()}
    return {
        "placement": placement,
        "ratios": middles,
        "quartiles": quartiles,
        "lanes": _lanes(tracks),
    }


def _lanes(tracks: list[Track]) -> dict[str, Any]:
    return {
        track.name: {
            _words(size): {
                "hop_us": {
                    "p50": quantile(track.hops_us[size], 0.5),
                    "p99": quantile(track.hops_us[size], 0.99),
                },
                "gb_s": quantile(track.stream_gb_s[size], 0.5),
                "faults_per_message": quantile(track.faults[size], 0.5),
                "hop_us_p50_by_round": [quantile(burst, 0.5) for burst in track.bursts_us[size]],
                "gb_s_by_round": track.stream_gb_s[size],
            }
            for size in SIZES
        }
        for track in tracks
    }

"""What a hop costs between two processes: our connectors beside plain means of the system, in one run.

    python bench/connectors.py                     # all lanes and sizes, then the hops of 4 KiB; about four minutes
    python bench/connectors.py --quick shm unix    # some lanes, few rounds
    python bench/connectors.py --placement each    # the table with one core for each of the two processes
    python bench/connectors.py --hops              # only the hops of 4 KiB, in every placement

A *lane* is a way to get a payload to another process (`bench/lanes.py`). The `bytes` lanes move bare bytes, the `chunk`
lanes move a chunk (typed header, checks, a tensor on both sides); `unix chunk` is the plain socket with our wire format
on it, so each of ours has a peer that does the same work; `unix tensor` is the least that brings a tensor over one.
A hop is one way, by the machine's one clock: from the call that sends to the return of the call that receives.

The table's hops are *back to back*: two processes take turns. `--hops` puts *paced* ones beside them, a chunk every few
milliseconds, as a stage sends them: both processes sleep in between, so a whole wake-up is in each. It does so for
three placements, since the scheduler, left alone, keeps two processes that take turns now on one core and now on two,
for seconds at a time. `looking` is the shm lane whose receiver may look for a moment before it sleeps (`look_us`).
What a thread that computes beside a receiver loses to it is in the last lines.

Throughput is a stream of payloads one way until the receiver has the last: a socket's receiver has them in its own
memory, a ring's in shared memory, as views. Lanes take turns in short bursts, so that the machine's noise hits all
alike, and ratios are of the same round. Page faults per message tell whether memory is allocated per message."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from bench.env import describe, quantile
from bench.lanes import LANES, LOOK_US, Lane, make_lane
from stretto.connector.registry import connectors
from stretto.errors import Invalid

SIZES = (64, 4 << 10, 256 << 10, 8 << 20)
PINGS = {64: 100, 4 << 10: 100, 256 << 10: 40, 8 << 20: 6}  # per burst
STREAM = {64: 300, 4 << 10: 300, 256 << 10: 60, 8 << 20: 10}
BURSTS, BURST, WARM = 4, 60, 10
PACED = 25
PACE_S = (0.002, 0.004)
HOP = 4 << 10
HOP_LANES = ("unix chunk", "shm chunk", "shm chunk, looking")
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

    def beside(self, size: int, count: int, pace_s: tuple[float, float], chance: random.Random) -> float:
        """How often per second a thread beside the receiver gets round."""
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
    ("shm chunk, looking", "unix chunk"),
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


class Placed:
    """Tracks in a placement: while it is open, this process is where its placement says."""

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
        for index in range(rounds + 1):
            for size in SIZES:
                for step in range(len(tracks)):
                    # Each round starts with another lane, so that none always follows the same neighbour.
                    tracks[(index + step) % len(tracks)].round(size, kept=index > 0)
    return tracks


def back_to_back(tracks: list[Track], size: int, chance: random.Random) -> dict[str, list[float]]:
    """In short bursts that take turns; the first hops of each warm it up, and are not kept."""
    hops: dict[str, list[float]] = {track.name: [] for track in tracks}
    for _ in range(BURSTS):
        for track in chance.sample(tracks, len(tracks)):
            there_and_back = track.ping(size, BURST)
            hops[track.name] += there_and_back[WARM:BURST] + there_and_back[BURST + WARM :]
    return hops


def paced(tracks: list[Track], size: int, count: int, chance: random.Random) -> dict[str, list[float]]:
    """One hop of each lane after the other, with a pause before each: noise hits all of them alike."""
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
        hops[track.name] = [round((stop - start) / 1000, 2) for start, stop in zip(sent[track.name], received)]
    return hops


def measure_hops(placement: str, rounds: int, chance: random.Random) -> dict[str, Any]:
    """Hops of 4 KiB, back to back and paced, against the plain socket of the same round."""
    bursts: dict[str, dict[str, list[list[float]]]] = {}
    turns: dict[str, dict[str, list[float]]] = {}
    with Placed(list(HOP_LANES), placement) as tracks:
        for index in range(rounds + 1):
            order = chance.sample(tracks, len(tracks))
            found = {"back to back": back_to_back(tracks, HOP, chance)}
            found["paced"] = paced(tracks, HOP, PACED, chance)
            beside = {"many": {track.name: track.beside(HOP, 500, (0.0, 0.0), chance) for track in order}}
            beside["paced"] = {track.name: track.beside(HOP, PACED, PACE_S, chance) for track in order}
            if not index:
                continue
            for way, lanes in found.items():
                for name, hops in lanes.items():
                    bursts.setdefault(way, {}).setdefault(name, []).append(hops)
            for way, rates in beside.items():
                for name, rate in rates.items():
                    turns.setdefault(way, {}).setdefault(name, []).append(rate)
    result: dict[str, Any] = {way: {name: _against(of, name) for name in HOP_LANES} for way, of in bursts.items()}
    result["beside"] = {way: {name: _part(of, name) for name in HOP_LANES} for way, of in turns.items()}
    return result


def _against(bursts: dict[str, list[list[float]]], name: str) -> dict[str, Any]:
    hops = [hop for burst in bursts[name] for hop in burst]
    middles = [quantile(burst, 0.5) for burst in bursts[name]]
    parts = [x / quantile(y, 0.5) for x, y in zip(middles, bursts["unix chunk"])]
    return {
        "p50_us": quantile(hops, 0.5),
        "p99_us": quantile(hops, 0.99),
        "ratio": round(quantile(parts, 0.5), 3),
        "ratio_quartiles": [round(quantile(parts, 0.25), 3), round(quantile(parts, 0.75), 3)],
        "p50_us_by_round": middles,
    }


def _part(turns: dict[str, list[float]], name: str) -> dict[str, Any]:
    """Against the plain socket's receiver, beside which a thread has to give way as well."""
    parts = [x / y for x, y in zip(turns[name], turns["unix chunk"])]
    return {"ratio": round(quantile(parts, 0.5), 3), "turns_per_s": round(quantile(turns[name], 0.5))}


def hop_table(placement: str, result: dict[str, Any]) -> str:
    lines = [f"hops of 4 KiB, {PLACEMENTS[placement]}"]
    for way in ("back to back", "paced"):
        for name, of in result[way].items():
            low, high = of["ratio_quartiles"]
            numbers = f"p50 {of['p50_us']:7.1f} us  p99 {of['p99_us']:8.1f} us"
            lines.append(f"  {way:13} {name:20} {numbers}  ratio {of['ratio']:.3f} ({low:.3f} to {high:.3f})")
    for way, lanes in result["beside"].items():
        shares = ", ".join(f"{name} {of['ratio']:.3f}" for name, of in lanes.items())
        lines.append(f"  a thread beside a receiver of {way} chunks gets on at: {shares}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", help="parts of lane names; default: all")
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 12 (hops: 8 instead of 24)")
    parser.add_argument("--placement", choices=list(PLACEMENTS), default="free", help="of the table")
    parser.add_argument("--hops", action="store_true", help="only the hops of 4 KiB, in every placement")
    parser.add_argument("--no-hops", action="store_true", help="only the table")
    parser.add_argument("--out", type=Path, help="file for the JSON result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"env": describe() | _versions(), "look_us": LOOK_US}
    if not args.hops:
        result |= run_table(args.lanes, args.placement, 3 if args.quick else 12)
    if not args.no_hops:
        chance = random.Random(0)
        result["hops"] = {}
        for placement in PLACEMENTS:
            result["hops"][placement] = found = measure_hops(placement, 8 if args.quick else 24, chance)
            print(hop_table(placement, found), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result) + "\n")


def run_table(wanted: list[str], placement: str, rounds: int) -> dict[str, Any]:
    names = [name for name in LANES if not wanted or any(part in name for part in wanted)]
    try:
        connectors.get("mooncake")
    except Invalid as error:
        print(error)
        names = [name for name in names if "mooncake" not in name]
    tracks = measure_table(names, placement, rounds)
    print(f"{PLACEMENTS[placement]}\n{table(tracks)}")
    low, high = ratios(tracks, 0.25), ratios(tracks, 0.75)
    for claim, value in ratios(tracks).items():
        print(f"{claim}: {value} ({low[claim]} to {high[claim]})")
    quartiles = {claim: [low[claim], high[claim]] for claim in low}
    return {"placement": placement, "ratios": ratios(tracks), "quartiles": quartiles, "lanes": _lanes(tracks)}


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

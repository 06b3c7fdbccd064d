"""What thinker and talker cost each other on one GPU: steps of both alone, and at the same time on
two CUDA streams.

    python -m bench steps --parts together --equal --out bench/results/together_h200.json    # 1 min

One answer of the usual workload is 64 thinker steps and 125 talker frames. Both are enqueued behind
one event, as captured graphs on CUDA streams with the priorities of the service, and run to their
ends: first the thinker's alone, then the talker's alone, then both together. If the GPU ran one
after the other, both together would take the sum. If they shared nothing, they would take the
longer of the two. `overlap` is 0 for the sum and 1 for the longer.

Then each frame of the talker is timed while the thinker prefills a new prompt, in passes of
--prompts rows (the last is the largest that the scheduler makes). The extra time is what running
streams notice of a new request; a frame is 80 ms of sound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.harness.results import parser, quantile, write
from bench.steps.decode import BLOCK, add_step_arguments, filled_cache, opened, ready
from stretto.kernels.reference.paged import Paging
from stretto.models.qwen3_omni.thinker import Thinker, ThinkerAdapter
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.runner.prefill_graphs import PrefillGraphs

STEPS = {"thinker": 64, "talker": 125}
PRIORITIES = {
    "service priorities": (0, -1),
    "equal priorities": (0, 0),
}  # of thinker and talker: lower goes first
CONTEXT = 256
AHEAD_CYCLES = 200_000_000  # a tenth of a second: everything is enqueued before anything runs


@dataclass(frozen=True, slots=True, eq=False)
class Player:
    """One stage's steps at one batch size, ready to be enqueued."""

    name: str
    graphs: DecodeGraphs
    mode: SamplingMode
    stream: torch.cuda.Stream
    batch: int
    experts: float  # that a layer reads in a step

    def enqueue(self, begin: torch.cuda.Event) -> torch.cuda.Event:
        host = np.zeros((3, self.batch), np.int64)
        host[0], host[1] = np.arange(self.batch), CONTEXT
        last = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(begin)
            for _ in range(STEPS[self.name]):
                self.graphs.replay(host, self.mode)
            last.record()
        return last


def play(players: Sequence[Player]) -> dict[str, float]:
    """Milliseconds from the common start to each one's end."""
    begin = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    ends = [p.enqueue(begin) for p in players]
    torch.cuda.synchronize()
    return {p.name: begin.elapsed_time(end) for p, end in zip(players, ends, strict=True)}


def compare(thinker: Player, talker: Player, rounds: int) -> dict[str, Any]:
    alone: dict[str, list[float]] = {"thinker": [], "talker": []}
    both: list[dict[str, float]] = []
    for _ in range(rounds):
        alone["thinker"].append(play([thinker])["thinker"])
        alone["talker"].append(play([talker])["talker"])
        both.append(play([talker, thinker]))
    a, b = quantile(alone["thinker"], 0.5), quantile(alone["talker"], 0.5)
    total = quantile([max(r.values()) for r in both], 0.5)
    return {
        "thinker_alone_ms": a,
        "talker_alone_ms": b,
        "together_ms": total,
        "thinker_together_ms": quantile([r["thinker"] for r in both], 0.5),
        "talker_together_ms": quantile([r["talker"] for r in both], 0.5),
        "overlap": (a + b - total) / min(a, b),
        "experts": {"thinker": thinker.experts, "talker": talker.experts},
        "raw_ms": {"alone": alone, "both": both},
    }


def say(label: str, r: dict[str, Any]) -> None:
    print(
        f"{label}: thinker alone {r['thinker_alone_ms']:7.1f} ms, talker alone "
        f"{r['talker_alone_ms']:7.1f}, "
        f"together {r['together_ms']:7.1f} (thinker ends {r['thinker_together_ms']:7.1f}, "
        f"talker {r['talker_together_ms']:7.1f}), overlap {r['overlap']:.2f}",
        flush=True,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A captured pass over a prompt of so many rows, different words at every place."""

    graphs: PrefillGraphs
    x: torch.Tensor
    positions: torch.Tensor
    paging: Paging
    stream: torch.cuda.Stream

    @classmethod
    def make(cls, model: Thinker, rows: int, stream: torch.cuda.Stream) -> Prompt:
        blocks = -(-rows // BLOCK)
        adapter = ThinkerAdapter(model, filled_cache(model, blocks), 1, blocks * BLOCK)
        adapter.rows.join(0, range(blocks), 0.0, ())
        graphs = PrefillGraphs(model.model, adapter.cache, adapter.rows, sizes=(rows,))
        graphs.capture(stream)
        words = torch.randint(0, model.model.config.vocab_size - 100, (rows,), device="cuda")
        positions = torch.arange(rows, device="cuda", dtype=torch.float32).expand(3, -1)
        paging = adapter.rows.mixed_paging([(0, 0, rows)])
        return cls(graphs, model.model.embed_tokens(words), positions, paging, stream)

    def enqueue(self, begin: torch.cuda.Event, passes: int) -> torch.cuda.Event:
        last = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(begin)
            for _ in range(passes):
                assert self.graphs.run(self.x, self.positions, self.paging) is not None
            last.record()
        return last


def frames_beside(
    talker: Player, prompt: Prompt | None, passes: int, frames: int = 125
) -> tuple[list[float], float]:
    """Milliseconds of each frame (those that begin while the passes run, if there are some), and of
    one pass."""
    begin = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    end = prompt.enqueue(begin, passes) if prompt is not None else None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(frames + 1)]
    host = np.zeros((3, talker.batch), np.int64)
    host[0], host[1] = np.arange(talker.batch), CONTEXT
    with torch.cuda.stream(talker.stream):
        talker.stream.wait_event(begin)
        marks[0].record()
        for mark in marks[1:]:
            talker.graphs.replay(host, talker.mode)
            mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    if end is None:
        return times, 0.0
    reading = begin.elapsed_time(end)
    inside = [
        t for t, mark in zip(times, marks, strict=False) if begin.elapsed_time(mark) < reading
    ]
    return inside, reading / passes


def interference(
    talker: Player, model: Thinker, rows: int, stream: torch.cuda.Stream
) -> dict[str, Any]:
    prompt = Prompt.make(model, rows, stream)
    passes = max(1, 4096 // rows)
    alone: list[float] = []
    beside: list[float] = []
    reading = []
    for _ in range(3):
        alone += frames_beside(talker, None, 0)[0]
        found, each = frames_beside(talker, prompt, passes)
        beside += found
        reading.append(each)
    return {
        "prompt_rows": rows,
        "batch": talker.batch,
        "frame_alone_ms": {"p50": quantile(alone, 0.5), "max": max(alone)},
        "frame_beside_ms": {"p50": quantile(beside, 0.5), "max": max(beside)},
        "pass_beside_ms": quantile(reading, 0.5),
        "raw_ms": {"alone": alone, "beside": beside},
    }


def tell(found: dict[str, Any]) -> None:
    alone, beside = found["frame_alone_ms"], found["frame_beside_ms"]
    print(
        f" {found['batch']} rows: a frame alone {alone['p50']:.2f} ms (at most "
        f"{alone['max']:.2f}), beside a prompt of "
        f"{found['prompt_rows']} rows {beside['p50']:.2f} (at most {beside['max']:.2f}); a pass "
        f"beside frames "
        f"{found['pass_beside_ms']:.1f}",
        flush=True,
    )


@torch.inference_mode()
def main(given: Sequence[str]) -> int:
    p = parser("steps --parts together", __doc__)
    add_step_arguments(p, [1, 8, 16, 32])
    p.add_argument(
        "--prompts", type=int, nargs="*", default=[128, 512, 2048], help="rows of a new prompt"
    )
    p.add_argument("--equal", action="store_true", help="also with equal priorities")
    p.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    args = p.parse_args(given)
    source, result = opened(args)
    thinker, talker = source.thinker(), source.talker()
    result |= {"steps": STEPS, "runs": [], "prompts": []}
    for how in PRIORITIES if args.equal else list(PRIORITIES)[:1]:
        streams = [torch.cuda.Stream(priority=priority) for priority in PRIORITIES[how]]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for batch in args.batches:
            players = []
            for name, model, stream in zip(STEPS, (thinker, talker), streams, strict=True):
                graphs, way, experts = ready(model, batch, CONTEXT, name == "talker", stream)
                players.append(Player(name, graphs, way, stream, batch, experts))
            run = compare(*players, args.rounds)
            result["runs"].append({"how": how, "batch": batch, **run})
            say(f"{how}, batch {batch:3}", run)
            if batch > 1 and how == "service priorities":
                for rows in args.prompts:
                    found = interference(players[-1], thinker, rows, streams[0])
                    result["prompts"].append(found)
                    tell(found)
            write(args.out, result)
    return 0

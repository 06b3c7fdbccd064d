"""Which kernels a host's stages will need, and processes that launch each of them once: what
families share of it.

A process builds a stage's adapter at full width with two layers and runs the very steps that will
be captured, of its share of the sizes: so whatever a kernel is specialised by (constants, sizes
divisible by 16, alignment of pointers) comes out as it will in the host. How adapters are built is
said by a family's own module, which is what the processes run. `start` is called by a host before
it loads weights, `finish` before it allocates KV pools, which take the memory that the processes
had; both on its main thread, and on a GPU alone."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from stretto._process import die_with_parent
from stretto.config.engine import HostSettings
from stretto.kernels.triton import apply
from stretto.kernels.triton.compile_ahead import Marker, Workers, directory, python, surroundings
from stretto.layers.config import DecoderConfig
from stretto.layers.decoder import Decoder
from stretto.stage.runner import prefill_graphs
from stretto.stage.runner.adapter import ModelAdapter, decode_step
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs, sizes_for
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.types import ExpertWeights

log = logging.getLogger(__name__)

MOST = 10
"""Processes. With more, each would spend most of its time on its own start."""
LIMIT_S = 120.0
LAYERS = 2
"""The last layer of a stack is launched differently from those before it."""
ALIKE = 16
"""Numbers that this divides are alike to the compiler, and so are all others but 1."""
PICKS = (1, 3)
"""Rows of the picks after a prompt: their numbers lie elsewhere than in a decode step, less aligned
if they are odd."""
COSTS = {
    ("thinker", "decode"): (10, 2),
    ("thinker", "prompts"): (6, 1),
    ("thinker", "picks"): (2, 1),
    ("talker", "decode"): (6, 1),
    ("talker", "prompts"): (4, 1),
    ("talker", "picks"): (2, 1),
}


class Task(msgspec.Struct, frozen=True):
    """Sizes of one kind of step that have many of their kernels in common."""

    stage: str
    kind: str  # "decode", "prompts", "picks"
    sizes: tuple[int, ...]

    @property
    def weight(self) -> int:
        """About how long it takes, as seen on the released models: something once, something per
        size."""
        once, each = COSTS[self.stage, self.kind]
        return once + each * len(self.sizes)


class CompileJob(msgspec.Struct, frozen=True):
    """What one process does, as it is told on its command line."""

    model: str
    device: str
    dtype: str
    max_rows: int
    max_context: int
    block_size: int
    blocks: int  # of the stage's real pool, the sink included
    tasks: tuple[Task, ...]  # of one stage
    expert_weights: ExpertWeights = "full"


def tasks_of(stage: str, decode: Sequence[int], prompts: Sequence[int]) -> list[Task]:
    """Every size once. Decode sizes that fill the same tile go together, and so do neighbouring
    prompt sizes."""
    tiles: dict[int, list[int]] = {}
    for size in sorted(decode):
        tiles.setdefault(1 if size == 1 else max(16, 1 << (size - 1).bit_length()), []).append(size)
    found = [Task(stage, "decode", tuple(sizes)) for sizes in tiles.values()]
    ordered, each = sorted(prompts), -(-len(prompts) // 3)
    found += [
        Task(stage, "prompts", tuple(ordered[i : i + each]))
        for i in range(0, len(ordered), max(1, each))
    ]
    return [*found, Task(stage, "picks", PICKS)]


def share_out(tasks: Sequence[Task], workers: int) -> list[list[Task]]:
    """Tasks by process, each process with one stage's alone: as evenly as the stages' weights
    allow."""
    stages = list(dict.fromkeys(t.stage for t in tasks))
    assert workers >= len(stages), f"{workers} processes for {len(stages)} stages"
    left = sum(t.weight for t in tasks)
    shares: list[list[Task]] = []
    for later, stage in reversed(list(enumerate(reversed(stages)))):
        own = sorted((t for t in tasks if t.stage == stage), key=lambda t: -t.weight)
        weight = sum(t.weight for t in own)
        fair = min(
            round(workers * weight / left), workers - later
        )  # each stage to come needs one, too
        count = max(1, min(len(own), fair))
        workers, left = workers - count, left - weight
        bins: list[list[Task]] = [[] for _ in range(count)]
        for task in own:  # the heaviest first, each to whoever has least
            min(bins, key=lambda b: sum(t.weight for t in b)).append(task)
        shares += bins
    return shares


def num_workers(cores: int, space: int, each: int) -> int:
    """As many as there are cores and memory for (`each` takes so many bytes), some cores being left
    to the host."""
    return max(0, min(MOST, cores - 2, space // each))


@dataclass(slots=True, eq=False)
class Warming:
    """Processes on their way."""

    workers: Workers
    marker: Marker
    apart: bool  # they must be gone before weights are loaded
    began: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> bool:
        return self.workers.running

    def finish(self) -> None:
        start = time.monotonic()
        if self.workers.wait(LIMIT_S):
            self.marker.write()
        now = time.monotonic()
        log.info(
            "kernels were compiled within %.1f s, of which %.1f s were waited for",
            now - self.began,
            now - start,
        )

    def close(self) -> None:
        self.workers.close()


@dataclass(frozen=True, slots=True)
class Room:
    """What is there for the processes."""

    free: int  # bytes, for them and for the weights that the host goes on to load
    weights: int
    each: int  # bytes that one of them takes at most
    hosts: int = 1  # that may be loading on this device now, each with processes of its own


def start(
    module: str,
    model: str,
    config: object,
    wanted: Sequence[str],
    s: HostSettings,
    blocks: Mapping[str, int],
    dtype: torch.dtype,
    room: Room,
) -> Warming | None:
    """Start processes, each of which runs a family's `module`, to compile what the `wanted` stages
    need. None if that was done before, or if there is too little room."""
    if not wanted or not s.warm or not s.graphs:
        return None
    decode = sizes_for(s.max_rows)
    tasks = [t for stage in wanted for t in tasks_of(stage, decode, prefill_graphs.SIZES)]
    about = {
        **surroundings(torch.device(s.device)),
        "config": repr(config),
        "dtype": str(dtype),
        "rows": [s.max_rows, s.max_context, s.block_size],
        "blocks": [blocks_alike(blocks[stage]) for stage in wanted],
        "tasks": msgspec.to_builtins(tasks),
    }
    marker = Marker.of(directory(), about)
    workers = num_workers(len(os.sched_getaffinity(0)), room.free // room.hosts, room.each)
    if marker.there or workers < 2:
        return None
    commands = []
    for share in share_out(tasks, workers):
        job = CompileJob(
            model, s.device, str(dtype).removeprefix("torch."), s.max_rows, s.max_context,
            s.block_size,
            blocks_alike(blocks[share[0].stage]), tuple(share), s.expert_weights,
        )  # fmt: skip
        commands.append(python(module, msgspec.json.encode(job).decode()))
    return Warming(
        Workers(commands), marker, apart=len(commands) * room.each + room.weights > room.free
    )


def compiled(decoders: Sequence[DecoderConfig], dtype: torch.dtype, device: str) -> bool:
    """Are there kernels for these models? (Not where they run in Triton's interpreter.)"""
    if not apply(dtype, torch.device(device)) or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    from stretto.layers.fused import fits

    return all(fits(c) for c in decoders)


def blocks_alike(blocks: int) -> int:
    """The size of a small pool that is alike to one of so many blocks and the sink."""
    return ALIKE + bool((blocks + 1) % ALIKE)


# -- in the processes


def few(c: DecoderConfig) -> DecoderConfig:
    """The same widths with few layers."""
    return replace(c, num_layers=min(LAYERS, c.num_layers))


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps of one stage, as they are captured in a host."""

    adapter: ModelAdapter[Any]
    decoder: Decoder
    accept_layer: int | None = None

    def run(self, tasks: Sequence[Task]) -> None:
        kinds = {"decode": self.decode, "prompts": self.prompts, "picks": self.picks}
        with torch.inference_mode():
            for task in tasks:
                kinds[task.kind](task.sizes)
        if self.adapter.rows.device.type == "cuda":
            torch.cuda.synchronize()

    def decode(self, sizes: Sequence[int]) -> None:
        graphs = DecodeGraphs(self.adapter, sizes)
        for size in graphs.sizes:
            rows, positions, values = graphs.inputs(size)
            for mode in graphs.modes:
                decode_step(self.adapter, rows, positions, values, mode)

    def prompts(self, sizes: Sequence[int]) -> None:
        adapter = self.adapter
        graphs = PrefillGraphs.where_usable(
            self.decoder, adapter.cache, adapter.rows, self.accept_layer
        )
        if graphs is not None:
            for size in sizes:
                graphs.forward(size)

    def picks(self, sizes: Sequence[int]) -> None:
        """As after a pass over prompts, where which rows to pick from comes in front of their
        numbers and positions."""
        adapter, width = self.adapter, self.decoder.config.hidden_size
        for size in sizes:
            if size <= adapter.rows.num_rows:
                _, rows, positions = torch.zeros(
                    3, size, dtype=torch.int64, device=adapter.rows.device
                )
                hidden = torch.zeros(
                    size, width, dtype=adapter.cache.data.dtype, device=adapter.rows.device
                )
                adapter.pick(
                    rows.fill_(adapter.rows.sink), positions, hidden, SamplingMode(True, True)
                )


def main(run: Callable[[CompileJob], None]) -> None:
    """Of a family's module, as a process."""
    die_with_parent()
    run(msgspec.json.decode(sys.argv[1], type=CompileJob))
    sys.stderr.flush()
    os._exit(0)  # the driver's own goodbye takes a while, and the memory goes back either way

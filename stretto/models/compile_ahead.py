"""Which kernels a host's stages will need, and processes that launch each of them once, ahead of
the host.

A process builds a stage's adapter at full width with two layers and runs the very steps that will
be captured, of its share of the sizes: so whatever a kernel is specialised by (constants, sizes
divisible by 16, alignment of pointers) comes out as it will in the host. A family says how adapters
are built (`CompileAhead`). `start` is called by a host before it loads weights, `finish` before it
allocates KV pools, which take the memory that the processes had; both on its main thread, and on a
GPU alone."""

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

from stretto._imports import load
from stretto._process import die_with_parent
from stretto.config.engine import HostSettings
from stretto.kernels.formats import WeightFormat
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
Costs = Mapping[str, tuple[int, int]]
COSTS: Costs = {"decode": (6, 1), "prompts": (4, 1), "picks": (2, 1)}
"""About how long a task takes, by its kind: something once, something per size."""


class Task(msgspec.Struct, frozen=True):
    """Sizes of one kind of step that have many of their kernels in common."""

    stage: str
    kind: str  # "decode", "prompts", "picks"
    sizes: tuple[int, ...]
    weight: int = 1  # about how long it takes


class CompileJob(msgspec.Struct, frozen=True):
    """What one process does; its command line holds it as JSON."""

    adapter: str  # "module:function" that builds it
    model: str
    device: str
    dtype: str
    max_rows: int
    max_context: int
    block_size: int
    blocks: int  # of the stage's real pool, the sink included
    tasks: tuple[Task, ...]  # of one stage
    expert_weights: ExpertWeights = "full"
    formats: dict[str, WeightFormat] = {}  # of the parts whose weights are packed
    layers: int = LAYERS


@dataclass(frozen=True, slots=True, eq=False)
class StageModel:
    """A stage's adapter and the decoder in its model."""

    adapter: ModelAdapter[Any]
    decoder: Decoder
    prompts: PrefillGraphs | None = None
    # fills that many rows' inputs with random ones, which choose different experts
    scatter: Callable[[int], None] = lambda rows: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAhead:
    """What a family says of the kernels of its stages."""

    # "module:function" of (CompileJob) -> StageModel, which a process calls
    adapter: str
    decoders: Callable[[Any], Sequence[DecoderConfig]]  # of a config: those that kernels are for
    stages: tuple[str, ...]  # that have such kernels
    process_bytes: int  # on the device that one process takes at most
    # a checkpoint's config, with the formats of its parts
    read: Callable[[str], Any]
    # of a config: how parts are packed
    formats: Callable[[Any], Mapping[str, WeightFormat]] = lambda config: {}
    hosts: int = 1  # that may be loading on a device at a time, where a host has not all stages
    num_stages: int = 1  # of a pipeline
    costs: Mapping[str, Costs] = field(default_factory=dict)  # by stage, where they are not COSTS


def tasks_of(
    stage: str, decode: Sequence[int], prompts: Sequence[int], costs: Costs = COSTS
) -> list[Task]:
    """Every size once. Decode sizes that fill the same tile go together, and so do neighbouring
    prompt sizes."""

    def task(kind: str, sizes: Sequence[int]) -> Task:
        once, each = costs[kind]
        return Task(stage, kind, tuple(sizes), once + each * len(sizes))

    tiles: dict[int, list[int]] = {}
    for size in sorted(decode):
        tiles.setdefault(1 if size == 1 else max(16, 1 << (size - 1).bit_length()), []).append(size)
    ordered = sorted(prompts)
    step = max(1, -(-len(prompts) // 3))
    parts = [ordered[i : i + step] for i in range(0, len(ordered), step)]
    return [
        *(task("decode", sizes) for sizes in tiles.values()),
        *(task("prompts", sizes) for sizes in parts),
        task("picks", PICKS),
    ]


def share_out(tasks: Sequence[Task], workers: int) -> list[list[Task]]:
    """Tasks by process, each process with one stage's alone: as evenly as that allows."""
    stages: dict[str, list[Task]] = {}
    for task in tasks:
        stages.setdefault(task.stage, []).append(task)
    assert workers >= len(stages), f"{workers} processes for {len(stages)} stages"
    counts = dict.fromkeys(stages, 1)  # of processes
    for _ in range(workers - len(stages)):
        if more := [stage for stage, own in stages.items() if counts[stage] < len(own)]:
            counts[max(more, key=lambda stage: weight_of(stages[stage]) / counts[stage])] += 1
    shares: list[list[Task]] = []
    for stage, own in stages.items():
        bins: list[list[Task]] = [[] for _ in range(counts[stage])]
        for task in sorted(own, key=lambda t: -t.weight):  # each to whoever has least
            min(bins, key=weight_of).append(task)
        shares += bins
    return shares


def weight_of(tasks: Sequence[Task]) -> int:
    return sum(t.weight for t in tasks)


def num_workers(cores: int, space: int, each: int) -> int:
    """As many as there are cores and memory for (`each` takes so many bytes), some cores being left
    to the host."""
    return max(0, min(MOST, cores - 2, space // each))


@dataclass(slots=True, eq=False)
class CompileProcesses:
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
    """Bytes on a device that are free for the processes and for the weights that the host goes on
    to load."""

    free: int
    weights: int


def start(
    family: CompileAhead,
    model: str,
    config: object,
    stages: Sequence[str],
    s: HostSettings,
    blocks: Mapping[str, int],
    dtype: torch.dtype,
    room: Room,
) -> CompileProcesses | None:
    """Start processes that compile what these stages need. None if there is nothing to compile, if
    that was done before, or if there is too little room."""
    compiled = [stage for stage in stages if stage in family.stages]
    if not compiled or not s.warm or not s.graphs:
        return None
    if not has_kernels(family.decoders(config), dtype, s.device):
        return None
    decode = sizes_for(s.max_rows)
    tasks = [
        task
        for stage in compiled
        for task in tasks_of(stage, decode, prefill_graphs.SIZES, family.costs.get(stage, COSTS))
    ]
    marker = _marker(config, s, [blocks[stage] for stage in compiled], dtype, tasks)
    # The other stages' hosts may be loading on this device now.
    hosts = 1 if len(stages) == family.num_stages else family.hosts
    workers = num_workers(len(os.sched_getaffinity(0)), room.free // hosts, family.process_bytes)
    if marker.there or workers < 2:
        return None
    jobs = [
        _job(family, model, config, s, blocks, dtype, share) for share in share_out(tasks, workers)
    ]
    commands = [python(__name__, msgspec.json.encode(job).decode()) for job in jobs]
    apart = len(commands) * family.process_bytes + room.weights > room.free
    return CompileProcesses(Workers(commands), marker, apart)


def _marker(
    config: object,
    s: HostSettings,
    blocks: Sequence[int],
    dtype: torch.dtype,
    tasks: Sequence[Task],
) -> Marker:
    about = {
        **surroundings(torch.device(s.device)),
        "config": repr(config),
        "dtype": str(dtype),
        "rows": [s.max_rows, s.max_context, s.block_size],
        "blocks": [blocks_alike(n) for n in blocks],
        "tasks": msgspec.to_builtins(tasks),
    }
    return Marker.of(directory(), about)


def _job(
    family: CompileAhead,
    model: str,
    config: object,
    s: HostSettings,
    blocks: Mapping[str, int],
    dtype: torch.dtype,
    share: Sequence[Task],
) -> CompileJob:
    return CompileJob(
        family.adapter,
        model,
        s.device,
        str(dtype).removeprefix("torch."),
        s.max_rows,
        s.max_context,
        s.block_size,
        blocks_alike(blocks[share[0].stage]),
        tuple(share),
        s.expert_weights,
        dict(family.formats(config)),
    )


def has_kernels(decoders: Sequence[DecoderConfig], dtype: torch.dtype, device: str) -> bool:
    """Are there kernels for these models? (Not where they run in Triton's interpreter.)"""
    if not apply(dtype, torch.device(device)) or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    from stretto.layers.fused import fits

    return all(fits(c) for c in decoders)


def blocks_alike(blocks: int) -> int:
    """The size of a small pool that is alike to one of so many blocks and the sink."""
    return ALIKE + bool((blocks + 1) % ALIKE)


# -- in the processes


def few(c: DecoderConfig, layers: int = LAYERS) -> DecoderConfig:
    """The same widths with few layers."""
    return replace(c, num_layers=min(layers, c.num_layers))


def run(job: CompileJob) -> None:
    run_tasks(load(job.adapter)(job), job.tasks)


def run_tasks(stage: StageModel, tasks: Sequence[Task]) -> None:
    """The steps of one stage, as they are captured in a host."""
    kinds = {"decode": _decode, "prompts": _prompts, "picks": _picks}
    with torch.inference_mode():
        for task in tasks:
            kinds[task.kind](stage, task.sizes)
    if stage.adapter.rows.device.type == "cuda":
        torch.cuda.synchronize()


def _decode(stage: StageModel, sizes: Sequence[int]) -> None:
    graphs = DecodeGraphs(stage.adapter, sizes)
    for size in graphs.sizes:
        rows, positions, values = graphs.inputs(size)
        for mode in graphs.modes:
            decode_step(stage.adapter, rows, positions, values, mode)


def _prompts(stage: StageModel, sizes: Sequence[int]) -> None:
    if stage.prompts is not None:
        for size in sizes:
            stage.prompts.forward(size)


def _picks(stage: StageModel, sizes: Sequence[int]) -> None:
    """As after a pass over prompts, where which rows to pick from comes in front of their numbers
    and positions."""
    adapter, width = stage.adapter, stage.decoder.config.hidden_size
    device, dtype = adapter.rows.device, adapter.cache.data.dtype
    for size in sizes:
        if size <= adapter.rows.num_rows:
            _, rows, positions = torch.zeros(3, size, dtype=torch.int64, device=device)
            hidden = torch.zeros(size, width, dtype=dtype, device=device)
            rows.fill_(adapter.rows.sink)
            adapter.pick(rows, positions, hidden, SamplingMode(True, True))


def main() -> None:
    die_with_parent()
    run(msgspec.json.decode(sys.argv[1], type=CompileJob))
    sys.stderr.flush()
    os._exit(0)  # the driver's own goodbye takes a while, and the memory goes back either way


if __name__ == "__main__":
    main()

"""Which kernels a host's stages will need, and processes that launch each of them once.

A process builds a stage's lane at full width with two layers and runs the very steps that will be captured, of its
share of the sizes: so whatever a kernel is specialised by (constants, sizes divisible by 16, alignment of pointers)
comes out as it will in the host. `begin` is called by a host before it loads weights, `finish` before it allocates KV
pools, which take the memory that the processes had; both on its main thread, and on a GPU alone."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from stretto.kernels.fast import apply
from stretto.kernels.fast.warm import Marker, Workers, directory, python, surroundings
from stretto.layers.config import DecoderConfig
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Source
from stretto.orchestrator.settings import STAGES, HostSettings
from stretto.stage.runner import prefill_graphs
from stretto.stage.runner.graphs import SIZES, DecodeGraphs
from stretto.stage.runner.lane import decode_step
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.rows import How
from stretto.stage.runner.talker import TalkerLane
from stretto.stage.runner.thinker import ThinkerLane
from stretto.types import ExpertWeights

log = logging.getLogger(__name__)

MOST = 10
"""Processes. With more, each would spend most of its time on its own start."""
SPACE = 6 << 30
"""Bytes on the device that one of them takes at most, at the released size: two layers, embedding and head, context."""
LIMIT_S = 120.0
LAYERS = 2
"""The last layer of a stack is launched differently from those before it."""
ALIKE = 16
"""Numbers that this divides are alike to the compiler, and so are all others but 1."""
PICKS = (1, 3)
"""Rows of the picks after a prompt: their numbers lie elsewhere than in a decode step, less aligned if they are odd."""
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
        """About how long it takes, as seen on the released models: something once, something per size."""
        once, each = COSTS[self.stage, self.kind]
        return once + each * len(self.sizes)


class Job(msgspec.Struct, frozen=True):
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
    """Every size once. Decode sizes that fill the same tile go together, and so do neighbouring prompt sizes."""
    tiles: dict[int, list[int]] = {}
    for size in sorted(decode):
        tiles.setdefault(1 if size == 1 else max(16, 1 << (size - 1).bit_length()), []).append(size)
    found = [Task(stage, "decode", tuple(sizes)) for sizes in tiles.values()]
    ordered, each = sorted(prompts), -(-len(prompts) // 3)
    found += [Task(stage, "prompts", tuple(ordered[i : i + each])) for i in range(0, len(ordered), max(1, each))]
    return [*found, Task(stage, "picks", PICKS)]


def share_out(tasks: Sequence[Task], workers: int) -> list[list[Task]]:
    """Tasks by process, each process with one stage's alone: as evenly as the stages' weights allow."""
    stages = list(dict.fromkeys(t.stage for t in tasks))
    assert workers >= len(stages), f"{workers} processes for {len(stages)} stages"
    left = sum(t.weight for t in tasks)
    shares: list[list[Task]] = []
    for later, stage in reversed(list(enumerate(reversed(stages)))):
        own = sorted((t for t in tasks if t.stage == stage), key=lambda t: -t.weight)
        weight = sum(t.weight for t in own)
        fair = min(round(workers * weight / left), workers - later)  # each stage to come needs one, too
        count = max(1, min(len(own), fair))
        workers, left = workers - count, left - weight
        bins: list[list[Task]] = [[] for _ in range(count)]
        for task in own:  # the heaviest first, each to whoever has least
            min(bins, key=lambda b: sum(t.weight for t in b)).append(task)
        shares += bins
    return shares


def num_workers(cores: int, space: int) -> int:
    """As many as there are cores and memory for, some cores being left to the host itself."""
    return max(0, min(MOST, cores - 2, space // SPACE))


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
        log.info("kernels were compiled within %.1f s, of which %.1f s were waited for", now - self.began, now - start)

    def close(self) -> None:
        self.workers.close()


def begin(
    model: str,
    config: OmniConfig,
    stages: Sequence[str],
    s: HostSettings,
    dtype: torch.dtype,
    free: int,
    weights: int,
) -> Warming | None:
    """Start processes that compile what these stages need. None if that was done before, or if there is too little
    room. `free` bytes are there for the processes and for the `weights` bytes that the host goes on to load."""
    blocks = {"thinker": s.thinker_blocks, "talker": s.talker_blocks}
    wanted = [stage for stage in stages if stage in blocks]
    if not wanted or not s.warm or not s.graphs or not compiled(config, dtype, s.device):
        return None
    decode = [n for n in SIZES if n <= s.max_rows]
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
    # The other stages' hosts may be loading on this device now, each with processes of its own.
    space = free if set(stages) == set(STAGES) else free // len(STAGES)
    workers = num_workers(len(os.sched_getaffinity(0)), space)
    if marker.there or workers < 2:
        return None
    commands = []
    for share in share_out(tasks, workers):
        job = Job(
            model, s.device, str(dtype).removeprefix("torch."), s.max_rows, s.max_context, s.block_size,
            blocks_alike(blocks[share[0].stage]), tuple(share), s.expert_weights,
        )  # fmt: skip
        commands.append(python(__name__, msgspec.json.encode(job).decode()))
    return Warming(Workers(commands), marker, apart=len(commands) * SPACE + weights > free)


def compiled(config: OmniConfig, dtype: torch.dtype, device: str) -> bool:
    """Are there kernels for these models? (Not where they run in Triton's interpreter.)"""
    if not apply(dtype, torch.device(device)) or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    from stretto.layers.fused import fits

    return all(fits(c) for c in (config.thinker.text, config.talker.text, config.talker.predictor))


def blocks_alike(blocks: int | None) -> int:
    """The size of a small pool that is alike to one of so many blocks and the sink."""
    assert blocks is not None
    return ALIKE + bool((blocks + 1) % ALIKE)


# -- in the processes


def small(config: OmniConfig) -> OmniConfig:
    """The same widths with few layers."""

    def few(c: DecoderConfig) -> DecoderConfig:
        return replace(c, num_layers=min(LAYERS, c.num_layers))

    th, ta = config.thinker, config.talker
    thinker = replace(
        th,
        text=few(th.text),
        audio=replace(th.audio, num_layers=1),
        vision=replace(th.vision, num_layers=1, deepstack_layers=()),
    )
    return replace(config, thinker=thinker, talker=replace(ta, text=few(ta.text), predictor=few(ta.predictor)))


def build_lane(job: Job) -> ThinkerLane | TalkerLane:
    config = small(OmniConfig.read(job.model))
    source = Source.open(
        config, job.device, getattr(torch, job.dtype), "dummy", progress=False, expert_weights=job.expert_weights
    )
    if job.tasks[0].stage == "thinker":
        thinker = source.thinker()
        return ThinkerLane(thinker, thinker.cache(job.blocks, job.block_size), job.max_rows, job.max_context)
    words = torch.zeros(1, config.thinker.text.hidden_size, device=job.device, dtype=source.dtype)
    talker = source.talker(words)
    return TalkerLane(talker, talker.cache(job.blocks, job.block_size), job.max_rows, job.max_context)


def run(job: Job) -> None:
    steps = {"decode": run_decode, "prompts": run_prompts, "picks": run_picks}
    lane = build_lane(job)
    with torch.inference_mode():
        for task in job.tasks:
            steps[task.kind](lane, task.sizes)
    if lane.rows.device.type == "cuda":
        torch.cuda.synchronize()


def run_decode(lane: ThinkerLane | TalkerLane, sizes: Sequence[int]) -> None:
    graphs = DecodeGraphs(lane, sizes)
    for size in graphs.sizes:
        rows, positions, values = graphs.inputs(size)
        for how in graphs.ways:
            decode_step(lane, rows, positions, values, how)


def run_prompts(lane: ThinkerLane | TalkerLane, sizes: Sequence[int]) -> None:
    accept = lane.model.accept_layer if isinstance(lane, ThinkerLane) else None
    graphs = PrefillGraphs.where_usable(lane.model.model, lane.cache, lane.rows, accept)
    if graphs is not None:
        for size in sizes:
            graphs.forward(size)


def run_picks(lane: ThinkerLane | TalkerLane, sizes: Sequence[int]) -> None:
    """As after a pass over prompts, where which rows to pick from comes in front of their numbers and positions."""
    device, width = lane.rows.device, lane.model.model.config.hidden_size
    for size in sizes:
        if size <= lane.rows.num_rows:
            _, rows, positions = torch.zeros(3, size, dtype=torch.int64, device=device)
            hidden = torch.zeros(size, width, dtype=lane.model.dtype, device=device)
            lane.pick(rows.fill_(lane.rows.sink), positions, hidden, How(True, True), [])


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the host, however it ends
    run(msgspec.json.decode(sys.argv[1], type=Job))
    sys.stderr.flush()
    os._exit(0)  # the driver's own goodbye takes a while, and the memory goes back either way


if __name__ == "__main__":
    main()

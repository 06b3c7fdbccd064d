"""How an engine is laid out and sized. Frozen, validated once; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from stretto.errors import Invalid
from stretto.prompt.pool import PoolSettings
from stretto.types import ExpertWeights

STAGES = ("thinker", "talker", "code2wav")
LINKS = {"thinker>talker": ("thinker", "talker"), "talker>code2wav": ("talker", "code2wav")}
"""Name of each link: the stages that it joins, in the order of the data's way."""
Placement = tuple[tuple[str, ...], ...]
"""Stages by host, e.g. (("thinker",), ("talker", "code2wav"))."""

ONE_HOST: Placement = (STAGES,)
PROCESSES: Placement = (("thinker",), ("talker",), ("code2wav",))
TWO_HOSTS: Placement = (("thinker",), ("talker", "code2wav"))


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host needs to know to build its stages."""

    device: str = "cpu"
    dtype: str | None = None  # None: float32 on a CPU, bfloat16 on a GPU
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    expert_weights: ExpertWeights = "full"  # of the thinker; full: of `dtype`
    threads: int = 1  # of arithmetic, on a CPU
    graphs: bool = True  # on a GPU
    vision_graphs: bool = True  # with them, for single images too
    warm: bool = True  # there, compile kernels in several processes before the first start
    overlap_depth: int = 2
    launch_lead_ms: float = 1.5  # beyond its own time, a launch begins so long before the device runs out of work
    prefix_cache: bool = True
    block_size: int = 16
    thinker_blocks: int | None = None  # None: on a GPU what the weights leave, see stage/plan.py
    talker_blocks: int | None = None
    max_rows: int = 32
    max_waiting: int = 256
    max_context: int = 8192
    max_step_tokens: int = 4096
    prefill_chunk: int = 1024  # rows of prompts in a step while answers are being made: bounds how long they wait
    lone_prefill_chunk: int = 2560
    mixed_steps: bool = True  # prompts and answers in one step; else in turns
    link_slots: int = 64
    link_slot_bytes: int = 1 << 20
    switches: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.expert_weights not in get_args(ExpertWeights):
            raise Invalid(f"expert_weights must be full or float8, got {self.expert_weights!r}", "expert_weights")
        if self.expert_weights == "float8" and self.dtype == "float16":
            # Sums over float8 numbers come before their scale, and are far beyond what float16 holds.
            raise Invalid("float8 expert weights need dtype bfloat16 or float32", "expert_weights")
        if not self.launch_lead_ms >= 0:
            raise Invalid(f"launch_lead_ms must not be negative, got {self.launch_lead_ms}", "launch_lead_ms")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "switches": dict(self.switches)}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    placement: Placement = ONE_HOST
    connector: str | None = None  # None: chosen by placement
    replicas: int = 1  # pipelines side by side
    max_requests: int = 64  # running at once, over all replicas; more are refused with Busy
    stall_s: float = 30.0  # a request that makes no progress for so long fails
    start_timeout_s: float = 600.0
    restart: bool = True  # dead hosts come back
    min_pace: float = 0.0  # refuse new speech while a running stream is made slower than this times real time
    share_prefix_cache: bool = False  # between owners of requests, who could then guess each other's prompts
    max_buffered_s: float = 20.0  # sound that a slow listener may leave waiting before its request is throttled
    prompts: PoolSettings | None = None  # None: no prompt worker; prompts are built in threads of this process
    host: HostSettings = field(default_factory=HostSettings)

    def __post_init__(self) -> None:
        stages = [s for host in self.placement for s in host]
        if sorted(stages) != sorted(STAGES):
            raise Invalid(f"a placement must name each of {', '.join(STAGES)} once, got {self.placement}", "placement")
        if self.replicas < 1 or self.max_requests < 1 or self.stall_s <= 0:
            raise Invalid("replicas and max_requests must be at least 1, stall_s positive", "config")


def parse_placement(text: str) -> Placement:
    """`one`, `processes`, `two`, or stages joined by + and hosts by comma: `thinker,talker+code2wav`."""
    named = {"one": ONE_HOST, "processes": PROCESSES, "two": TWO_HOSTS}
    if text in named:
        return named[text]
    return tuple(tuple(stage.strip() for stage in host.split("+")) for host in text.split(","))

"""How an engine is laid out and sized. Frozen, validated once; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from stretto.errors import Invalid
from stretto.prompt.pool import PoolSettings
from stretto.types import ExpertWeights


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a placement: its stages in the order of the data's way, and where they run."""

    stages: tuple[str, ...]
    device: str | None = None  # None: as the settings say

    @property
    def name(self) -> str:
        return "+".join(self.stages)


Placement = Literal["one", "two", "processes"] | tuple[HostPlace, ...]
"""Which stages share a host: all of them, the first one and the rest, each alone, or as it is told."""


def places(placement: Placement, stages: Sequence[str]) -> tuple[HostPlace, ...]:
    """The hosts of a pipeline with these stages."""
    match placement:
        case "one":
            return (HostPlace(tuple(stages)),)
        case "two" if len(stages) > 1:
            return (HostPlace((stages[0],)), HostPlace(tuple(stages[1:])))
        case "two" | "processes":
            return tuple(HostPlace((stage,)) for stage in stages)
    named = [s for host in placement for s in host.stages]
    if sorted(named) != sorted(stages):
        told = ", ".join(host.name for host in placement)
        raise Invalid(f"a placement must name each of {', '.join(stages)} once, got {told!r}", "placement")
    order = {stage: i for i, stage in enumerate(stages)}
    return tuple(replace(host, stages=tuple(sorted(host.stages, key=order.__getitem__))) for host in placement)


def parse_placement(text: str) -> Placement:
    """`one`, `two`, `processes`, or stages joined by + and hosts by comma, each with its device if it has its own:
    `a@cuda:0, b+c@cuda:1`."""
    if text in ("one", "two", "processes"):
        return text  # type: ignore[return-value]
    hosts = []
    for part in text.split(","):
        stages, _, device = part.strip().partition("@")
        hosts.append(HostPlace(tuple(s.strip() for s in stages.split("+")), device.strip() or None))
    return tuple(hosts)


def parse_blocks(text: str) -> dict[str, int]:
    """`a=512, b=1024`: blocks of the stages' KV caches."""
    blocks: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        stage, _, number = part.partition("=")
        if not number.strip().isdigit() or int(number) < 1:
            raise Invalid(f"kv_blocks must be such as stage=512,other=1024, got {text!r}", "kv_blocks")
        blocks[stage.strip()] = int(number)
    return blocks


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host needs to know to build its stages."""

    device: str = "cpu"
    dtype: str | None = None  # None: float32 on a CPU, bfloat16 on a GPU
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    expert_weights: ExpertWeights = "full"  # of a mixture of experts; full: of `dtype`
    threads: int = 1  # of arithmetic, on a CPU
    graphs: bool = True  # on a GPU
    vision_graphs: bool = True  # with them, for single images too
    warm: bool = True  # there, compile kernels in several processes before the first start
    overlap_depth: int = 2
    launch_lead_ms: float = 1.5  # beyond its own time, a launch begins so long before the device runs out of work
    prefix_cache: bool = True
    block_size: int = 16
    blocks: Mapping[str, int] = field(default_factory=dict)  # of a stage's KV cache; others get what is left
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
    trace: bool = False  # record what runs when

    def __post_init__(self) -> None:
        if self.expert_weights not in get_args(ExpertWeights):
            raise Invalid(f"expert_weights must be full or float8, got {self.expert_weights!r}", "expert_weights")
        if self.expert_weights == "float8" and self.dtype == "float16":
            # Sums over float8 numbers come before their scale, and are far beyond what float16 holds.
            raise Invalid("float8 expert weights need dtype bfloat16 or float32", "expert_weights")
        if not self.launch_lead_ms >= 0:
            raise Invalid(f"launch_lead_ms must not be negative, got {self.launch_lead_ms}", "launch_lead_ms")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "switches": dict(self.switches), "blocks": dict(self.blocks)}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    placement: Placement = "one"
    connector: str = "shm"  # between hosts
    replicas: int = 1  # pipelines side by side
    max_requests: int = 64  # running at once, over all replicas; more are refused with Busy
    stall_s: float = 30.0  # a request that makes no progress for so long fails
    start_timeout_s: float = 600.0
    restart: bool = True  # dead hosts come back
    min_pace: float = 0.0  # refuse new speech while a running stream is made slower than this times real time
    share_prefix_cache: bool = False  # between owners of requests, who could then guess each other's prompts
    max_buffered_s: float = 20.0  # sound that a slow listener may leave waiting before its request is throttled
    prompts: PoolSettings | None = None  # None: no prompt worker; prompts are built in threads of this process
    trace_dir: str | None = None  # where a trace of all steps and link hops is written
    host: HostSettings = field(default_factory=HostSettings)

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.max_requests < 1 or self.stall_s <= 0:
            raise Invalid("replicas and max_requests must be at least 1, stall_s positive", "config")

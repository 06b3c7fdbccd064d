"""How an engine is laid out and sized. Frozen, validated once; imports no torch.

Fields made by `setting` are flags of `stretto serve` and `stretto generate`, with variables and
YAML keys: see `config/loader.py` for the rule that gives their names, `docs/settings.md` for all of
them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from stretto.config.overlaps import OverlapSwitches
from stretto.config.preprocess import PoolSettings
from stretto.config.setting import check_finite, setting, tuning
from stretto.errors import Invalid
from stretto.types import ExpertWeights


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a placement: its stages in data-flow order, and where they run."""

    stages: tuple[str, ...]
    # None: as the settings say; with replicas, one for each of them in turn, joined by |
    device: str | None = None

    @property
    def name(self) -> str:
        return "+".join(self.stages)


MOST_REPLICAS = 1024
CONTEXT = 8192
"""Tokens of the longest context where nothing is said."""

MOST_ROWS = 128
"""Rows of the largest decode step that is captured on a GPU."""

DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
DType = Literal["float32", "bfloat16", "float16"]

Placement = Literal["one", "two", "processes"] | tuple[HostPlace, ...]
"""Which stages share a host: all of them, the first one and the rest, each alone, or as it is
told."""


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
        raise Invalid(
            f"a placement must name each of {', '.join(stages)} once, got {told!r}", "placement"
        )
    order = {stage: i for i, stage in enumerate(stages)}
    return tuple(
        replace(host, stages=tuple(sorted(host.stages, key=order.__getitem__)))
        for host in placement
    )


def parse_placement(text: str) -> Placement:
    """`one`, `two`, `processes`, or stages joined by + and hosts by comma, each with its device if
    it has its own: `a@cuda:0, b+c@cuda:1`, or `a@0, b+c@1`. A device for each of two replicas:
    `a@0|2, b+c@1|3`."""
    if text in ("one", "two", "processes"):
        return text  # type: ignore[return-value]
    hosts = []
    for part in text.split(","):
        stages, _, device = part.strip().partition("@")
        devices = "|".join(_device(d.strip()) for d in device.split("|"))
        hosts.append(HostPlace(tuple(s.strip() for s in stages.split("+")), devices or None))
    return tuple(hosts)


def parse_devices(text: str) -> tuple[str, ...]:
    """`cuda:0, cuda:1`, or `0, 1`"""
    return tuple(_device(part.strip()) for part in text.split(",") if part.strip())


def _device(name: str) -> str:
    """A number alone is that of a card."""
    name = f"cuda:{name}" if name.isdecimal() else name
    if name and not DEVICE.fullmatch(name):
        raise Invalid(
            f"a device must be cpu, cuda, or cuda with the number of a card (cuda:1), got {name!r}",
            "device",
        )
    return name


def parse_replicas(text: str) -> int | tuple[int, int]:
    """`4`, or `1:8`"""
    least, colon, most = (part.strip() for part in text.partition(":"))
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise Invalid(
            f"replicas must be a number, or from:to such as 1:8, got {text!r}", "replicas"
        )
    return (int(least), int(most)) if colon else int(least)


def parse_blocks(text: str) -> dict[str, int]:
    """`a=512, b=1024`: blocks of the stages' KV caches."""
    blocks: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        stage, _, number = part.partition("=")
        if not number.strip().isdigit() or int(number) < 1:
            raise Invalid(
                f"kv_blocks must be such as stage=512,other=1024, got {text!r}", "kv_blocks"
            )
        blocks[stage.strip()] = int(number)
    return blocks


def parse_details(text: str) -> dict[str, str]:
    """`protocol=rdma, device=mlx5_0`"""
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): value.strip() for name, _, value in parts}


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host needs to know to build its stages."""

    device: str = "cpu"
    dtype: DType | None = setting(  # noqa: RUF009 - a field, which ruff does not see behind an alias
        None,
        "model",
        "number format of weights and arithmetic (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    load_format: Literal["safetensors", "dummy"] = setting(
        "safetensors", "model", "dummy: random weights"
    )
    expert_weights: ExpertWeights = setting(  # noqa: RUF009
        "full",
        "model",
        "experts of a mixture; float8: half the bytes, faster in larger batches; answers differ "
        "from full",
    )
    threads: int = setting(1, "model", "threads of arithmetic on a CPU, for each process", "N")
    graphs: bool = setting(True, "steps", "capture CUDA graphs of the steps, on a GPU")
    vision_graphs: bool = tuning(True, "with --graphs: capture them for single images too")
    warm: bool = setting(
        True, "steps", "before the first start on a GPU, compile kernels in several processes"
    )
    overlap_depth: int = setting(
        2, "steps", "steps of a stage in flight; 1: each waits for the one before", "N"
    )
    launch_lead_ms: float = tuning(
        1.5, "milliseconds by which a launch ends before the device runs out of work"
    )
    prefix_cache: bool = setting(
        True, "memory", "a prompt that begins like an earlier one reuses its KV blocks"
    )
    block_size: int = setting(16, "memory", "tokens in a block of the KV caches", "N")
    blocks: Mapping[str, int] = setting(
        dict, "memory", "blocks of stages' KV caches (default: on a GPU, they share what is free)",
        "STAGE=N,...",
        name="kv_blocks", parse=parse_blocks,
    )  # fmt: skip
    memory_share: float = setting(
        1.0,
        "memory",
        "part of a card's memory that a host may take, where other programs use the card too",
        "PART",
    )
    max_rows: int = setting(
        32,
        "memory",
        "requests in a stage's batch, at most 128 on a GPU (default: 32; on a GPU 16 to 128, as "
        "its memory allows)",
        "N",
    )
    max_waiting: int = setting(
        256, "limits", "requests that wait for a place in a stage's batch; more are refused", "N"
    )
    max_context: int = setting(
        CONTEXT, "memory", f"longest context, in tokens (default: {CONTEXT}, or the model's own "
                           f"where that is shorter)",
        "TOKENS", name="max_model_len",
    )  # fmt: skip
    max_step_tokens: int = setting(4096, "steps", "tokens in one step of a stage", "TOKENS")
    prefill_chunk: int | None = setting(
        None, "steps", "tokens of prompts in a step while answers are being made: bounds how long "
                        "they wait "
        "(default: 1024; on a CPU 256)", "TOKENS",
    )  # fmt: skip
    lone_prefill_chunk: int | None = tuning(
        None,
        "tokens of prompts in a step while no answer is being made: the next stage can follow a "
        "long prompt (default: 2560; on a CPU 256)",
    )
    mixed_steps: bool = tuning(True, "prompts and answers in one step; off: in turns")
    link_slots: int = tuning(64, "chunks that a link between processes holds")
    link_slot_bytes: int = tuning(1 << 20, "bytes of the largest chunk of such a link")
    switches: OverlapSwitches = field(default_factory=OverlapSwitches)
    trace: bool = False  # record what runs when; see `EngineConfig.trace_dir`

    def __post_init__(self) -> None:
        check_finite(self)
        if self.expert_weights not in get_args(ExpertWeights):
            raise Invalid(
                f"expert_weights must be full or float8, got {self.expert_weights!r}",
                "expert_weights",
            )
        if self.expert_weights == "float8" and self.dtype == "float16":
            # Sums over float8 numbers come before their scale, and are far beyond what float16
            # holds.
            raise Invalid("float8 expert weights need dtype bfloat16 or float32", "expert_weights")
        if not 0 < self.memory_share <= 1:
            raise Invalid(
                f"memory_share must be above 0 and at most 1, got {self.memory_share}",
                "memory_share",
            )
        if not self.launch_lead_ms >= 0:
            raise Invalid(
                f"launch_lead_ms must not be negative, got {self.launch_lead_ms}", "launch_lead_ms"
            )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                name = "max_model_len" if name == "max_context" else name  # as its flag is called
                raise Invalid(f"{name} must be at least {least}, got {value}", name)
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise Invalid(f"{name} must be at most {most}, got {getattr(self, name)}", name)

    def as_dict(self) -> dict[str, Any]:
        """For a message to a host; `from_dict` reads it there."""
        return {**asdict(self), "blocks": dict(self.blocks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostSettings:
        switches = OverlapSwitches(**values.get("switches", {}))
        return cls(**{**values, "switches": switches})


LEAST = {
    "threads": 1, "overlap_depth": 1, "block_size": 1, "max_rows": 1, "max_waiting": 1,
    "max_context": 32,
    "max_step_tokens": 2, "prefill_chunk": 1, "lone_prefill_chunk": 1, "link_slots": 1,
    "link_slot_bytes": 1,
}  # fmt: skip
"""The smallest values of `HostSettings`. A context holds a short question, what the chat template
puts around it, and some words of an answer. A step holds a token of an answer and one of a prompt,
so that neither waits for ever."""

MOST = {"threads": 1024, "overlap_depth": 64, "max_rows": 4096}
"""The largest values of those by which a host makes threads or objects before it looks at its
memory."""

DETAILS: Mapping[str, Mapping[str, str]] = {
    "shm": {}, "tcp": {}, "mooncake": {"protocol": r"tcp|rdma", "device": r"[\w.:+-]{0,256}"},
}  # fmt: skip
"""The connectors of the package, and what their `link_details` may be."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    placement: Placement = setting(  # noqa: RUF009
        "one", "model", "stages by process: one, two (the first and the rest), processes (each "
                        "alone), or their names: "
        "a,b+c or, with their cards, a@0,b+c@1", "HOSTS", parse=parse_placement,
    )  # fmt: skip
    connector: str = setting("shm", "model", "between processes: shm, tcp, mooncake", "NAME")
    link_details: Mapping[str, str] = setting(
        dict, "model", "settings of the connector; of mooncake: protocol=rdma,device=mlx5_0 "
                       "(default: protocol=tcp)",
        "NAME=VALUE,...", parse=parse_details,
    )  # fmt: skip
    replicas: int | tuple[int, int] = setting(
        1, "model", "pipelines side by side; each on a card of its own, where no device is named; "
                    "with --backend ray "
        "also from:to, such as 1:8", "N", parse=parse_replicas,
    )  # fmt: skip
    max_requests: int = 64  # running at once, over all replicas; more are refused with Busy
    stall_s: float = setting(
        30.0, "limits", "time without progress after which a request fails", "SECONDS"
    )
    start_timeout_s: float = setting(
        600.0, "limits", "time in which the model must be loaded", "SECONDS"
    )
    restart: bool = setting(True, "limits", "start processes that died again")
    min_pace: float = setting(
        0.0, "limits", "refuse new speech (429) while running speech is made slower than this "
                       "times real time; 0: "
        "never", "TIMES", served=1.0,
    )  # fmt: skip
    share_prefix_cache: bool = setting(
        False,
        "memory",
        "one prefix cache for all API keys: faster, but one can find out how others' prompts begin",
    )
    max_buffered_s: float = setting(
        20.0,
        "limits",
        "sound that may wait for a slow listener before its request is throttled",
        "SECONDS",
    )
    # None: no prompt worker; prompts are built in threads of this process
    prompts: PoolSettings | None = None
    trace_dir: str | None = setting(
        None,
        "logging",
        "write a trace of all steps, link hops and launches there, for Perfetto",
        "DIR",
    )
    host: HostSettings = field(default_factory=HostSettings)
    devices: tuple[str, ...] = setting(  # none: that of `host`
        (), "model", "cpu, cuda, cuda:1 (or 1) ...; several, by comma: for each of the --replicas "
                     "in turn "
        "(default: cuda if there is one)", "DEVICE,...", name="device", parse=parse_devices,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_finite(self)
        least, most = self.replica_range
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise Invalid(
                f"replicas must be from 1 to {MOST_REPLICAS}, or from:to such as 1:8, the smaller "
                f"number first, got "
                + (f"{least}:{most}" if isinstance(self.replicas, tuple) else f"{least}"),
                "replicas",
            )  # fmt: skip
        if self.max_requests < 1:
            raise Invalid(f"max_requests must be at least 1, got {self.max_requests}", "config")
        for name in ("stall_s", "start_timeout_s", "max_buffered_s"):
            if getattr(self, name) <= 0:
                raise Invalid(f"{name} must be positive, got {getattr(self, name):g}", name)
        if self.min_pace < 0:
            raise Invalid(f"min_pace must not be negative, got {self.min_pace:g}", "min_pace")
        for name, value in self.link_details.items():
            own = DETAILS.get(self.connector)  # a connector of another package checks its own
            if own is not None and not re.fullmatch(own.get(name, r"(?!)"), value):
                raise Invalid(
                    "link_details are protocol=tcp or rdma and device=NAME of the mooncake "
                    "connector, none of shm and "
                    f"tcp; got {name}={value} for {self.connector}", "link_details",
                )  # fmt: skip
        hosts = self.placement if isinstance(self.placement, tuple) else ()
        named = max(len(self.devices), *(len((h.device or "").split("|")) for h in hosts), 1)
        if named > least:
            raise Invalid(
                f"{named} devices are named, one for each replica, but replicas is {least}",
                "replicas",
            )

    @property
    def replica_range(self) -> tuple[int, int]:
        """The least and the most replicas."""
        return self.replicas if isinstance(self.replicas, tuple) else (self.replicas, self.replicas)

    @property
    def num_pipelines(self) -> int:
        """In this process."""
        if isinstance(self.replicas, tuple):
            raise Invalid("replicas that come and go, such as 1:8, need --backend ray", "replicas")
        return self.replicas

    def replica(self, number: int) -> EngineConfig:
        """The same for one pipeline alone: replicas take the devices of a list in turn."""
        host, placement = self.host, self.placement
        if self.devices:
            host = replace(host, device=self.devices[number % len(self.devices)])
        if isinstance(placement, tuple):
            placement = tuple(replace(h, device=_turn(h.device, number)) for h in placement)
        return replace(self, placement=placement, replicas=1, devices=(), host=host)


def _turn(devices: str | None, number: int) -> str | None:
    if devices is None:
        return None
    each = devices.split("|")
    return each[number % len(each)]


def check_model(
    config: EngineConfig, stages: Sequence[str], max_positions: int, stated: Collection[str] = ()
) -> None:
    """Refuse settings that a model with these stages and `max_positions` cannot have. Called as
    soon as it is known which model it is. `stated`: names of settings that somebody gave; the
    default context is shortened silently."""
    places(config.placement, stages)
    asked = config.host.max_context
    if asked > max_positions and (asked != CONTEXT or "max_model_len" in stated):
        raise Invalid(
            f"max_model_len is {asked}, but the model has only {max_positions} positions",
            "max_model_len",
        )
    if unknown := sorted(set(config.host.blocks) - set(stages)):
        raise Invalid(
            f"kv_blocks names {', '.join(unknown)}, but there are {', '.join(stages)}", "kv_blocks"
        )
    check_rows(config)


def check_rows(config: EngineConfig) -> None:
    """Refuse batches beyond the largest captured step: step by step they are launched kernel by
    kernel, and all their streams fall behind. On a CPU nothing is captured."""
    hosts = config.placement if isinstance(config.placement, tuple) else ()
    named = [config.host.device, *config.devices, *(host.device or "" for host in hosts)]
    on_gpu = any(device.startswith("cuda") for name in named for device in name.split("|"))
    if on_gpu and config.host.graphs and config.host.max_rows > MOST_ROWS:
        raise Invalid(
            f"max_rows is {config.host.max_rows}, but on a GPU steps are captured for at most "
            f"{MOST_ROWS} rows, and "
            f"larger ones are slow: --max-rows {MOST_ROWS} fits; more requests may wait for a row "
            f"(--max-concurrent), "
            "and --replicas uses more cards", "max_rows",
        )  # fmt: skip

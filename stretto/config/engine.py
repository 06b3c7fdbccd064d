"""How an engine is laid out and sized. Frozen, validated once; imports no torch.

Fields made by `setting` are flags of `stretto serve` and `stretto generate`, with variables and
YAML keys: `config/setting.py` gives their names, `docs/settings.md` lists them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Literal, get_args

from stretto.config.placement import (
    Placement,
    parse_devices,
    parse_placement,
    parse_replicas,
    places,
)
from stretto.config.setting import check_finite, setting, tuning
from stretto.errors import Invalid
from stretto.types import ExpertWeights

MAX_REPLICAS = 1024
DEFAULT_CONTEXT = 8192
"""Tokens of the longest context, by default."""

MAX_GRAPH_ROWS = 128
"""Rows of the largest decode step that is captured on a GPU."""

DType = Literal["float32", "bfloat16", "float16"]


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
class OverlapSwitches:
    """Each switches one overlap off. Tests use them as oracles (the output is the same), benches as
    ablations."""

    async_d2h: bool = tuning(True, "off: a step's payload is on the host before the loop goes on")
    async_h2d: bool = tuning(True, "off: a stage gets a chunk only when it is on the device")
    payload_stream: bool = tuning(True, "off: payloads are copied behind the step, on its stream")
    zero_copy_encode: bool = tuning(
        True, "off: chunks are encoded into bytes, which are then copied"
    )
    just_in_time: bool = tuning(
        True, "off: a step is launched as soon as there is room, even if the device has work"
    )
    prefill_priority: bool = tuning(
        True,
        "off: speech is decoded beside prefill, even if all listeners have enough buffered",
        old_name="give_way",
    )


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
        dict,
        "memory",
        "blocks of stages' KV caches (default: on a GPU, they share what is free)",
        "STAGE=N,...",
        name="kv_blocks",
        parse=parse_blocks,
    )
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
        DEFAULT_CONTEXT,
        "memory",
        f"longest context, in tokens (default: {DEFAULT_CONTEXT}, or the model's own where that is "
        "shorter)",
        "TOKENS",
        name="max_model_len",
    )
    max_step_tokens: int = setting(4096, "steps", "tokens in one step of a stage", "TOKENS")
    prefill_chunk: int | None = setting(
        None,
        "steps",
        "tokens of prompts in a step while answers are being made: bounds how long they wait "
        "(default: 1024; on a CPU 256)",
        "TOKENS",
    )
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
        for name, least in LOWER_BOUNDS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                name = "max_model_len" if name == "max_context" else name  # as its flag is called
                raise Invalid(f"{name} must be at least {least}, got {value}", name)
        for name, most in UPPER_BOUNDS.items():
            if getattr(self, name) > most:
                raise Invalid(f"{name} must be at most {most}, got {getattr(self, name)}", name)

    def as_dict(self) -> dict[str, Any]:
        """For a message to a host; `from_dict` reads it there."""
        return {**asdict(self), "blocks": dict(self.blocks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostSettings:
        switches = OverlapSwitches(**values.get("switches", {}))
        return cls(**{**values, "switches": switches})


LOWER_BOUNDS = {
    "threads": 1, "overlap_depth": 1, "block_size": 1, "max_rows": 1, "max_waiting": 1,
    "max_context": 32,
    "max_step_tokens": 2, "prefill_chunk": 1, "lone_prefill_chunk": 1, "link_slots": 1,
    "link_slot_bytes": 1,
}  # fmt: skip
"""The smallest values of `HostSettings`. A context holds a short question, what the chat template
puts around it, and some words of an answer. A step holds a token of an answer and one of a prompt,
so that neither waits for ever."""

UPPER_BOUNDS = {"threads": 1024, "overlap_depth": 64, "max_rows": 4096}
"""The largest values of those by which a host makes threads or objects before it looks at its
memory."""

POOL_UPPER_BOUNDS = {"workers": 1024, "cpu_s": 86_400, "memory_mb": 1 << 20}
"""The largest values of `PoolSettings`; the least is 1."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How prompts are built beside the server, by `preprocess/pool`."""

    workers: int = setting(
        2,
        "prompts",
        "processes that prepare large requests and media, at most",
        "N",
        name="prompt_workers",
    )
    cpu_s: int = setting(
        60,
        "prompts",
        "CPU time that preparing one request may take",
        "SECONDS",
        name="prompt_cpu_s",
    )
    memory_mb: int = setting(
        2048,
        "prompts",
        "memory that preparing one request may take, in MiB",
        "MIB",
        name="prompt_memory_mb",
    )
    grammar_cpu_s: float = setting(
        1.0, "prompts", "CPU time that compiling one JSON schema may take", "SECONDS"
    )
    grammar_memory_mb: int = setting(
        64, "prompts", "memory that compiling one JSON schema may take, in MiB", "MIB"
    )
    start_timeout_s: float = setting(
        120.0,
        "prompts",
        "time in which the process that prepares requests must be up",
        "SECONDS",
        name="prompt_start_timeout_s",
    )

    def __post_init__(self) -> None:
        check_finite(self)
        for name, most in POOL_UPPER_BOUNDS.items():
            if not 1 <= getattr(self, name) <= most:
                raise Invalid(
                    f"prompt_{name} must be from 1 to {most}, got {getattr(self, name)}",
                    f"prompt_{name}",
                )
        if not 0 < self.grammar_cpu_s <= 3600:
            raise Invalid(
                f"grammar_cpu_s must be above 0, at most 3600, got {self.grammar_cpu_s}",
                "grammar_cpu_s",
            )
        if self.grammar_memory_mb < 1:
            raise Invalid(
                f"grammar_memory_mb must be at least 1, got {self.grammar_memory_mb}",
                "grammar_memory_mb",
            )
        if not self.start_timeout_s > 0:
            raise Invalid(
                f"prompt start_timeout_s must be positive, got {self.start_timeout_s}",
                "prompt_start_timeout_s",
            )


CONNECTOR_ENTRY_POINTS = "stretto.connectors"
CONNECTORS = {
    "shm": ("stretto.transport.shm", "ShmConnector"),
    "tcp": ("stretto.transport.tcp", "TcpConnector"),
    "mooncake": ("stretto.transport.mooncake", "MooncakeConnector"),
}
"""Connectors of the package: module and class."""
CONNECTOR_PACKAGES = {"mooncake": "mooncake"}
"""Packages that connectors need and that do not come with Stretto, as they are imported."""


def check_connector(name: str) -> None:
    """Refuse a name that no link could use, minutes before the first link is made. Imports nothing
    of what a connector needs."""
    if name not in CONNECTORS and not entry_points(group=CONNECTOR_ENTRY_POINTS, name=name):
        raise unknown_connector(name, connector_names(CONNECTORS))
    package = CONNECTOR_PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        raise Invalid(
            f"connector {name!r} needs the package {package}: pip install 'stretto[{name}]'",
            "connector",
        )


def connector_names(own: Iterable[str]) -> list[str]:
    """`own`, and those that other packages add."""
    return sorted({*own, *(entry.name for entry in entry_points(group=CONNECTOR_ENTRY_POINTS))})


def unknown_connector(name: str, known: Iterable[str]) -> Invalid:
    return Invalid(f"there is no connector {name!r}; there are {', '.join(known)}", "connector")


LINK_DETAILS: Mapping[str, Mapping[str, str]] = {
    "shm": {}, "tcp": {}, "mooncake": {"protocol": r"tcp|rdma", "device": r"[\w.:+-]{0,256}"},
}  # fmt: skip
"""The `link_details` that these connectors accept, with patterns for their values."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    placement: Placement = setting(  # noqa: RUF009
        "one",
        "placement",
        "stages by process: one, two (the first and the rest), processes (each alone), or their "
        "names: a,b+c or, with their cards, a@0,b+c@1",
        "HOSTS",
        parse=parse_placement,
    )
    connector: str = setting("shm", "placement", "between processes: shm, tcp, mooncake", "NAME")
    link_details: Mapping[str, str] = setting(
        dict,
        "placement",
        "settings of the connector; of mooncake: protocol=rdma,device=mlx5_0 (default: "
        "protocol=tcp)",
        "NAME=VALUE,...",
        parse=parse_details,
    )
    replicas: int | tuple[int, int] = setting(
        1,
        "placement",
        "pipelines side by side; each on a card of its own, where no device is named; with "
        "--backend ray also from:to, such as 1:8",
        "N",
        parse=parse_replicas,
    )
    max_requests: int = 64  # running at once, over all replicas; more are refused with Busy
    stall_s: float = setting(
        30.0, "limits", "time without progress after which a request fails", "SECONDS"
    )
    start_timeout_s: float = setting(
        600.0, "limits", "time in which the model must be loaded", "SECONDS"
    )
    restart: bool = setting(True, "limits", "start processes that died again")
    min_pace: float = setting(
        0.0,
        "limits",
        "refuse new speech (429) while running speech is made slower than this times real time; "
        "0: never",
        "TIMES",
        served=1.0,
    )
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
        (),
        "placement",
        "cpu, cuda, cuda:1 (or 1) ...; several, by comma: for each of the --replicas in turn "
        "(default: cuda if there is one)",
        "DEVICE,...",
        name="device",
        parse=parse_devices,
    )

    def __post_init__(self) -> None:
        check_finite(self)
        least, most = self.replica_range
        if not 1 <= least <= most <= MAX_REPLICAS:
            raise Invalid(
                f"replicas must be from 1 to {MAX_REPLICAS}, or from:to such as 1:8, the smaller "
                f"number first, got "
                + (f"{least}:{most}" if isinstance(self.replicas, tuple) else f"{least}"),
                "replicas",
            )
        if self.max_requests < 1:
            raise Invalid(f"max_requests must be at least 1, got {self.max_requests}", "config")
        for name in ("stall_s", "start_timeout_s", "max_buffered_s"):
            if getattr(self, name) <= 0:
                raise Invalid(f"{name} must be positive, got {getattr(self, name):g}", name)
        if self.min_pace < 0:
            raise Invalid(f"min_pace must not be negative, got {self.min_pace:g}", "min_pace")
        for name, value in self.link_details.items():
            own = LINK_DETAILS.get(self.connector)  # a connector of another package checks its own
            if own is not None and not re.fullmatch(own.get(name, r"(?!)"), value):
                raise Invalid(
                    "link_details are protocol=tcp or rdma and device=NAME of the mooncake "
                    f"connector, none of shm and tcp; got {name}={value} for {self.connector}",
                    "link_details",
                )
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
        """The configuration of one pipeline alone: replicas take the devices of a list in turn."""
        host, placement = self.host, self.placement
        if self.devices:
            host = replace(host, device=self.devices[number % len(self.devices)])
        if isinstance(placement, tuple):
            placement = tuple(host_place.of_replica(number) for host_place in placement)
        return replace(self, placement=placement, replicas=1, devices=(), host=host)


def check_model(
    config: EngineConfig,
    stages: Sequence[str],
    max_positions: int,
    explicit_settings: Collection[str] = (),
) -> None:
    """Refuse settings that a model with these stages and `max_positions` cannot have. Called as
    soon as it is known which model it is. `explicit_settings`: names of settings that are not
    defaults; the default context is shortened silently."""
    places(config.placement, stages)
    max_context = config.host.max_context
    if max_context > max_positions and (
        max_context != DEFAULT_CONTEXT or "max_model_len" in explicit_settings
    ):
        raise Invalid(
            f"max_model_len is {max_context}, but the model has only {max_positions} positions",
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
    if on_gpu and config.host.graphs and config.host.max_rows > MAX_GRAPH_ROWS:
        raise Invalid(
            f"max_rows is {config.host.max_rows}, but on a GPU steps are captured for at most "
            f"{MAX_GRAPH_ROWS} rows, and larger ones are slow: --max-rows {MAX_GRAPH_ROWS} fits; "
            "more requests may wait for a row (--max-concurrent), and --replicas uses more cards",
            "max_rows",
        )

"""Everything can be set: by a flag, a variable or a key of the YAML file, and the page of settings
lists it all."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from stretto.cli import parser
from stretto.commands.generate import settings
from stretto.commands.serve import OTHER_VARIABLES, RECORDS, settings_table, settle, settle_all
from stretto.config import connectors as known
from stretto.config.cluster import ClusterConfig
from stretto.config.engine import EngineConfig, HostPlace, HostSettings, parse_placement
from stretto.config.loader import flag_of, name_of, settings_of
from stretto.config.overlaps import OverlapSwitches
from stretto.config.preprocess import PoolSettings
from stretto.config.server import WHOLE, ServerConfig
from stretto.engine.engine import PipelineEngine
from stretto.errors import Invalid
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.plan import POOLS, plan
from stretto.params import ChunkSizes
from stretto.stage.host.memory_plan import DoesNotFit, check
from stretto.transport.registry import Registry
from tests.pipeline import STAGES

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

ELSEWHERE = {
    "HostSettings.trace": "trace_dir",
    "EngineConfig.max_requests": "max_concurrent",  # and others, of which it is the sum
    "EngineConfig.prompts": "prompt_workers",  # and the other fields of PoolSettings
    "EngineConfig.host": "max_rows",  # and the others of HostSettings
    "HostSettings.device": "device",
    "HostSettings.switches": "async_d2h",  # and the others of OverlapSwitches
    "ChunkSizes.first": "first_frames",
    "ChunkSizes.each": "each_frames",
    "ChunkSizes.ramp": "packet_ramp",
}
"""Fields that are set under another record's name."""

SAMPLES = {
    "connector": "tcp",
    "link_details": "protocol=rdma", "memory_share": "0.5", "host_gpus": "0.5",
    "placement": "two", "device": "cpu,cuda:1", "replicas": "2", "kv_blocks": "a=5,b=6",
    "dtype": "float16",
    "max_bodies_mb": "700", "ssl_certfile": "c.pem", "ssl_keyfile": "k.pem", "packet_ramp": "3",
    "first_frames": "2",
    "api_key": "word", "served_model_name": "name", "allowed_origins": "https://a.example",
    "allowed_hosts": "a.example", "trusted_proxies": "10.0.0.1",
}  # fmt: skip
BESIDE = {
    "link_details": {"connector": "mooncake"},
    "device": {"replicas": "2"}, "ssl_certfile": {"ssl_keyfile": "k.pem"},
    "ssl_keyfile": {"ssl_certfile": "c.pem"},
}  # fmt: skip
"""What else must be said for a sample to be valid."""


def command(job: str, *words: str) -> argparse.Namespace:
    return parser().parse_args([job, *words])


def options(job: str) -> set[str]:
    jobs = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {option for action in jobs.choices[job]._actions for option in action.option_strings}


def every() -> list[tuple[type[Any], Field[Any]]]:
    return [(record, f) for record in RECORDS for f in settings_of(record)]


def sample(record: type[Any], f: Field[Any]) -> str:
    """A valid value that is not what is served by default."""
    default = f.default if f.metadata["served"] is MISSING else f.metadata["served"]
    kind = get_type_hints(record)[f.name]
    if name_of(f) in SAMPLES:
        return SAMPLES[name_of(f)]
    if kind is bool:
        return "no" if default else "yes"
    if get_origin(kind) is Literal:
        return next(str(c) for c in get_args(kind) if c != default)
    if int in get_args(kind):
        return "77"
    return str(default + 1) if isinstance(default, int | float) else "other"


def found(
    record: type[Any], f: Field[Any], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """The field as it reaches the engine or the server, and all the others."""
    _, engine, server, cluster = settle_all(dict(flags), environ)
    assert engine.prompts is not None
    holders: dict[type[Any], Any] = {
        EngineConfig: engine, HostSettings: engine.host, ServerConfig: server,
        PoolSettings: engine.prompts,
        ClusterConfig: cluster,
        OverlapSwitches: OverlapSwitches.read(engine.host.switches, {}),
    }  # fmt: skip
    every_value = {
        f"{r.__name__}.{g.name}": getattr(holders[r], g.name)
        for r in RECORDS
        for g in settings_of(r)
    }
    return every_value.pop(f"{record.__name__}.{f.name}"), every_value


@pytest.mark.parametrize(
    ("record", "f"), every(), ids=lambda x: name_of(x) if isinstance(x, Field) else ""
)
def test_each_can_be_set_in_all_places(
    record: type[Any], f: Field[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "find_spec", lambda package: object())  # whatever is installed here
    name, value = name_of(f), sample(record, f)
    given = {**BESIDE.get(name, {}), name: value}
    before, _ = found(record, f, {}, {})
    words = [w for n, v in given.items() for w in in_words(n, v)]
    by_flag = found(record, f, vars(command("serve", *words)), {})
    assert by_flag[0] != before
    assert found(record, f, {}, {f"STRETTO_{n.upper()}": v for n, v in given.items()}) == by_flag
    file = tmp_path / "serve.yaml"
    file.write_text("".join(f"{n.replace('_', '-')}: {v}\n" for n, v in given.items()))
    assert found(record, f, {"config": file}, {}) == by_flag
    # A flag wins over the environment, that over the file.
    assert (
        found(record, f, vars(command("serve", *words)), {f"STRETTO_{name.upper()}": "nonsense"})
        == by_flag
    )


def in_words(name: str, value: str) -> list[str]:
    switch = {"yes": flag_of(name), "no": flag_of(f"no_{name}")}
    return [switch[value]] if value in switch else [flag_of(name), value]


@pytest.mark.parametrize(
    "record", [EngineConfig, HostSettings, OverlapSwitches, PoolSettings, ChunkSizes, ServerConfig]
)
def test_no_field_is_left_out(record: type[Any]) -> None:
    flags = options("serve")
    names = {
        f"{record.__name__}.{f.name}": name_of(f) for f in fields(record) if "group" in f.metadata
    }
    for f in fields(record):
        at = f"{record.__name__}.{f.name}"
        name = ELSEWHERE.get(at) or names[at]
        assert flag_of(name) in flags, at


def test_the_page_of_settings_is_in_step() -> None:
    """`stretto serve --settings-table` prints what stands there."""
    assert settings_table() in PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in settings_table() for name in OTHER_VARIABLES)
    assert set(re.findall(r"`(--[a-z0-9-]+)[` ]", PAGE.read_text(encoding="utf-8"))) <= options(
        "serve"
    )


def test_named_connectors_are_those_that_there_are() -> None:
    [connector] = [f for f in fields(EngineConfig) if f.name == "connector"]
    named = connector.metadata["help"].removeprefix("between processes: ").split(", ")
    assert set(named) == set(Registry().names()) - {"local"}


# ---- where it runs


def test_replicas_take_devices_in_turn(tiny_dir: Path) -> None:
    _, config, _ = settle(
        vars(command("serve", "--device", "cuda:0, cuda:1", "--replicas", "4")), {}
    )
    assert config.host.device == "cuda:0"
    engine = PipelineEngine(tiny_dir, config)
    assert [p.config.host.device for p in engine._pipelines] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
        "cuda:1",
    ]
    assert all(p.config.replicas == 1 for p in engine._pipelines)


def test_stages_of_replicas_take_devices_in_turn() -> None:
    words = [
        "--placement",
        "thinker@cuda:0|cuda:2, talker+code2wav@cuda:1|cuda:3",
        "--replicas",
        "2",
    ]
    _, config, _ = settle(vars(command("serve", *words)), {})
    front, back = ("thinker",), ("talker", "code2wav")
    assert config.replica(0).placement == (HostPlace(front, "cuda:0"), HostPlace(back, "cuda:1"))
    assert config.replica(1).placement == (HostPlace(front, "cuda:2"), HostPlace(back, "cuda:3"))
    assert EngineConfig(parse_placement("a, b@cpu")).replica(0).placement == (
        HostPlace(("a",)),
        HostPlace(("b",), "cpu"),
    )


@pytest.mark.parametrize(
    "words", [["--device", "cuda:0,cuda:1"], ["--placement", "a@cuda:0|cuda:1,b"]]
)
def test_more_devices_than_replicas_are_a_mistake(words: list[str]) -> None:
    with pytest.raises(
        Invalid, match="2 devices are named, one for each replica, but replicas is 1"
    ):
        settle(vars(command("serve", *words)), {})


# ---- the others


def test_pace_counts_where_there_are_listeners() -> None:
    assert settle(vars(command("serve")), {})[1].min_pace == 1.0
    assert settle(vars(command("serve", "--min-pace", "0")), {})[1].min_pace == 0.0
    config = settings(command("generate", "x", "--text", "hi", "--device", "cpu"))
    assert config.min_pace == EngineConfig().min_pace == 0.0
    assert "--min-pace" not in options("generate")


def test_packets_of_the_server() -> None:
    assert ServerConfig().packets == ChunkSizes()
    assert ServerConfig(first_frames=2, each_frames=4, packet_ramp=0).packets == ChunkSizes(
        2, 4, None
    )
    assert ServerConfig(streaming=False, first_frames=2).packets == ChunkSizes(WHOLE, WHOLE, None)
    for wrong in (
        {"first_frames": 9},
        {"first_frames": 0},
        {"packet_ramp": 1},
        {"packet_ramp": -1},
    ):
        with pytest.raises(Invalid):
            ServerConfig(**wrong)


FLOATS = [
    (record, f)
    for record, f in every()
    if float in (get_type_hints(record)[f.name], *get_args(f.type))
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    ("record", "f"), FLOATS, ids=lambda x: name_of(x) if isinstance(x, Field) else ""
)
def test_every_number_is_finite(
    record: type[Any], f: Field[Any], value: str, tmp_path: Path
) -> None:
    """Wherever it is stated: an infinite time would never end, and what is no number passes
    comparisons."""
    name = name_of(f)
    words = re.escape(f"{name} must be a finite number")
    with pytest.raises(Invalid, match=words):
        settle_all(vars(command("serve", f"{flag_of(name)}={value}")), {})
    with pytest.raises(Invalid, match=words):
        settle_all({}, {f"STRETTO_{name.upper()}": value})
    (tmp_path / "serve.yaml").write_text(f"{name}: {value}\n")
    with pytest.raises(Invalid, match=words):
        settle_all({"config": tmp_path / "serve.yaml"}, {})


def test_there_are_numbers_to_check() -> None:
    assert {
        "stall_s",
        "queue_timeout",
        "launch_lead_ms",
        "prompt_start_timeout_s",
        "host_gpus",
    } <= {name_of(f) for _, f in FLOATS}


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 0}, {"prefill_chunk": 0}, {"max_step_tokens": 1}, {"link_slots": 0}]
)
def test_sizes_are_checked_before_anything_starts(wrong: dict[str, int]) -> None:
    with pytest.raises(Invalid, match=f"{next(iter(wrong))} must be at least"):
        HostSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["threads", "overlap_depth", "max_rows", "prompt_workers", "prompt_cpu_s", "prompt_memory_mb"],
)
def test_numbers_beyond_all_bounds_are_refused(name: str) -> None:
    """Before threads or processes are made, or a limit is set that no system takes."""
    with pytest.raises(Invalid, match=rf"{name} must be (at most|from 1 to) \d+, got {10**20}"):
        settle_all(vars(command("serve", flag_of(name), str(10**20))), {})


@pytest.mark.parametrize("stages", [STAGES, *((stage,) for stage in STAGES)], ids="+".join)
def test_a_refusal_for_lack_of_memory_recommends_flags(
    stages: tuple[str, ...], tiny_config: OmniConfig
) -> None:
    plans = plan(tiny_config, stages, HostSettings(), POOLS, torch.float32)
    with pytest.raises(DoesNotFit) as caught:
        check(plans, 1 << 10, 0, "cuda:0", 1 << 10)
    advice = str(caught.value).partition("; ")[2]
    named = set(re.findall(r"--[a-z0-9-]+", advice))
    assert {"--placement"} < named <= options("serve") & options("generate")
    assert not re.search(r"[a-z]_[a-z]", advice), "settings are named by their flags"

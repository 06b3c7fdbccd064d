"""Every setting can be given by a flag, a variable or a key of the YAML file, and the page of
settings lists it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from stretto.cli import main, parser
from stretto.commands.generate import settings
from stretto.commands.serve import OTHER_VARIABLES, settings_table
from stretto.config import engine as known
from stretto.config.cluster import ClusterConfig
from stretto.config.engine import EngineConfig, HostSettings, OverlapSwitches, PoolSettings
from stretto.config.loader import (
    ENGINE_RECORDS,
    RECORDS,
    Settings,
    load_settings,
    read_yaml,
    unknown_variables,
)
from stretto.config.placement import HostPlace, parse_placement
from stretto.config.server import WHOLE, ServerConfig
from stretto.config.setting import (
    default_of,
    flag_of,
    is_tuning,
    name_of,
    old_names,
    settings_of,
    variable_of,
)
from stretto.engine.engine import PipelineEngine
from stretto.errors import Invalid
from stretto.models.qwen3_omni.build import BUILD
from stretto.models.qwen3_omni.config import OmniConfig
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
    "first_frames": "2", "max_concurrent_share": "0.5",
    "api_key": "word", "served_model_name": "name", "allowed_origins": "https://a.example",
    "allowed_hosts": "a.example", "allowed_media_domains": "cdn.example",
    "trusted_proxies": "10.0.0.1",
    "otlp_endpoint": "http://127.0.0.1:4318",
}  # fmt: skip
BESIDE = {
    "link_details": {"connector": "mooncake"},
    "device": {"replicas": "2"}, "ssl_certfile": {"ssl_keyfile": "k.pem"},
    "ssl_keyfile": {"ssl_certfile": "c.pem"},
}  # fmt: skip
"""What else must be given for a sample to be valid."""


def command(job: str, *words: str) -> argparse.Namespace:
    return parser().parse_args([job, *words])


def load(*words: str) -> Settings:
    return load_settings(vars(command("serve", *words)), {})


def options(job: str) -> set[str]:
    """The flags that the help shows."""
    jobs = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    actions = jobs.choices[job]._actions
    return {o for a in actions if a.help is not argparse.SUPPRESS for o in a.option_strings}


@dataclass(frozen=True)
class Case:
    """A setting, and the name that it is given by."""

    record: type[Any]
    f: Field[Any]
    name: str
    tune: bool = False
    """It is given through --tune."""

    def flags(self, value: str) -> list[str]:
        if self.tune:
            return ["--tune", f"{self.name}={value}"]
        words = {"yes": flag_of(self.name), "no": flag_of(f"no_{self.name}")}
        return [words[value]] if value in words else [flag_of(self.name), value]

    def variables(self, value: str) -> dict[str, str]:
        if self.tune:
            return {"STRETTO_TUNE": f"{self.name}={value}"}
        return {variable_of(self.name): value}

    def lines(self, value: str) -> list[str]:
        """Each a way to write it in YAML."""
        key = self.name.replace("_", "-")
        if self.tune:
            mapping = f"tune:\n  {key}: {value}\n"
            return [mapping, f"tune: {self.name}={value}\n", mapping.replace(key, self.name)]
        return [f"{key}: {value}\n", f"{self.name}: {value}\n"]


EVERY = [
    Case(record, f, name_of(f), is_tuning(f)) for record in RECORDS for f in settings_of(record)
]
OLD = [Case(r, f, old) for r in RECORDS for f in settings_of(r) for old in old_names(f)]
TUNING = {case.name for case in EVERY if case.tune}
by_name = pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)


def sample(case: Case) -> str:
    """A valid value that is not what is served by default."""
    default = default_of(case.f)
    kind = get_type_hints(case.record)[case.f.name]
    name = name_of(case.f)
    if name in SAMPLES:
        return SAMPLES[name]
    if kind is bool:
        return "no" if default else "yes"
    if get_origin(kind) is Literal:
        return next(str(c) for c in get_args(kind) if c != default)
    if int in get_args(kind):
        return "77"
    return str(default + 1) if isinstance(default, int | float) else "other"


def found(
    case: Case, flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """The field as it reaches the engine or the server, and all the others."""
    loaded = load_settings(dict(flags), environ)
    assert loaded.engine.prompts is not None
    holders: dict[type[Any], Any] = {
        EngineConfig: loaded.engine,
        HostSettings: loaded.engine.host,
        OverlapSwitches: loaded.engine.host.switches,
        ServerConfig: loaded.server,
        PoolSettings: loaded.engine.prompts,
        ClusterConfig: loaded.cluster,
    }
    every_value = {
        f"{r.__name__}.{g.name}": getattr(holders[r], g.name)
        for r in RECORDS
        for g in settings_of(r)
    }
    return every_value.pop(f"{case.record.__name__}.{case.f.name}"), every_value


@by_name
def test_each_can_be_set_in_all_places(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "find_spec", lambda package: object())  # whatever is installed here
    value, beside = sample(case), BESIDE.get(case.name, {})
    before, _ = found(case, {}, {})
    words = [w for n, v in beside.items() for w in (flag_of(n), v)] + case.flags(value)
    by_flag = found(case, vars(command("serve", *words)), {})
    assert by_flag[0] != before
    environ = {variable_of(n): v for n, v in beside.items()} | case.variables(value)
    assert found(case, {}, environ) == by_flag
    file = tmp_path / "serve.yaml"
    for line in case.lines(value):
        file.write_text("".join(f"{n}: {v}\n" for n, v in beside.items()) + line)
        assert found(case, {"config": file}, {}) == by_flag
    # A flag wins over the environment, that over the file.
    assert found(case, vars(command("serve", *words)), case.variables("nonsense")) == by_flag


# ---- tuning settings, and old names


@pytest.mark.parametrize("case", OLD, ids=lambda case: case.name)
def test_an_old_name_still_works_with_a_warning(case: Case, tmp_path: Path) -> None:
    value, name = sample(case), name_of(case.f)
    new = Case(case.record, case.f, name, is_tuning(case.f))
    by_flag = found(case, vars(command("serve", *new.flags(value))), {})
    file = tmp_path / "serve.yaml"
    file.write_text(case.lines(value)[0])
    old_flag, [(variable, _)] = case.flags(value)[0], case.variables(value).items()
    key = case.name.replace("_", "-")
    for flags, environ, old, spelling in (
        (vars(command("serve", *case.flags(value))), {}, old_flag, "--tune "),
        ({}, case.variables(value), variable, "STRETTO_TUNE="),
        ({"config": file}, {}, key, "tune: {"),
    ):
        assert found(case, flags, environ) == by_flag
        [warning] = load_settings(flags, environ).warnings
        assert warning.startswith(f"{old} is now ")
        assert name in warning
        assert (spelling in warning) == new.tune
    assert not unknown_variables(case.variables(value))
    assert case.flags(value)[0] not in options("serve")


@pytest.mark.parametrize("case", OLD, ids=lambda case: case.name)
def test_old_and_new_name_together_are_refused(case: Case) -> None:
    value, name = sample(case), name_of(case.f)
    new = Case(case.record, case.f, name, is_tuning(case.f))
    with pytest.raises(Invalid, match="give only the new one"):
        found(case, vars(command("serve", *case.flags(value), *new.flags(value))), {})
    with pytest.raises(Invalid, match="give only the new one"):
        found(case, {}, case.variables(value) | new.variables(value))


def test_what_the_warning_recommends_means_the_same() -> None:
    old = load("--no-give-way", "--launch-lead-ms", "2.5")
    recommended = [text.partition(" is now ")[2].partition(";")[0] for text in old.warnings]
    assert sorted(recommended) == ["--tune launch_lead_ms=2.5", "--tune prefill_priority=off"]
    new = load(*(word for text in recommended for word in text.split()))
    assert (new.engine, new.warnings) == (old.engine, ())


def test_several_tuning_settings_at_once() -> None:
    once = load("--tune", "launch_lead_ms=2, mixed-steps=off,", "--tune", "launch_lead_ms=3").engine
    assert (once.host.launch_lead_ms, once.host.mixed_steps) == (3.0, False)
    # Each from the first place that gives it.
    flags = vars(command("serve", "--tune", "launch_lead_ms=4"))
    both = load_settings(flags, {"STRETTO_TUNE": "launch_lead_ms=5,mixed_steps=off"}).engine
    assert (both.host.launch_lead_ms, both.host.mixed_steps) == (4.0, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("launch_led_ms=2", "--tune: there is no tuning setting 'launch_led_ms'; "
                            "did you mean launch_lead_ms?"),
        ("give_way=off", "there is no tuning setting 'give_way'; there are async_d2h, async_h2d,"),
        ("max_rows=3", "--tune: max_rows is a setting of its own, --max-rows"),
        ("mixed_steps", "--tune takes NAME=VALUE,..., got 'mixed_steps'"),
        ("mixed_steps=perhaps", "mixed_steps must be on or off, got 'perhaps'"),
        ("launch_lead_ms=soon", "launch_lead_ms must be a number, got 'soon'"),
        ("link_slots=1.5", "link_slots must be a whole number, got '1.5'"),
        ("link_slots=0", "link_slots must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_a_wrong_tuning_setting_is_one_clear_sentence(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--tune", text]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_generate_takes_the_tuning_settings_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*words: str) -> EngineConfig:
        return settings(command("generate", "x", "--text", "hi", "--device", "cpu", *words))

    assert read("--tune", "prefill_priority=off").host.switches.prefill_priority is False
    assert read("--no-give-way").host.switches.prefill_priority is False
    assert "--no-give-way is now --tune prefill_priority=off" in capsys.readouterr().err
    with pytest.raises(Invalid, match="no tuning setting 'body_grace'"):
        read("--tune", "body_grace=1")
    monkeypatch.setenv("STRETTO_TUNE", "body_grace=1,mixed_steps=off")  # that of a server too
    assert read().host.mixed_steps is False


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "port: 1\nhost: file\nmax-body-mb: 3\napi_key: [a, b]\nmodel: from-file\nmetrics: no\n"
    )
    environ = {
        "STRETTO_PORT": "2",
        "STRETTO_HOST": "environment",
        "STRETTO_DEVICE": "cpu",
        "STRETTO_CONFIG": str(file),
    }
    loaded = load_settings(vars(command("serve", "--port", "3")), environ)
    config, engine = loaded.server, loaded.engine
    assert (config.port, config.host, config.max_body_mb) == (3, "environment", 3.0)
    assert config.api_key == ("a", "b")
    assert not config.metrics
    assert config.drain_timeout == ServerConfig().drain_timeout
    assert loaded.model == "from-file"
    assert (engine.host, engine.max_requests) == (
        HostSettings(device="cpu"),
        config.engine_requests,
    )
    words = ("here", "--api-key", "x", "--api-key", "y", "--metrics")
    loaded = load_settings(vars(command("serve", *words)), environ)
    config = loaded.server
    assert (loaded.model, config.api_key, config.metrics) == ("here", ("x", "y"), True)
    config = load_settings({}, {"STRETTO_API_KEY": "k1, k2", "STRETTO_METRICS": "false"}).server
    assert (config.api_key, config.metrics) == (("k1", "k2"), False)


@pytest.mark.parametrize(
    "text",
    [
        "prot: 1",
        "- 1",
        "port: [",
        "port: high",
        "port: 99999",
        "port: 1.5",
        "log_format: xml",
        "dtype: int8",
        "expert_weights: int4",
        "tune: 3",
        "tune: {launch_led_ms: 3}",
        "tune: {launch_lead_ms: [3]}",
    ],
)
def test_bad_settings_are_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(Invalid):
        load("--config", str(file))
    with pytest.raises(Invalid):
        read_yaml(tmp_path / "none.yaml")


def test_bad_environment() -> None:
    for name, value in (
        ("PORT", "x"),
        ("METRICS", "perhaps"),
        ("API_KEY", "a\x7f b é"),
        ("SSL_CERTFILE", "only.pem"),
        ("TUNE", "launch_lead_ms"),
    ):
        with pytest.raises(Invalid):
            load_settings({}, {f"STRETTO_{name}": value})
    environ = {"STRETTO_PROT": "1", "STRETTO_PORT": "1", "STRETTO_TUNE": "", "HOME": "/"}
    assert unknown_variables(environ) == {"STRETTO_PROT": "did you mean STRETTO_PORT?"}
    of_kernels = dict.fromkeys(("STRETTO_KERNELS", "STRETTO_TUNING"), "1")
    assert unknown_variables(of_kernels, OTHER_VARIABLES) == {}


def test_expert_weights_come_from_all_places_and_reach_the_hosts(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("expert-weights: float8\n")

    def found(words: tuple[str, ...], environ: dict[str, str]) -> str:
        return load_settings(vars(command("serve", *words)), environ).engine.host.expert_weights

    assert found((), {}) == "full"
    assert found(("--config", str(file)), {}) == "float8"
    assert found((), {"STRETTO_EXPERT_WEIGHTS": "float8"}) == "float8"
    assert found(("--expert-weights", "full"), {"STRETTO_EXPERT_WEIGHTS": "float8"}) == "full"
    with pytest.raises(
        Invalid, match="STRETTO_EXPERT_WEIGHTS must be one of full, float8, got 'fp8'"
    ):
        found((), {"STRETTO_EXPERT_WEIGHTS": "fp8"})
    with pytest.raises(Invalid, match="bfloat16 or float32"):
        found(("--expert-weights", "float8", "--dtype", "float16"), {})
    with pytest.raises(Invalid, match="expert_weights must be full or float8"):
        HostSettings(expert_weights="int4")  # type: ignore[arg-type]


def test_keys_are_never_shown() -> None:
    with pytest.raises(Invalid) as caught:
        ServerConfig(api_key=("sécret",))
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "record", [EngineConfig, HostSettings, OverlapSwitches, PoolSettings, ChunkSizes, ServerConfig]
)
def test_no_field_is_left_out(record: type[Any]) -> None:
    known = {flag.removeprefix("--").replace("-", "_") for flag in options("serve")} | TUNING
    names = {f.name: name_of(f) for f in settings_of(record)}
    for f in fields(record):
        at = f"{record.__name__}.{f.name}"
        assert (ELSEWHERE.get(at) or names[f.name]) in known, at


def test_only_engine_records_have_flags_of_generate() -> None:
    own = {name_of(f) for f in settings_of(*ENGINE_RECORDS)}
    assert {"placement", "max_rows", "async_d2h"} <= own
    assert not own & {name_of(f) for f in settings_of(ServerConfig, ClusterConfig)}


def test_the_page_of_settings_is_in_step() -> None:
    """`stretto serve --settings-table` prints what stands there."""
    page = PAGE.read_text(encoding="utf-8")
    assert settings_table() in page
    assert all(f"`{name}`" in settings_table() for name in OTHER_VARIABLES)
    assert all(f"| `{name}` |" in settings_table() for name in TUNING)
    assert set(re.findall(r"`(--[a-z0-9-]+)[` ]", page)) <= options("serve")


def test_named_connectors_are_those_that_there_are() -> None:
    [connector] = [f for f in fields(EngineConfig) if f.name == "connector"]
    named = connector.metadata["help"].removeprefix("between processes: ").split(", ")
    assert set(named) == set(Registry().names()) - {"local"}


# ---- where it runs


def test_replicas_take_devices_in_turn(tiny_dir: Path) -> None:
    config = load("--device", "cuda:0, cuda:1", "--replicas", "4").engine
    assert config.host.device == "cuda:0"
    engine = PipelineEngine(tiny_dir, config)
    assert [p.config.host.device for p in engine.pipelines] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
        "cuda:1",
    ]
    assert all(p.config.replicas == 1 for p in engine.pipelines)


def test_stages_of_replicas_take_devices_in_turn() -> None:
    words = [
        "--placement",
        "thinker@cuda:0|cuda:2, talker+code2wav@cuda:1|cuda:3",
        "--replicas",
        "2",
    ]
    config = load(*words).engine
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
        load(*words)


# ---- the others


def test_pace_counts_where_there_are_listeners() -> None:
    assert load().engine.min_pace == 1.0
    assert load("--min-pace", "0").engine.min_pace == 0.0
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
    case
    for case in EVERY
    if float in (get_type_hints(case.record)[case.f.name], *get_args(case.f.type))
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("case", FLOATS, ids=lambda case: case.name)
def test_every_number_is_finite(case: Case, value: str, tmp_path: Path) -> None:
    """Wherever it is given: an infinite time would never end, and what is no number passes
    comparisons."""
    words = re.escape(f"{case.name} must be a finite number")
    flag = "=".join(case.flags(value)) if not case.tune else f"--tune={case.name}={value}"
    with pytest.raises(Invalid, match=words):
        load(flag)
    with pytest.raises(Invalid, match=words):
        load_settings({}, case.variables(value))
    (tmp_path / "serve.yaml").write_text(case.lines(value)[0])
    with pytest.raises(Invalid, match=words):
        load_settings({"config": tmp_path / "serve.yaml"}, {})


def test_there_are_numbers_to_check() -> None:
    assert {
        "stall_s",
        "queue_timeout",
        "launch_lead_ms",
        "prompt_start_timeout_s",
        "host_gpus",
    } <= {case.name for case in FLOATS}


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
        load(flag_of(name), str(10**20))


@pytest.mark.parametrize("stages", [STAGES, *((stage,) for stage in STAGES)], ids="+".join)
def test_a_refusal_for_lack_of_memory_recommends_flags(
    stages: tuple[str, ...], tiny_config: OmniConfig
) -> None:
    plans = BUILD.plan(tiny_config, stages, HostSettings(), BUILD.cpu_blocks, torch.float32)
    with pytest.raises(DoesNotFit) as caught:
        check(plans, 1 << 10, 0, "cuda:0", 1 << 10)
    advice = str(caught.value).partition("; ")[2]
    named = set(re.findall(r"--[a-z0-9-]+", advice))
    assert {"--placement"} < named <= options("serve") & options("generate")
    assert not re.search(r"[a-z]_[a-z]", advice), "settings are named by their flags"

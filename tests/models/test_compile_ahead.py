"""Kernels are compiled ahead for every size that will be captured, once, and a host does not depend
on it."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.engine import HostSettings
from stretto.kernels.triton.compile_ahead import Marker, Workers
from stretto.messages.hosts import Loading
from stretto.models import building
from stretto.models import compile_ahead as shared
from stretto.models.building import HostBuilder
from stretto.models.compile_ahead import (
    CompileJob,
    CompileProcesses,
    Room,
    Task,
    num_workers,
    run,
    share_out,
    tasks_of,
)
from stretto.models.qwen3_omni import build
from stretto.models.qwen3_omni.build import BUILD, small, small_stage
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.stage.host.context import StageContext
from stretto.stage.host.host import Host
from stretto.stage.runner import prefill_graphs
from stretto.stage.runner.graphs import SIZES
from tests.pipeline import STAGES, configure
from tests.stage.reports import Reports

COMPILE_AHEAD = BUILD.compile_ahead
assert COMPILE_AHEAD is not None
SPACE = COMPILE_AHEAD.process_bytes
Sizes = st.sets(st.integers(1, 300), max_size=20)
SETTINGS = HostSettings(device="cuda:0", max_rows=8, blocks={"thinker": 100, "talker": 47})


def sizes_of(tasks: list[Task], stage: str, kind: str) -> list[int]:
    return sorted(n for t in tasks if (t.stage, t.kind) == (stage, kind) for n in t.sizes)


@given(Sizes, Sizes)
def test_every_size_is_in_one_task(decode: set[int], prompts: set[int]) -> None:
    tasks = tasks_of("thinker", sorted(decode, reverse=True), sorted(prompts))
    assert sizes_of(tasks, "thinker", "decode") == sorted(decode)
    assert sizes_of(tasks, "thinker", "prompts") == sorted(prompts)
    assert all(t.sizes and t.weight > 0 for t in tasks)


@given(
    Sizes,
    Sizes,
    st.sampled_from([("thinker",), ("talker",), ("thinker", "talker")]),
    st.integers(2, 40),
)
def test_every_task_is_in_one_share(
    decode: set[int], prompts: set[int], stages: tuple[str, ...], workers: int
) -> None:
    tasks = [t for stage in stages for t in tasks_of(stage, sorted(decode), sorted(prompts))]
    shares = share_out(tasks, workers)
    assert Counter(t for share in shares for t in share) == Counter(tasks)
    assert len(shares) <= workers
    assert all(len({t.stage for t in share}) == 1 for share in shares)


def test_shares_are_even() -> None:
    tasks = [
        t for stage in ("thinker", "talker") for t in tasks_of(stage, SIZES, prefill_graphs.SIZES)
    ]
    weights = [sum(t.weight for t in share) for share in share_out(tasks, 10)]
    assert len(weights) == 10
    assert max(weights) < 1.5 * sum(weights) / 10


def test_as_many_as_cores_and_memory_allow() -> None:
    assert num_workers(16, 100 * SPACE, SPACE) == shared.MOST
    assert num_workers(6, 100 * SPACE, SPACE) == 4
    assert num_workers(16, 3 * SPACE - 1, SPACE) == 2
    assert all(num_workers(*told, SPACE) == 0 for told in ((1, 100 * SPACE), (16, 0), (16, -SPACE)))


def test_small_models_are_as_wide(tiny_config: OmniConfig) -> None:
    deep = replace(
        tiny_config,
        thinker=replace(tiny_config.thinker, text=replace(tiny_config.thinker.text, num_layers=9)),
    )
    got = small(deep)
    assert got.thinker.text == replace(deep.thinker.text, num_layers=2)
    assert got.talker.predictor.hidden_size == deep.talker.predictor.hidden_size
    assert got.code2wav == deep.code2wav


@pytest.mark.parametrize("blocks", [0, 14, 15, 16, 100, 16384])
def test_small_pools_are_alike(blocks: int) -> None:
    got = shared.blocks_alike(blocks)
    assert (got % 16 == 0) == ((blocks + 1) % 16 == 0)
    assert 1 < got < 32


# -- the processes


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_a_process_runs_all_its_tasks(
    stage: str, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU there is nothing to compile, but the same steps can be run."""
    decoded: list[int] = []
    prompts: list[int] = []
    picked: list[int] = []

    def spy(owner: Any, name: str, note: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def watched(*args: Any) -> Any:
            note(*args)
            return real(*args)

        monkeypatch.setattr(owner, name, watched)

    class Passes:
        def run(self, *args: Any) -> None:
            """None is captured."""

        def forward(self, size: int) -> None:
            prompts.append(size)

    spy(
        shared,
        "decode_step",
        lambda adapter, rows, positions, values, how: decoded.append(len(rows)),
    )
    for adapter in (build.ThinkerAdapter, build.TalkerAdapter):
        spy(adapter, "pick", lambda self, rows, *args: picked.append(len(rows)))
    monkeypatch.setattr(prefill_graphs.PrefillGraphs, "where_usable", lambda *args: Passes())
    told = CompileJob(
        COMPILE_AHEAD.adapter,
        str(tiny_dir),
        "cpu",
        "float32",
        4,
        64,
        16,
        18,
        tuple(tasks_of(stage, [1, 2, 4], [16, 32])),
    )
    run(msgspec.json.decode(msgspec.json.encode(told), type=CompileJob))
    assert set(decoded) == {1, 2, 4}
    assert prompts == [16, 32]
    assert set(picked) == {1, 2, 3, 4}


# -- in the host


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CompileJob]:
    """As on a GPU with 8 cores, with processes that only end well."""
    jobs: list[CompileJob] = []

    def command(module: str, text: str) -> list[str]:
        assert module == "stretto.models.compile_ahead"
        jobs.append(msgspec.json.decode(text, type=CompileJob))
        return [sys.executable, "-c", "pass"]

    monkeypatch.setattr(shared, "python", command)
    monkeypatch.setattr(shared, "has_kernels", lambda config, dtype, device: True)
    monkeypatch.setattr(shared, "surroundings", lambda device: {"gpu": "none"})
    monkeypatch.setattr(shared, "directory", lambda: tmp_path)
    monkeypatch.setattr(shared.os, "sched_getaffinity", lambda pid: set(range(8)))
    return jobs


def start(
    config: OmniConfig,
    s: HostSettings = SETTINGS,
    stages: tuple[str, ...] = STAGES,
    free: int = 100 * SPACE,
) -> CompileProcesses | None:
    room = Room(free, 10 * SPACE)
    return shared.start(COMPILE_AHEAD, "dir", config, stages, s, s.blocks, torch.bfloat16, room)


def test_a_host_compiles_once(tiny_config: OmniConfig, commands: list[CompileJob]) -> None:
    first = start(tiny_config)
    assert first is not None
    assert not first.apart
    assert len(commands) == 6
    tasks = [t for job in commands for t in job.tasks]
    for stage in ("thinker", "talker"):
        assert sizes_of(tasks, stage, "decode") == [1, 2, 4, 8]
        assert sizes_of(tasks, stage, "prompts") == list(prefill_graphs.SIZES)
    assert {(job.tasks[0].stage, job.blocks) for job in commands} == {
        ("thinker", 17),
        ("talker", 16),
    }
    assert start(tiny_config) is not None, "not done before it is finished"
    first.finish()
    assert start(tiny_config) is None


def test_another_host_compiles_its_own(tiny_config: OmniConfig, commands: list[CompileJob]) -> None:
    first = start(tiny_config)
    assert first is not None
    first.finish()
    others = [
        start(tiny_config, replace(SETTINGS, max_rows=16)),
        start(tiny_config, replace(SETTINGS, max_context=4096)),
        start(tiny_config, replace(SETTINGS, blocks={**SETTINGS.blocks, "thinker": 111})),
        start(tiny_config, stages=("talker", "code2wav")),
        start(replace(tiny_config, talker=replace(tiny_config.talker, num_code_groups=8))),
    ]
    assert None not in others
    assert (
        start(tiny_config, replace(SETTINGS, blocks={**SETTINGS.blocks, "thinker": 113})) is None
    ), "a pool that is alike"


def test_the_processes_have_the_experts_of_the_host(
    tiny_config: OmniConfig, commands: list[CompileJob]
) -> None:
    first = start(tiny_config)
    assert first is not None
    first.finish()
    assert {job.expert_weights for job in commands} == {"full"}
    commands.clear()
    second = start(tiny_config.with_float8_experts(), replace(SETTINGS, expert_weights="float8"))
    assert second is not None, "other kernels"
    second.close()
    assert {job.expert_weights for job in commands} == {"float8"}


@pytest.mark.parametrize("experts", ["full", "float8"])
def test_a_process_builds_experts_of_the_jobs_format(
    experts: Literal["full", "float8"], tiny_dir: Path
) -> None:
    adapter: Any = small_stage(
        CompileJob(
            COMPILE_AHEAD.adapter,
            str(tiny_dir),
            "cpu",
            "float32",
            4,
            64,
            16,
            18,
            (Task("thinker", "picks", ()),),
            experts,
        )
    )
    dtypes = {p.dtype for n, p in adapter.adapter.model.named_parameters() if ".experts." in n}
    assert dtypes == {torch.float8_e4m3fn if experts == "float8" else torch.float32}


def test_some_hosts_have_nothing_to_compile(
    tiny_config: OmniConfig, commands: list[CompileJob]
) -> None:
    assert start(tiny_config, replace(SETTINGS, warm=False)) is None
    assert start(tiny_config, replace(SETTINGS, graphs=False)) is None
    assert start(tiny_config, stages=("code2wav",)) is None
    assert start(tiny_config, free=2 * SPACE - 1) is None
    assert not commands


def test_weights_wait_where_memory_is_short(
    tiny_config: OmniConfig, commands: list[CompileJob]
) -> None:
    first = start(tiny_config, free=12 * SPACE)
    assert first is not None
    assert first.apart
    first.close()


def test_a_host_of_some_stages_leaves_room_for_the_others(
    tiny_config: OmniConfig, commands: list[CompileJob]
) -> None:
    first = start(tiny_config, stages=("thinker",), free=12 * SPACE)
    assert first is not None
    assert len(commands) == 4
    assert start(tiny_config, stages=("thinker",), free=5 * SPACE) is None
    first.close()


def test_a_process_that_dies_fails_no_host(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Reports()
    context = StageContext(
        str(tiny_dir),
        HostSettings(),
        torch.device("cpu"),
        lambda: None,
        told,
    )
    builder = HostBuilder(BUILD, STAGES, context)
    dying = [sys.executable, "-c", "import sys; sys.stdin.read(); raise SystemExit('no memory')"]
    builder.compiling = CompileProcesses(Workers([dying]), Marker.of(tmp_path, {}), False)
    builder.finish_compiling("thinker")
    assert builder.compiling is None
    assert all(m == Loading("thinker", "compiling kernels") for m in told.messages)
    assert "no memory" in caplog.text
    assert not Marker.of(tmp_path, {}).there


def test_a_cpu_has_no_part_in_this(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(building, "start", never)
    told = Reports()
    host = Host(configure(str(tiny_dir), STAGES, {}), HostSettings(), told)
    host.load()
    assert tuple(host.stages) == STAGES
    assert not any(m.what == "compiling kernels" for m in told.messages)

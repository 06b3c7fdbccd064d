"""What the server uses of uvicorn is no API: each name that it uses is there, in the versions that
may be installed."""

from __future__ import annotations

import ast
import inspect
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.sync.client import connect

from stretto.server import run
from stretto.server.http import connection as protocol
from stretto.server.http import websocket
from stretto.server.http.connection import Connection
from stretto.server.http.websocket import Socket
from stretto.server.openai.live_speech import PATH as LIVE_SPEECH
from tests.server.conftest import HEAD, PATIENCE_S, Running, read_until, serve
from tests.server.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]


def attributes(module: Any, name: str) -> list[ast.Attribute]:
    tree = ast.parse(inspect.getsource(module))
    [it] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [node for node in ast.walk(it) if isinstance(node, ast.Attribute)]


def used(module: Any, name: str, variable: str = "self") -> set[str]:
    """Names that a class looks up on itself, or on what one of its variables holds."""
    found = attributes(module, name)
    return {
        node.attr
        for node in found
        if isinstance(node.value, ast.Name) and node.value.id == variable
    }


def inherited(module: Any, name: str) -> set[str]:
    """Methods that it calls by `super()`."""
    found = ((node.attr, node.value) for node in attributes(module, name))
    return {
        n
        for n, v in found
        if isinstance(v, ast.Call) and isinstance(v.func, ast.Name) and v.func.id == "super"
    }


def check(it: object, names: set[str], where: Any, base: type[Any]) -> None:
    missing = sorted(n for n in names if not hasattr(it, n))
    assert not missing, (
        f"{Path(where.__file__).name} uses {', '.join(missing)} of "
        f"{base.__module__}.{base.__name__}, which uvicorn "
        f"{uvicorn.__version__} does not have: adapt the file, and the versions in pyproject.toml"
    )


@pytest.fixture(scope="module")
def running() -> Any:
    with serve(ScriptedEngine()) as running:
        yield running


def connections(running: Running, kind: type[Any]) -> list[Any]:
    return [c for c in running.server.uvicorn.server_state.connections if isinstance(c, kind)]


def test_the_installed_version_is_one_that_may_be() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [need] = [r for r in map(Requirement, project["dependencies"]) if r.name == "uvicorn"]
    series = re.fullmatch(r"<0\.(\d+),>=0\.(\d+)", str(need.specifier))
    assert series is not None, "private parts change with any minor version"
    assert int(series[1]) == int(series[2]) + 1
    assert uvicorn.__version__ in need.specifier


def test_http(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as s:
        s.sendall(f"GET /live {HEAD}\r\n".encode())
        read_until(s, b"alive")
        [connection] = connections(running, Connection)
        check(connection, used(protocol, "Connection"), protocol, HttpToolsProtocol)
        check(HttpToolsProtocol, inherited(protocol, "Connection"), protocol, HttpToolsProtocol)
        cycle = connection.cycle
        check(cycle, used(protocol, "Connection", "cycle"), protocol, type(cycle))
        names = {
            "body",
            "more_body",
            "response_started",
            "response_complete",
            "disconnected",
            "message_event",
        }
        check(cycle, names, protocol, type(cycle))
        check(
            connection.flow,
            {"read_paused", "pause_reading", "resume_reading", "_transport"},
            protocol,
            protocol.Flow,
        )


def test_websocket(running: Running) -> None:
    with connect(f"ws://127.0.0.1:{running.port}{LIVE_SPEECH}"):
        [it] = connections(running, Socket)
        check(it, used(websocket, "Socket"), websocket, WebSocketsSansIOProtocol)
        check(
            WebSocketsSansIOProtocol,
            inherited(websocket, "Socket"),
            websocket,
            WebSocketsSansIOProtocol,
        )
        check(it.conn, {"events", "send_close"}, websocket, type(it.conn))


def test_server(running: Running) -> None:
    check(running.server.uvicorn, used(run, "_Uvicorn"), run, uvicorn.Server)
    check(uvicorn.Server, {"startup", "capture_signals", "serve"}, run, uvicorn.Server)


def test_a_missing_name_is_reported_with_its_module() -> None:
    with pytest.raises(
        AssertionError,
        match=r"connection.py uses no_such_name of .*HttpToolsProtocol, which uvicorn 0",
    ):
        check(object(), {"no_such_name"}, protocol, HttpToolsProtocol)

"""Who may call, over real sockets: foreign pages, names that are not the server's, bodies that are
not JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config.server import ServerConfig
from stretto.engine.protocol import EngineClient
from stretto.errors import Invalid
from stretto.server.app import make_app
from stretto.server.origins import Callers, is_loopback, warning
from tests.server.asks import ASK, CHAT
from tests.server.conftest import Reply, Running, read_until, serve
from tests.server.scripted_engine import ScriptedEngine

EVIL = "https://evil.example"
PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def running(engine: ScriptedEngine) -> Iterator[Running]:
    """As started without any flag: no key, on the loopback."""
    with serve(engine) as running:
        yield running


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with serve(ScriptedEngine(), api_key=("k",)) as running:
        yield running


@pytest.fixture(scope="module")
def stated() -> Iterator[Running]:
    with serve(ScriptedEngine(), allowed_origins=(PAGE,), api_key=("k",)) as running:
        yield running


KEY = {"Authorization": "Bearer k"}


# ---- origins


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
                                    "http://10.0.0.1:8000", "file://",
                                    "http://localhost:80:80"])  # fmt: skip
def test_a_foreign_page_is_refused_before_anything_is_read(
    origin: str, running: Running, engine: ScriptedEngine
) -> None:
    before = len(engine.calls)
    for reply in (
        running.ask(CHAT, ASK, headers={"Origin": origin}),
        running.ask("/v1/models", headers={"Origin": origin}),
        running.ask(CHAT, method="OPTIONS", headers={"Origin": origin, **PREFLIGHT}),
    ):
        assert reply.status == 403
        assert reply.error["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
    assert len(engine.calls) == before


def test_a_refusal_does_not_wait_for_the_body(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as s:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nOrigin: {EVIL}\r\nContent-Length: "
            f"100\r\n\r\n"
        )
        s.sendall(head.encode())
        assert read_until(s, b"origin_not_allowed").startswith(b"HTTP/1.1 403 ")


def test_a_simple_post_of_a_foreign_page(running: Running, engine: ScriptedEngine) -> None:
    """What a browser sends for any page without asking first: POST, text/plain. It must not reach
    the engine."""
    before = len(engine.calls)
    body = json.dumps(ASK).encode()
    for headers in ({"Origin": EVIL, "Content-Type": "text/plain"}, {"Content-Type": "text/plain"}):
        assert running.ask(CHAT, body, headers=headers).status in (403, 415)
    assert len(engine.calls) == before


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:1",
    "http://127.8.9.1", "https://localhost",
                                    "http://[::1]:5173", "HTTP://LOCALHOST"])  # fmt: skip
def test_pages_of_this_machine(origin: str, running: Running) -> None:
    reply = running.ask(CHAT, ASK, headers={"Origin": origin})
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert "origin" in reply.headers["vary"]
    assert "access-control-allow-credentials" not in reply.headers
    asked = running.ask(CHAT, method="OPTIONS", headers={"Origin": origin, **PREFLIGHT})
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == origin
    allowed = asked.headers["access-control-allow-methods"]
    assert "POST" in allowed
    assert "DELETE" in allowed, "voices are deleted"
    assert (
        asked.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    )


def test_other_routes_are_not_readable_for_foreign_pages(running: Running) -> None:
    """Probes and the page's files answer, but a browser keeps the answer from a foreign page."""
    for path in ("/health", "/metrics", "/", "/version"):
        reply = running.ask(path, headers={"Origin": EVIL})
        assert reply.status == 200
        assert "access-control-allow-origin" not in reply.headers
        assert reply.headers["vary"] == "origin"
    assert (
        running.ask("/health", method="OPTIONS", headers={"Origin": EVIL, **PREFLIGHT}).status
        == 403
    )


def test_the_servers_own_page(running: Running) -> None:
    """As the page's script asks: same origin, its own address as Host."""
    for name in ("127.0.0.1", "localhost"):
        own = f"http://{name}:{running.port}"
        headers = {"Origin": own, "Host": f"{name}:{running.port}", "Sec-Fetch-Site": "same-origin"}
        assert running.ask("/", headers=headers).status == 200
        assert running.ask("/v1/models", headers=headers).status == 200
        assert running.ask(CHAT, {**ASK, "stream": True}, headers=headers).status == 200


def test_the_servers_own_page_behind_a_proxy() -> None:
    with serve(ScriptedEngine(), allowed_hosts=("omni.example",)) as running:
        for origin in ("https://omni.example", "http://omni.example"):  # TLS may end at the proxy
            headers = {"Origin": origin, "Host": "omni.example"}
            assert running.ask(CHAT, ASK, headers=headers).status == 200
        for origin in (
            "https://omni.example:444",
            "https://other.example",
            "https://omni.example.evil",
        ):
            headers = {"Origin": origin, "Host": "omni.example"}
            assert running.ask(CHAT, ASK, headers=headers).status == 403


def test_a_page_without_tls_is_not_that_of_a_server_with() -> None:
    callers = Callers.of(ServerConfig(host="0.0.0.0"))
    assert callers.allows("https://omni.example", "omni.example", "https")
    assert not callers.allows("http://omni.example", "omni.example", "https")


def test_with_a_key_any_page_may_call(keyed: Running) -> None:
    for origin in (EVIL, "null"):
        reply = keyed.ask(CHAT, ASK, headers={"Origin": origin, **KEY})
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == "*"
        assert {"x-request-id", "retry-after"} <= set(
            reply.headers["access-control-expose-headers"].split(", ")
        )
        refused = keyed.ask(CHAT, ASK, headers={"Origin": origin})  # a page can read why
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "*"
        assert (
            keyed.ask(CHAT, method="OPTIONS", headers={"Origin": origin, **PREFLIGHT}).status == 200
        )


def test_stated_origins_win(stated: Running) -> None:
    good = stated.ask(CHAT, ASK, headers={"Origin": PAGE, **KEY})
    assert (good.status, good.headers["access-control-allow-origin"]) == (200, PAGE)
    assert stated.ask(CHAT, method="OPTIONS", headers={"Origin": PAGE, **PREFLIGHT}).status == 200
    for origin in (EVIL, "http://localhost:3000", "null", "http://page.example", PAGE + ":444"):
        assert stated.ask(CHAT, ASK, headers={"Origin": origin, **KEY}).status == 403
    own = f"http://127.0.0.1:{stated.port}"
    assert stated.ask(CHAT, ASK, headers={"Origin": own, **KEY}).status == 200


def test_any_origin_on_request() -> None:
    with serve(ScriptedEngine(), allowed_origins=("*",)) as running:
        reply = running.ask(CHAT, ASK, headers={"Origin": EVIL})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")


# ---- hosts


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0"]
)
def test_rebinding(host: str, running: Running) -> None:
    """A page whose name now points to 127.0.0.1 is of its own origin for the browser; only its name
    gives it away."""
    for path in ("/health", "/metrics", "/", "/v1/models"):
        reply = running.ask(path, headers={"Host": host, "Origin": f"http://{host}"})
        assert reply.status == 421
        assert reply.error["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
    assert running.ask(CHAT, ASK, headers={"Host": host}).status == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000"]
)
def test_names_of_the_loopback(host: str, running: Running) -> None:
    assert running.ask("/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    ("settings", "answers"),
    [
        ({"api_key": ("k",)}, True),
        ({"allowed_hosts": ("*",)}, True),
        ({"allowed_hosts": ("Omni.example",)}, True),
        ({"allowed_hosts": ("other.example",)}, False),
        ({"allowed_hosts": ("other.example",), "api_key": ("k",)}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "allowed_hosts": ("other.example",)}, False),
    ],
)
def test_other_names(settings: dict[str, Any], answers: bool) -> None:
    with serve(ScriptedEngine(), **settings) as running:
        assert running.ask("/health", headers={"Host": "omni.example:80"}).status == (
            200 if answers else 421
        )
        assert running.ask("/health").status == 200


def by_hand(running: Running, lines: bytes) -> Reply:
    with socket.create_connection(("127.0.0.1", running.port)) as s:
        s.sendall(b"GET /health HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n")
        got = b""
        while part := s.recv(65536):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    return Reply(int(head.split()[1]), {}, body)


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"Host: localhost\r\nHost: localhost\r\n",
        b"Host: localhost\r\nhost: evil.example\r\n",
        b"Host:\r\n",
        b"Host: localhost@evil.example\r\n",
        b"Host: localhost/x\r\n",
        b"Host: local host\r\n",
        b"Host: localhost:port\r\n",
        b"Host: \xff\r\n",
    ],
)
def test_there_is_one_host_and_it_is_a_name(lines: bytes, keyed: Running) -> None:
    reply = by_hand(keyed, lines)  # with a key any name will do, so only the form counts here
    assert reply.status == 400
    assert reply.error["code"] == "bad_host"


def test_any_name_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with serve(ScriptedEngine(), uds=path), socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: whatever\r\n\r\n")
        assert read_until(s, b"ready").startswith(b"HTTP/1.1 200 ")


def test_loopback_names() -> None:
    names = ("localhost", "127.0.0.1", "127.255.255.254", "::1", "[::1]")
    assert all(map(is_loopback, names))
    others = (
        "",
        "0.0.0.0",
        "::",
        "localhost.",
        "localhost.evil",
        "128.0.0.1",
        "127.1",
        "2130706433",
        "example.com",
    )
    assert not any(map(is_loopback, others))


# ---- bodies


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded",
    "multipart/form-data", "text/json",
                                  "application/jsonx", "application/json, text/plain"])  # fmt: skip
def test_a_body_must_be_called_json(kind: str, running: Running, engine: ScriptedEngine) -> None:
    before = len(engine.calls)
    reply = running.ask(CHAT, ASK, headers={"Content-Type": kind})
    assert reply.status == 415
    assert kind in reply.error["message"]
    assert len(engine.calls) == before


def test_a_body_without_a_type(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as s:
        s.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        )
        assert read_until(s, b"unsupported_media_type").startswith(b"HTTP/1.1 415 ")


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x=y"]
)
def test_json_by_its_names(kind: str, running: Running) -> None:
    assert running.ask(CHAT, ASK, headers={"Content-Type": kind}).status == 200


def test_a_key_comes_before_the_type(keyed: Running) -> None:
    assert keyed.ask(CHAT, ASK, headers={"Content-Type": "text/plain"}).status == 401
    assert keyed.ask(CHAT, ASK, headers={"Content-Type": "text/plain", **KEY}).status == 415


def test_a_stock_client(running: Running) -> None:
    answer = running.client().chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Hi"}]
    )
    assert answer.choices[0].message.content == "Hello there."


# ---- what is not HTTP


@pytest.mark.parametrize("path", ["/", "/v1/realtime/calls", CHAT])
def test_a_websocket_is_denied_in_http(path: str, running: Running) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    with socket.create_connection(("127.0.0.1", running.port)) as s:
        s.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "
            f"websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        got = b""
        while part := s.recv(65536):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert Reply(404, {}, body).error["code"] == "not_found"
    assert running.ask("/health").status == 200


def test_other_scopes_do_not_get_past_the_door() -> None:
    async def open_engine() -> EngineClient:
        return ScriptedEngine()

    async def nothing(*_: Any) -> Any:
        raise AssertionError("nothing is read or sent")

    app = make_app(ServerConfig(), open_engine)
    with pytest.raises(ValueError, match="carrier"):
        asyncio.run(app({"type": "carrier pigeon", "path": "/", "headers": []}, nothing, nothing))


# ---- settings


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_origins": ("page.example",)},
        {"allowed_origins": ("https://page.example/",)},
        {"allowed_hosts": ("omni.example:80",)},
        {"allowed_hosts": ("https://omni.example",)},
        {"max_connections": 0},
        {"max_header_kb": 0},
        {"header_timeout": 0.0},
    ],
)
def test_settings_that_could_never_match(settings: dict[str, Any]) -> None:
    [name] = settings
    with pytest.raises(Invalid, match=name):
        ServerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.168.1.2"}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"host": "0.0.0.0", "uds": "/tmp/x"}, False),
    ],
)
def test_who_is_warned(settings: dict[str, Any], warned: bool) -> None:
    words = warning(ServerConfig(**settings))
    assert (words is not None) == warned
    if words is not None:
        assert "--api-key" in words
        assert settings["host"] in words


def test_the_command_warns_in_one_line() -> None:
    command = [sys.executable, "-m", "stretto", "serve", "/nonexistent-checkpoint"]
    for more, lines in ((["--host", "0.0.0.0"], 1), ([], 0)):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert sum("without an API key" in line for line in ended.stderr.splitlines()) == lines

"""The server as a process of its own: signals, exit status, what it prints, TLS. And clients that
leave the model."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from stretto.commands.serve import greeting
from stretto.config.server import ServerConfig
from tests.engine.common import freed
from tests.server.certificates import certificate_settings, needs_openssl
from tests.server.conftest import HEAD, PATIENCE_S, Running, read_until, serve
from tests.server.scripted_engine import ScriptedEngine

PROGRAM = """
import asyncio, sys
from stretto.commands.serve import announce
from stretto.config.server import ServerConfig
from stretto.server.run import set_up_logs
from stretto.server.run import run
from tests.server.scripted_engine import ScriptedEngine

async def gate(i):
    if i >= 1:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

async def open_engine():
    return ScriptedEngine(pieces=("One", " two."), gate=gate)

config = ServerConfig(port=0, log_format=sys.argv[1], api_key=("k",), drain_timeout=3600)
set_up_logs(config.log_format, config.log_level)
sys.exit(asyncio.run(run(config, open_engine, announce)))
"""


def started(log_format: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, log_format]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """What it says, up to the line that has these words."""
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while words not in lines[-1]:
        assert lines[-1], lines
        lines.append(process.stderr.readline())
    return lines


def test_the_greeting_has_lines_to_paste() -> None:
    with started("text") as process:
        greeting = "".join(lines_until(process, "print(m"))  # its last line
        process.terminate()
        assert process.wait() == 0
    assert '"Authorization: Bearer $KEY"' in greeting  # a line to paste, without the key itself
    assert "curl" in greeting


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"voices": ("ryan",), "default_voice": "ryan"}, '"voice": "ryan"'),
        ({"instructions": True}, '"instructions": '),
        ({"cloning": True}, '"voice": "NAME"'),
    ],
)
def test_a_model_that_reads_aloud_is_greeted_with_a_text_to_read(
    told: dict[str, Any], says: str
) -> None:
    info = replace(
        ScriptedEngine().info,
        **{"voices": (), "default_voice": "", **told},
        output_modalities=("audio",),
    )
    service = SimpleNamespace(
        engine=lambda: SimpleNamespace(info=info), model_names=lambda engine: ["reader"]
    )
    said = greeting(ServerConfig(api_key=("k",)), service)  # type: ignore[arg-type]
    assert "/v1/audio/speech" in said
    assert "/v1/chat" not in said
    assert said.endswith("-o answer.wav\n")
    assert says in said
    assert "()" not in said


def test_the_greeting_names_the_format_of_quantised_weights() -> None:
    def said(weights: str) -> str:
        engine = ScriptedEngine(weights=weights)
        service = SimpleNamespace(engine=lambda: engine, model_names=lambda engine: ["m"])
        return greeting(ServerConfig(), service)  # type: ignore[arg-type]

    assert "\n  weights  int4, groups of 32\n" in said("int4, groups of 32")
    assert "weights" not in said("")


def test_sigterm_drains_and_exits_with_0() -> None:
    with started("json") as process:
        assert process.stderr is not None
        assert process.stdin is not None
        ready = json.loads(lines_until(process, "ready: ")[-1])["message"]
        port = int(ready.split()[1].rstrip("/").rpartition(":")[2])

        body = json.dumps(
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        ).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as s:
            head = f"POST /v1/chat/completions {HEAD}Authorization: Bearer k\r\nX-Request-Id: mine\r\nContent-Length: {len(body)}\r\n\r\n"  # noqa: E501
            s.sendall(head.encode() + body)
            got = read_until(s, b"One")
            process.send_signal(signal.SIGTERM)
            while (state := health(port)) == "ready":
                pass
            assert state == "draining"
            process.stdin.write("go\n")
            process.stdin.flush()
            while part := s.recv(65536):
                got += part
        assert b" two." in got
        assert b"data: [DONE]" in got
        assert process.wait() == 0
        rest = [
            json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")
        ]
    [line] = [r for r in rest if r.get("path") == "/v1/chat/completions"]
    assert (line["client_id"], line["status"], line["ended"], line["key"], line["tokens"]) == (
        "mine", 200, "stop", "key1", 2,
    )  # fmt: skip


def health(port: int) -> str:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S
        ) as answer:
            return str(json.load(answer)["status"])
    except urllib.error.HTTPError as e:
        return str(json.load(e)["status"])


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    """As many lines as would fill the pipe, and the queue before it, ten times over."""
    with started("json") as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        ready = json.loads(lines_until(process, "ready: ")[-1])["message"]
        connection = http.client.HTTPConnection(
            "127.0.0.1", int(ready.split()[1].rstrip("/").rpartition(":")[2])
        )
        path = "/v1/models/" + "x" * 200
        with contextlib.closing(connection):
            for _ in range(5000):
                connection.request(
                    "GET", path, headers={"Authorization": "Bearer k", "X-Request-Id": "y" * 128}
                )
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 404
            connection.request("GET", "/metrics")
            metrics = connection.getresponse().read().decode()
        [dropped] = re.findall(r"^stretto_log_lines_dropped_total (\S+)$", metrics, re.M)
        assert float(dropped) > 0
        process.terminate()
        said = process.stderr.read()
        assert process.wait() == 0
    messages = [json.loads(line).get("message", "") for line in said.splitlines()]
    assert sum(int(m.split()[0]) for m in messages if "lines were dropped" in m) >= float(dropped)


def test_a_log_whose_reader_is_gone_stops_nobody() -> None:
    with started("json") as process:
        assert process.stderr is not None
        ready = json.loads(lines_until(process, "ready: ")[-1])["message"]
        process.stderr.close()
        port = int(ready.split()[1].rstrip("/").rpartition(":")[2])
        for _ in range(5):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/version", timeout=PATIENCE_S
            ) as answer:
                assert answer.status == 200
        process.terminate()
        assert process.wait() == 0


FORGED = (
    "2026-01-01 00:00:00 INFO    stretto.access: id=req-0 method=GET path=/ status=200 key=admin"
)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_path_forges_nothing_in_the_log(log_format: str) -> None:
    """Neither a line nor a field of one: line breaks as HTTP and Unicode have them, spaces, a
    quotation mark."""
    breaks = ("\n", "\r\n", "\x0b", "\x1c", "\x85", "\u2028", "\u2029", " ", '","status":200,"x":"')
    with started(log_format) as process:
        assert process.stderr is not None
        begun = lines_until(process, "ready: " if log_format == "json" else "page ")
        port = int(re.findall(r"127\.0\.0\.1:(\d+)", begun[-1])[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            for sign in breaks:
                connection.request("GET", "/v1/models/a" + quote(f"{sign}{FORGED}", safe=""))
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 401
        process.terminate()
        said = process.stderr.read()
        assert process.wait() == 0
    lines = [line for line in said.splitlines() if "req-0" in line]
    assert len(lines) == len(breaks)
    for line in lines:
        if log_format == "json":
            assert json.loads(line)["status"] == 401
        else:
            assert re.findall(r" status=(\S+)", line) == ["401"]
            assert " key=" not in line


def test_a_second_signal_ends_the_server_at_once() -> None:
    """A request that would never end, and a drain timeout of an hour."""
    with started("json") as process:
        ready = json.loads(lines_until(process, "ready: ")[-1])["message"]
        port = int(ready.split()[1].rstrip("/").rpartition(":")[2])
        body = json.dumps(
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        ).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as s:
            head = (
                f"POST /v1/chat/completions {HEAD}Authorization: Bearer k\r\nContent-Length: "
                f"{len(body)}\r\n\r\n"
            )
            s.sendall(head.encode() + body)
            got = read_until(s, b"One")
            process.send_signal(signal.SIGTERM)
            lines_until(process, "draining: 1 running")
            process.send_signal(signal.SIGTERM)
            look_until_gone(port, 100)  # the signal has been handled by now
            assert process.stdin is not None
            process.stdin.close()  # the answer may go on, and the thread that holds it back may end
            while part := s.recv(65536):
                got += part
        assert b"[DONE]" not in got
        lines_until(process, "ending with 1 requests unfinished")
        assert process.wait() == 0


def look_until_gone(port: int, most: int) -> None:
    """Ask for /live, again and again, until nobody listens any more."""
    with contextlib.suppress(OSError):
        for _ in range(most):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as s:
                s.sendall(f"GET /live {HEAD}Connection: close\r\n\r\n".encode())
                while s.recv(65536):
                    pass


def test_a_client_that_leaves_frees_the_model(real_server: Running) -> None:
    """The real model, mid-answer: all that the request held is free, and the next one is
    answered."""
    engine = real_server.server.service.engine()
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hello"}], "modalities": ["text", "audio"],
        "stream": True,
         "temperature": 1.0, "seed": 1, "max_tokens": 4000, "max_audio_frames": 4000}
    ).encode()  # fmt: skip
    for wanted in (b'"role"', b'"data"'):
        with socket.create_connection(("127.0.0.1", real_server.port), timeout=PATIENCE_S) as s:
            s.sendall(
                f"POST /v1/chat/completions {HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            read_until(s, wanted)
        real_server.do(real_server.server.service.admission.idle.wait())
        real_server.do(freed(engine))
    reply = real_server.ask(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    )
    assert reply.status == 200

    async def tasks() -> set[str]:
        names = {
            t.get_coro().__qualname__
            for t in asyncio.all_tasks()
            if t is not asyncio.current_task()
        }
        return {n for n in names if "Exchange" in n or "GeneratingRoute" in n or "answer" in n}

    async def ended() -> None:  # a client has its answer before the last of them
        while await tasks():
            await asyncio.sleep(0.01)

    real_server.do(ended())


@needs_openssl
def test_tls_and_unix_sockets(tmp_path: Path) -> None:
    tls = certificate_settings(tmp_path)
    with serve(ScriptedEngine(), **tls) as running:
        assert running.url.startswith("https://")
        trust = ssl.create_default_context(cafile=tls["ssl_certfile"])
        with urllib.request.urlopen(
            f"{running.url}/health", context=trust, timeout=PATIENCE_S
        ) as answer:
            assert answer.status == 200
    path = str(tmp_path / "socket")
    with serve(ScriptedEngine(), uds=path) as running, socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(s, b"ready").startswith(b"HTTP/1.1 200 ")
        assert running.url == f"unix:{path}"
    assert not Path(path).exists()

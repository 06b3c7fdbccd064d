"""The two commands from end to end, against a scripted server on the loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.commands.bench import read_extra
from stretto.errors import Invalid
from stretto.loadtest.http import api_root
from stretto.loadtest.sse import RequestFailed
from tests.loadtest.command import parse, run
from tests.server.scripted_server import ANSWER, Script, ScriptedServer


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.reset()
    return running


def test_bench_measures_and_writes(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "run.json"
    argv = [
        "bench",
        server.url,
        "-c",
        "1",
        "3",
        "-r",
        "50",
        "-n",
        "6",
        "--warmup",
        "1",
        "--prompt-tokens",
        "12",
    ]
    assert run(*argv, "--json", str(out), "--quiet", "--key", "sk-secret") == 0
    printed = capsys.readouterr().out
    for words in (
        "concurrency 1: 6 answers",
        "concurrency 3: 6 answers",
        "50 requests/s: 6 answers",
        "first audio",
    ):
        assert words in printed
    record = json.loads(out.read_text())
    assert "sk-secret" not in out.read_text()
    assert record["server"]["model"] == "tiny"
    assert [len(level["samples"]) for level in record["levels"]] == [6, 6, 6]
    sample = record["levels"][0]["samples"][0]
    speech = (sum(server.script.packets) * 1920 - 555) / 24000
    assert sum(seconds for _, seconds in sample["packets"]) == pytest.approx(speech)
    assert 0 < sample["words"][0] <= sample["packets"][0][0] <= sample["end"]
    # Three warm-ups and three levels, no two questions the same.
    assert len({body["messages"][0]["content"] for body in server.requests}) == 3 * 7


def test_bench_counts_refusals(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = Script(refuse=(429, {}, "full"), refusals=2)
    assert run("bench", server.url, "-n", "5", "--warmup", "0", "--quiet") == 0
    assert "2 failed: 2 http 429" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trouble", "kind"), [({"break_after": 9}, "error in stream"), ({"cut_after": 9}, "broken")]
)
def test_bench_where_nothing_works(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], trouble: dict[str, int], kind: str
) -> None:
    server.script = Script(**trouble)  # type: ignore[arg-type]
    assert run("bench", server.url, "-n", "2", "--quiet") == 1
    assert f"2 failed: 2 {kind}" in capsys.readouterr().out


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for job in ("bench", "talk"):
            with pytest.raises(RequestFailed, match="cannot be reached"):
                run(job, url)


def test_wrong_key(server: ScriptedServer) -> None:
    server.lock("sk-secret")
    with pytest.raises(RequestFailed, match="an API key is needed"):
        run("talk", server.url, "--text", "Hi")
    assert run("talk", server.url, "--text", "Hi", "--key", "sk-secret", "--text-only") == 0


def test_interrupted_bench_prints_what_it_has(server: ScriptedServer, tmp_path: Path) -> None:
    """Ctrl-C on a real process, in the middle. (It has to ask for it: a shell's background jobs,
    and so whatever these start, ignore that signal.)"""
    out = tmp_path / "run.json"
    server.script = Script(packets=(1,), text="Hi.")
    program = (
        "import signal, sys; from tests.loadtest.command import run; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.exit(run('bench', {server.url!r}, '-d', '600', '--warmup', '0', '--json', "
        f"{str(out)!r}, '--quiet'))"
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, env=env
    )
    try:
        server.wait_for_requests(20)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"(interrupted)" in printed
    (level,) = json.loads(out.read_text())["levels"]
    assert level["interrupted"]
    assert len(level["samples"]) >= 19


def test_talk_once(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "talk",
            server.url,
            "--text",
            "Hi",
            "--save",
            str(tmp_path),
            "--voice",
            "aiden",
            "--max-tokens",
            "9",
        )
        == 0
    )
    assert ANSWER in capsys.readouterr().out
    (request,) = server.requests
    assert (request["voice"], request["params"].max_text_tokens) == ("aiden", 9)
    with wave.open(str(tmp_path / "answer-1.wav")) as file:
        assert file.getnframes() == sum(server.script.packets) * 1920 - 555


@pytest.mark.parametrize(
    ("written", "root"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://a.b/", "http://a.b/v1"),
        ("https://a.b/v1", "https://a.b/v1"),
        ("https://a.b/v1/", "https://a.b/v1"),
        ("http://a.b/proxy/stretto", "http://a.b/proxy/stretto/v1"),
    ],
)
def test_addresses(written: str, root: str) -> None:
    assert api_root(written) == root


@pytest.mark.parametrize("written", ["ftp://a.b", "http://", "http://a:port"])
def test_bad_addresses(written: str) -> None:
    with pytest.raises(Invalid):
        api_root(written)


def test_fixed_lengths_are_for_servers_that_know_them() -> None:
    with pytest.raises(Invalid, match="--dialect stretto"):
        read_extra(parse("bench", "x", "--frames", "25"))
    args = parse(
        "bench", "x", "--frames", "25", "--exact-tokens", "--max-tokens", "64", "--stretto-extras"
    )
    assert read_extra(args) == {
        "min_audio_frames": 25,
        "max_audio_frames": 25,
        "ignore_eos": True,
        "min_tokens": 64,
    }
    assert read_extra(parse("bench", "x", "--extra", '{"top_k": 1}')) == {"top_k": 1}


@pytest.mark.parametrize(
    "argv",
    [
        ["-c", "0"],
        ["-r", "0"],
        ["-n", "0"],
        ["-d", "0"],
        ["--extra", "7"],
        ["--extra", "{"],
        ["--prebuffer", "-1"],
    ],
)
def test_senseless_arguments_are_refused_before_anything_is_sent(argv: list[str]) -> None:
    with pytest.raises(Invalid):
        run("bench", "http://127.0.0.1:9", *argv)


def test_no_torch_is_needed() -> None:
    program = (
        "import sys, stretto.talk.typed, stretto.loadtest.report; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

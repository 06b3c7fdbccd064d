"""`stretto serve` until it is ready: mistakes end it with one sentence and a status, signals end it
cleanly."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.commands.serve import describe, variable_warnings
from stretto.config.loader import load_settings
from stretto.hardware import cards
from tests.commands.processes import STRETTO, check_error, run_stretto


@pytest.mark.skipif(sys.platform != "linux", reason="looks at devices as Linux has them")
def test_serve_without_the_gpu_it_names_ends_with_one_sentence(tiny_dir: Path) -> None:
    done = run_stretto("serve", tiny_dir, "--device", "cuda:77", "--port", "0")
    check_error(done, "is placed on cuda:77, but there is no", 2)
    assert done.stderr.count("cuda:77") == 1


@pytest.mark.skipif(bool(cards()), reason="for machines without a GPU")
def test_serve_on_a_gpu_without_one(tiny_dir: Path) -> None:
    done = run_stretto("serve", tiny_dir, "--device", "cuda")
    check_error(done, "but there is no GPU; --device cpu runs without a GPU", 2)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-rows", "-3"), "max_rows must be at least 1"),
        (("--max-rows", "0"), "max_rows must be at least 1"),
        (("--max-model-len", "0"), "max_model_len must be at least 32"),
        (("--max-model-len", "1"), "max_model_len must be at least 32"),
        (("--stall-s", "nan"), "stall_s must be a finite number, got nan"),
        (("--queue-timeout", "inf"), "queue_timeout must be a finite number, got inf"),
        (("--max-model-len", "9999999"), "the model has only 8192 positions"),
        (("--host", "no.such.host.invalid", "--port", "0"),
        "cannot listen on no.such.host.invalid"),
        (("--port", "TAKEN"), "--port 0 any free one"),
        (("--ssl-certfile", "none.pem", "--ssl-keyfile", "none.key", "--port", "0"), "none.pem"),
        (("--max-row", "3", "--prot", "1"), "did you mean --port"),
    ],
)  # fmt: skip
def test_serve_refuses_at_once(words: tuple[str, ...], says: str, tiny_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_stretto(
            "serve", tiny_dir, *(port if w == "TAKEN" else w for w in words), "--device", "cpu"
        )
    check_error(done, says)
    assert "starting" not in done.stderr  # no process was started for this


def test_serve_with_too_few_files(tiny_dir: Path) -> None:
    words = shlex.join([*STRETTO, "serve", str(tiny_dir), "--device", "cpu", "--port", "0"])
    command = ["bash", "-c", f"ulimit -n 100; exec {words}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check_error(
        done, "this process may open 100 files, and a server needs 256: raise `ulimit -n`", 1
    )
    assert len(done.stderr.splitlines()) == 1


def test_serve_without_the_model_it_names(tmp_path: Path) -> None:
    done = run_stretto("serve", tmp_path / "Qwen3-Omni")
    check_error(done, "Qwen3-Omni: there is no such directory", 2)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
@pytest.mark.parametrize(
    "words", [("serve", "TINY", "--port", "0"), ("generate", "TINY", "--text", "hi")]
)
def test_ctrl_c_while_it_loads(words: tuple[str, ...], tiny_dir: Path) -> None:
    command = [*STRETTO, *(str(tiny_dir) if w == "TINY" else w for w in words), "--device", "cpu"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not has_begun(begun := [int(pid) for pid in children.read_text().split()]):
            assert process.poll() is None
            time.sleep(0.01)
        groups = [os.getpgid(pid) for pid in begun]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.stderr is not None
        stderr = process.stderr.read()
        assert process.wait() in (0, 130)
    assert "Traceback" not in stderr
    assert "died" not in stderr
    assert process.pid not in groups  # or the children would have been interrupted in their imports


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
def test_sigterm_while_it_loads(tiny_dir: Path) -> None:
    """As a supervisor sends it: to the server alone."""
    command = [
        *STRETTO,
        "serve",
        str(tiny_dir),
        "--port",
        "0",
        "--device",
        "cpu",
        "--placement",
        "two",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not has_begun(begun := [int(pid) for pid in children.read_text().split()]):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.stderr is not None
        stderr = process.stderr.read()  # until the last of its processes has ended
        assert process.wait() == 0
    assert "Traceback" not in stderr
    assert "died" not in stderr
    assert "cannot be served" not in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in begun)


EARLY = """
import os, sys
when, number = sys.argv[1], int(sys.argv[2])
sys.argv = ["stretto", *sys.argv[3:]]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == when:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Finder())
from stretto.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "when", ["stretto.cli", "stretto.observe.logs", "stretto.registry", "stretto.server.run"]
)
def test_a_signal_before_the_server_listens_to_any(when: str, number: int, tiny_dir: Path) -> None:
    assert importlib.util.find_spec(when) is not None  # else the signal would never be sent
    words = ["serve", str(tiny_dir), "--device", "cpu", "--port", "0"]
    command = [sys.executable, "-c", EARLY, when, str(int(number)), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def has_begun(children: list[int]) -> bool:
    """Whether there is a host, and all children are programs of their own by now, not only
    forked."""
    try:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    except OSError:
        return False  # one has ended
    hosts = [b"stretto.stage.host.process" in c for c in commands]
    return any(hosts) and all(
        h or b"stretto.preprocess.pool.worker" in c for h, c in zip(hosts, commands, strict=True)
    )


def test_serve_on_a_missing_gpu_ends_with_one_json_sentence(
    tiny_dir: Path,
) -> None:
    """Server and host, log lines and banners alike."""
    command = [
        sys.executable,
        "-m",
        "stretto",
        "serve",
        str(tiny_dir),
        "--port",
        "0",
        "--log-format",
        "json",
    ]
    env = {**os.environ, "STRETTO_LOG": "INFO"}
    done = subprocess.run(
        [*command, "--device", "cuda:77"], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert sum("is placed on cuda:77" in line["message"] for line in lines) == 1
    assert not any("stack" in line for line in lines)


def test_the_settings_of_the_documented_service(tmp_path: Path) -> None:
    """What docs/serve.md tells operators to put into a file."""
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "stretto.yaml").write_text(block)
    settings = load_settings({"config": tmp_path / "stretto.yaml"}, {})
    server = settings.server
    assert not settings.warnings
    assert settings.model == "Qwen/Qwen3-Omni-30B-A3B-Instruct"
    assert (server.api_key_file, server.log_format, server.drain_timeout) == (
        "/etc/stretto.keys",
        "json",
        30,
    )


def test_serve_by_name_without_a_network(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "stretto", "serve", "Qwen/Qwen3-Omni-30B-A3B-Instruct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert "run: hf download Qwen/Qwen3-Omni-30B-A3B-Instruct --local-dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_variables_without_an_effect_are_warned_about() -> None:
    environ = {"STRETTO_LOOK_US": "100", "STRETTO_PROT": "1", "STRETTO_PORT": "1", "HOME": "/"}
    assert variable_warnings(environ) == [
        "STRETTO_LOOK_US was removed: receivers of the shm connector sleep at once",
        "STRETTO_PROT is set, but there is no such setting; did you mean STRETTO_PORT?",
    ]


def test_env_says_what_is_installed() -> None:
    facts = describe()
    assert facts["uvicorn"][0].isdigit()
    assert {"stretto", "python", "torch", "cpus"} <= set(facts)

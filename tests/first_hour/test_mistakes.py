"""What people type by mistake, as they type it: one sentence, a status, no traceback, nothing
started in vain."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stretto.cli import main
from stretto.config.engine import EngineConfig, check_model
from stretto.errors import Invalid
from stretto.hardware import cards
from stretto.stage.host.device_check import check_device

STRETTO = [sys.executable, "-m", "stretto"]
SMALL = ["--max-text-tokens", "4", "--max-frames", "4", "--device", "cpu"]


def typed(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STRETTO, *map(str, words)], capture_output=True, text=True, check=False)


def check_told(done: subprocess.CompletedProcess[str], says: str, code: int | None = None) -> None:
    assert done.returncode != 0
    assert code is None or done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks at devices as Linux has them")
def test_serve_without_the_gpu_it_names_ends_with_one_sentence(tiny_dir: Path) -> None:
    done = typed("serve", tiny_dir, "--device", "cuda:77", "--port", "0")
    check_told(done, "is placed on cuda:77, but there is no", 2)
    assert done.stderr.count("cuda:77") == 1


@pytest.mark.skipif(bool(cards()), reason="for machines without a GPU")
def test_serve_on_a_gpu_without_one(tiny_dir: Path) -> None:
    done = typed("serve", tiny_dir, "--device", "cuda")
    check_told(done, "but there is no GPU; --device cpu runs without a GPU", 2)
    assert len(done.stderr.splitlines()) == 1


def test_a_build_of_torch_without_cuda_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        Invalid,
        match=r"was built without CUDA; install a build with CUDA \(pip install .*--device cpu",
    ):
        check_device("cuda")


@pytest.mark.parametrize(
    ("name", "says"), [("gpu", "there is no device 'gpu'"), ("meta", "only cpu and cuda")]
)
def test_a_device_that_is_none(name: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        check_device(name)


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
        done = typed(
            "serve", tiny_dir, *(port if w == "TAKEN" else w for w in words), "--device", "cpu"
        )
    check_told(done, says)
    assert "starting" not in done.stderr  # no process was started for this


def test_serve_with_too_few_files(tiny_dir: Path) -> None:
    words = shlex.join([*STRETTO, "serve", str(tiny_dir), "--device", "cpu", "--port", "0"])
    command = ["bash", "-c", f"ulimit -n 100; exec {words}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    check_told(
        done, "this process may open 100 files, and a server needs 256: raise `ulimit -n`", 1
    )
    assert len(done.stderr.splitlines()) == 1


def test_serve_without_the_model_it_names(tmp_path: Path) -> None:
    done = typed("serve", tmp_path / "Qwen3-Omni")
    check_told(done, "Qwen3-Omni: there is no such directory", 2)
    assert len(done.stderr.splitlines()) == 1


def test_a_stated_context_is_not_shortened() -> None:
    check_model(EngineConfig(), ("a",), 4096)  # the default follows the model
    with pytest.raises(
        Invalid, match="max_model_len is 8192, but the model has only 4096 positions"
    ):
        check_model(EngineConfig(), ("a",), 4096, {"max_model_len"})


def test_unknown_flags_show_their_own_commands_usage(tiny_dir: Path) -> None:
    done = typed("generate", tiny_dir, "--text", "hi", "--tempreature", "1")
    check_told(done, "usage: stretto generate", 2)
    assert "did you mean --temperature?" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--text", "hi", "--out", "x.mp3"), "x.mp3: can be .wav or .flac"),
        (("--messages", "nowhere.json"), "nowhere.json"),
        (("--batch", "nowhere.jsonl", "--out-dir", "d"), "nowhere.jsonl"),
        (("--text", "hi", "--text-only", "--out", "b.wav"), "--text-only makes no speech"),
    ],
)
def test_generate_refuses_before_it_loads(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # There is no such model: had it been looked for first, the words would be others.
    assert main(["generate", str(tmp_path / "no-model"), *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "x.mp3"), "x.mp3: can be .wav or .flac"),
        (("--out", "x.wav", "--clip", "nowhere.wav"), "--clip nowhere.wav: there is no such file"),
        (("--out", "x.wav", "--max-audio-frames", "0"), "max_frames is out of range"),
        (("--out", "x.wav"), "no-model: there is no such directory"),
    ],
)
def test_speak_refuses_before_it_loads(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["speak", str(tmp_path / "no-model"), "--text", "hi", *words]) == 2
    assert says in capsys.readouterr().err


def test_generate_into_head(tiny_dir: Path) -> None:
    words = ["generate", str(tiny_dir), "--text", "hi", "--text-only", *SMALL]
    with subprocess.Popen(
        [*STRETTO, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 128 + signal.SIGPIPE
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


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
        said = process.stderr.read()
        assert process.wait() in (0, 130)
    assert "Traceback" not in said
    assert "died" not in said
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
        said = process.stderr.read()  # until the last of its processes has ended
        assert process.wait(60) == 0
    assert "Traceback" not in said
    assert "died" not in said
    assert "cannot be served" not in said
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
    "when", ["stretto.cli", "stretto.server.logs", "stretto.registry", "stretto.server.run"]
)
def test_a_signal_before_the_server_listens_to_any(when: str, number: int, tiny_dir: Path) -> None:
    words = ["serve", str(tiny_dir), "--device", "cpu", "--port", "0"]
    command = [sys.executable, "-c", EARLY, when, str(int(number)), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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


def test_tiny_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["tiny", str(tmp_path)]) == 2
    assert (tmp_path / "config.json").read_text() == "mine"
    assert main(["tiny", str(tmp_path / "config.json")]) == 2
    assert main(["tiny", str(tmp_path / "config.json" / "below")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["tiny", str(tmp_path / "empty")]) == 0

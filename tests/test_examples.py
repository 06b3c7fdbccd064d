"""The example programs, run as they stand: against a server, and with what goes wrong at a first
try, where each ends with one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import socket
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Running, serve
from tests.server.realtime.conftest import talking
from tests.server.scripted_engine import ScriptedEngine

EXAMPLES = Path(__file__).parents[1] / "examples"
REALTIME = EXAMPLES / "realtime"
Run = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an example with these words."""

    def it(name: str, *words: str) -> None:
        path = EXAMPLES / name
        monkeypatch.setattr(sys, "argv", [name, *words])
        monkeypatch.syspath_prepend(path.parent)
        runpy.run_path(str(path), run_name="__main__")

    return it


@pytest.fixture
def refused(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The sentence with which an example ends."""

    def it(name: str, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(name, *words)
        sentence = ended.value.code
        assert isinstance(sentence, str), "its status is 1"
        assert "\n" not in sentence
        return sentence

    return it


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    """A server that wants a key."""
    with serve(ScriptedEngine(), api_key=("secret",)) as running:
        yield running


def write_wav(path: Path, rate: int = 24_000, channels: int = 1, seconds: float = 0.2) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * channels * int(seconds * rate)))


def test_text(real_server: Running, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("client_text.py", real_server.url)
    assert capsys.readouterr().out.strip()


def test_speech_into_a_file_and_a_spoken_question_from_it(
    real_server: Running, folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("client_speech.py", real_server.url)
    assert "s of speech in answer.wav" in capsys.readouterr().out
    with wave.open("answer.wav") as file:
        assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
        assert file.getnframes() > 1000
    run("client_spoken_question.py", "answer.wav", real_server.url)
    assert "tokens of sound)" in capsys.readouterr().out


# ---- mistakes


@pytest.mark.parametrize(
    "name", ["client_text.py", "client_speech.py", "client_spoken_question.py"]
)
def test_without_the_client(
    name: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert refused(name).endswith(": pip install openai")


@pytest.mark.parametrize(
    "name", ["hello.py", "stream.py", "session.py", "read_aloud.py", "hear_and_see.py"]
)
def test_without_the_checkpoint(name: str, folder: Path, refused: Callable[..., str]) -> None:
    assert refused(name, "no-model") == "no-model: there is no such directory"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("client_text.py", []),
        ("client_speech.py", []),
        ("client_spoken_question.py", ["question.wav"]),
        ("client_live_speech.py", []),
    ],
)
def test_without_the_server_and_without_its_key(
    name: str,
    words: list[str],
    nobody: str,
    locked: Running,
    folder: Path,
    refused: Callable[..., str],
) -> None:
    write_wav(folder / "question.wav")
    asks = "(is `stretto serve` running there, and is the key right?)"
    for url in (f"http://{nobody}", locked.url):
        sentence = refused(name, *words, url)
        assert sentence.startswith(f"{url}: ")
        assert sentence.endswith(asks)
    assert not (folder / "answer.wav").exists()


def test_a_spoken_question_that_is_none(
    real_server: Running, folder: Path, refused: Callable[..., str]
) -> None:
    name = "client_spoken_question.py"
    assert refused(name).startswith("name a sound file")
    assert "nowhere.wav: cannot be read (No such file" in refused(name, "nowhere.wav")
    (folder / "text.wav").write_text("no sound")
    assert "Error code: 400" in refused(name, "text.wav", real_server.url)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.wav", "a.wav"], "nowhere.wav: there is no such file"),
        (["text.wav", "a.wav"], "text.wav: cannot be read as a WAV file (file does not start"),
        (["empty.wav", "a.wav"], "empty.wav: cannot be read as a WAV file ("),
        (["16k.wav", "a.wav"], "16k.wav: 16000 Hz, 1 channel(s), 16 bits, but it must be 24 kHz"),
        (["stereo.wav", "a.wav"], "stereo.wav: 24000 Hz, 2 channel(s), 16 bits, but it must be"),
        (["good.wav", "no/folder/a.wav"], "no/folder/a.wav: there is no such directory"),
        (["good.wav", "a.wav", "--url", "http://NOBODY/v1"], "(is `stretto serve` running there"),
        (["good.wav", "a.wav", "--url", "LOCKED/v1"], "(is `stretto serve` running there"),
    ],
)
def test_realtime_with_a_wrong_recording_or_server(
    words: list[str],
    says: str,
    nobody: str,
    locked: Running,
    folder: Path,
    refused: Callable[..., str],
) -> None:
    write_wav(folder / "good.wav")
    write_wav(folder / "16k.wav", rate=16_000)
    write_wav(folder / "stereo.wav", channels=2)
    (folder / "text.wav").write_text("no sound at all")
    (folder / "empty.wav").touch()
    words = [w.replace("NOBODY", nobody).replace("LOCKED", locked.url) for w in words]
    assert says in refused("realtime/openai_client.py", *words)
    assert not (folder / "a.wav").exists()


def test_realtime_with_a_recording_of_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    write_wav(folder / "silence.wav")
    monkeypatch.syspath_prepend(REALTIME)
    monkeypatch.setattr(importlib.import_module("recording"), "PATIENCE_S", 0.5)
    with talking(ScriptedEngine()) as running:
        words = ["silence.wav", "a.wav", "--url", f"{running.url}/v1"]
        sentence = refused("realtime/openai_client.py", *words)
    assert sentence.startswith("no answer within")
    assert sentence.endswith("is there speech in silence.wav?")


@pytest.mark.parametrize(
    ("name", "module"),
    [("livekit_agent.py", "livekit"), ("openai_agent.py", "agents"), ("pipecat_bot.py", "pipecat")],
)
def test_realtime_without_the_framework(
    name: str, module: str, folder: Path, refused: Callable[..., str]
) -> None:
    installed = importlib.util.find_spec(module) is not None
    says = "nowhere.wav: there is no such file" if installed else ": pip install "
    assert says in refused(f"realtime/{name}", "nowhere.wav", "a.wav")

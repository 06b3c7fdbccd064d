"""What `from stretto import ...` offers, on the tiny model; and the examples, run as they are."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import stretto
from stretto import (
    Answer,
    AsyncEngine,
    AudioChunk,
    Engine,
    EngineConfig,
    Finished,
    Invalid,
    Params,
    SpeechStyle,
    TextDelta,
)
from stretto.engine.time_scaling import TimeScaler
from stretto.registry import write_tiny

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(
    path for path in FOLDER.glob("*.py") if not path.stem.startswith("client_")
)  # those need a server
SHORT: dict[str, Any] = {"max_text_tokens": 6, "max_frames": 8, "seed": 3}


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Any:
    with Engine(tiny_dir, device="cpu") as engine:
        yield engine


def test_an_answer(engine: Engine, tmp_path: Path) -> None:
    answer = engine.chat("Hello!", **SHORT)
    assert answer.sample_rate == engine.info.sample_rate == 24_000
    assert answer.finished.usage.samples == len(answer.audio) > 0
    assert answer.seconds == len(answer.audio) / 24_000
    assert answer.finished.seed == 3
    for name in ("a.wav", "a.flac"):
        answer.save(tmp_path / name)
        samples, rate = soundfile.read(tmp_path / name, dtype="float32")
        assert rate == 24_000
        np.testing.assert_allclose(samples, np.clip(answer.audio, -1, 1), atol=1 / 32_000)


def test_a_stream_is_the_same_answer(engine: Engine) -> None:
    whole = engine.chat("Hello!", **SHORT)
    *events, end = engine.stream("Hello!", params=Params(max_text_tokens=6, max_frames=8), seed=3)
    assert isinstance(end, Finished)
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == whole.text
    samples = np.concatenate([e.samples for e in events if isinstance(e, AudioChunk)])
    np.testing.assert_allclose(samples, whole.audio, atol=1e-5)  # packets may be grouped otherwise


def test_text_alone_has_nothing_to_save(engine: Engine, tmp_path: Path) -> None:
    answer = engine.chat([{"role": "user", "content": "Hello!"}], modalities=["text"], **SHORT)
    assert answer.text
    assert not len(answer.audio)
    with pytest.raises(Invalid, match="no speech"):
        answer.save(tmp_path / "a.wav")


def test_speech_that_cannot_be_written(engine: Engine, tmp_path: Path) -> None:
    answer = engine.read_aloud("Good day.", **SHORT)
    for name in ("a", "a.txt", "no such directory/a.wav"):
        with pytest.raises(Invalid, match="cannot be written"):
            answer.save(tmp_path / name)


def test_a_voice_made_of_a_clip(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tts", family="qwen3-tts-base")
    soundfile.write(
        tmp_path / "clip.wav", np.sin(np.arange(24_000) / 20), 16_000
    )  # a second and a half
    with Engine(tmp_path / "tts", device="cpu") as reader:
        voice = reader.make_voice(tmp_path / "clip.wav", "Good day.")
        answer = reader.read_aloud("Hello!", style=SpeechStyle(voice=voice), seed=1, max_frames=3)
        assert len(answer.audio)
        with pytest.raises(Invalid, match="cannot be read"):
            reader.make_voice(tmp_path / "missing.wav")


def test_reading_aloud(engine: Engine) -> None:
    answer = engine.read_aloud("Good day.", voice=engine.info.voices[0], **SHORT)
    assert answer.text == "Good day."
    assert answer.cut == ("length" in (answer.finished.text, answer.finished.audio))
    assert engine.read_aloud("Good day.", max_frames=1).cut
    assert len(answer.audio)
    assert sum(isinstance(e, AudioChunk) for e in engine.stream_aloud("Good day.", **SHORT)) > 1


def test_speech_at_another_speed(engine: Engine) -> None:
    """Of a text, an answer and an answer in a session."""
    scaler = TimeScaler(2.0, 24_000)
    plain = engine.read_aloud("Good day.", **SHORT)
    fast = engine.read_aloud("Good day.", speed=2.0, **SHORT)
    assert fast.finished.usage.frames == plain.finished.usage.frames
    assert fast.finished.usage.samples == len(fast.audio) == round(len(plain.audio) / 2)
    expected = np.concatenate([scaler.feed(plain.audio), scaler.finish()])
    np.testing.assert_allclose(fast.audio, expected, atol=1e-5)
    assert len(engine.chat("Hello!", speed=2.0, **SHORT).audio) == round(
        len(engine.chat("Hello!", **SHORT).audio) / 2
    )
    with pytest.raises(Invalid, match="speed is out of range: 5"):
        engine.read_aloud("Good day.", speed=5)


def test_a_session_at_another_speed(tiny_dir: Path) -> None:
    async def work() -> list[int]:
        async with AsyncEngine(tiny_dir, device="cpu") as engine, engine.session() as session:
            await session.add({"role": "user", "content": "Hello!"})
            lengths = []
            for speed in (1.0, 0.5):
                params = Params(**SHORT, speed=speed)
                events = session.respond(params=params, remember=False)
                lengths.append(len((await Answer.of(events, 24_000)).audio))
            return lengths

    plain, slow = asyncio.run(work())
    assert slow == 2 * plain > 0


def test_the_same_with_an_event_loop(engine: Engine, tiny_dir: Path) -> None:
    async def work() -> list[Answer]:
        async with AsyncEngine(tiny_dir, config=EngineConfig(placement="two")) as other:
            aloud = await other.read_aloud("Good day.", **SHORT)
            assert other.metrics()["stretto_engine_finished_total"] == 1
            return [await other.chat("Hello!", **SHORT), aloud]

    here = [engine.chat("Hello!", **SHORT), engine.read_aloud("Good day.", **SHORT)]
    for ours, theirs in zip(here, asyncio.run(work()), strict=True):
        assert ours.text == theirs.text
        np.testing.assert_allclose(ours.audio, theirs.audio, atol=1e-5)


def test_what_cannot_be_asked(engine: Engine, tiny_dir: Path) -> None:
    with pytest.raises(Invalid, match=r"no such option.*'temprature'"):
        engine.chat("Hello!", temprature=1.0)
    with pytest.raises(Invalid, match="temperature"):
        engine.chat("Hello!", temperature=9.0)
    with pytest.raises(Invalid, match="no such directory"), Engine("nowhere"):
        pass
    with pytest.raises(Invalid, match="params must be of class Params"):
        engine.chat("Hello!", params={"temperature": 1.0})  # type: ignore[arg-type]
    for device in ("gpu", "cpu, cpu", ""):
        with pytest.raises(Invalid, match="device must be"):
            Engine(tiny_dir, device=device)
    with pytest.raises(Invalid, match="in the config, or alone"):
        Engine(tiny_dir, device="cpu", config=EngineConfig())
    with pytest.raises(Invalid, match="started by `with`"):
        Engine(tiny_dir).chat("Hello!")


def test_all_names_are_there() -> None:
    """To type checkers and at run time: the same."""
    source = ast.parse(Path(stretto.__file__).read_text(encoding="utf-8"))
    [known] = [node for node in source.body if isinstance(node, ast.If)]
    imported = {a.name for node in known.body for a in getattr(node, "names", ())}
    assert set(stretto.__all__) == {*imported, "__version__"}
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
        assert name in dir(stretto)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = stretto.Motor


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples(example: Path, tiny_dir: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, example, tiny_dir],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for path in tmp_path.glob("*.wav"):
        assert soundfile.info(path).frames > 1000


def test_the_first_example_needs_no_checkpoint(tmp_path: Path) -> None:
    hello = FOLDER / "hello.py"
    done = subprocess.run(
        [sys.executable, hello], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert soundfile.info(tmp_path / "hello.wav").frames > 1000


def test_how_likely_the_tokens_were(engine: Engine) -> None:
    answer = engine.chat("Hello!", modalities=["text"], logprobs=2, **SHORT)
    assert len(answer.logprobs) == answer.finished.usage.text_tokens
    text = b"".join(t.text_bytes or b"" for t in answer.logprobs)
    assert text.decode(errors="replace") == answer.text
    assert all(t.logprob <= t.top[0].logprob <= 0 and len(t.top) == 2 for t in answer.logprobs)
    assert engine.chat("Hello!", modalities=["text"], **SHORT).logprobs == ()
    with pytest.raises(Invalid, match="logprobs"):
        engine.chat("Hello!", logprobs=21)

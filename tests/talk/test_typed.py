from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.loadtest.http import ListedModel
from stretto.loadtest.sse import Piece, RequestFailed, Sound, StreamEnd, Words, wav_file
from stretto.talk.sound import MICROPHONE_RATE, NoSound, SoundDevice, Speaker, find_sound
from stretto.talk.typed import Talk

PCM = b"\x01\x02" * 480
ANSWER: list[Piece] = [
    Words("Hel"),
    Sound(base64.b64encode(PCM).decode()),
    Words("lo."),
    StreamEnd("stop"),
]
SILENCE = NoSound("no sound device here")


@dataclass
class FakeSound:
    """A sound device that records what it plays."""

    played: bytes = b""
    waited: int = 0
    closed: int = 0

    def speaker(self, rate: int) -> FakeSound:
        return self

    def listen(self, rate: int, take: Callable[[bytes], None]) -> FakeSound:
        take(PCM[:100])
        take(PCM[100:])
        return self

    def write(self, pcm: bytes) -> None:
        self.played += pcm

    def wait(self) -> None:
        self.waited += 1

    def close(self) -> None:
        self.closed += 1


@dataclass
class Person:
    """Says these lines one after another, then leaves."""

    lines: list[str | BaseException]
    answers: list[list[Piece | BaseException]] = field(default_factory=list)
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    out: io.StringIO = field(default_factory=io.StringIO)

    def read(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def ask(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        self.bodies.append(body)
        for piece in self.answers.pop(0) if self.answers else ANSWER:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def talk(self, sound: Any = SILENCE, **more: Any) -> Talk:
        return Talk(
            self.ask, ListedModel("tiny", ("Ethan", "Chelsie")), self.out, self.read, sound, **more
        )

    def output(self) -> str:
        return self.out.getvalue()


def text(words: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": words}]}


def test_each_request_has_the_whole_conversation() -> None:
    person = Person(["One?", "Two?", "/new", "Three?", "/quit", "never reached"])
    assert person.talk(system="Be brief.").run() == 0
    brief = {"role": "system", "content": "Be brief."}
    hello = {"role": "assistant", "content": "Hello."}
    assert [b["messages"] for b in person.bodies] == [
        [brief, text("One?")],
        [brief, text("One?"), hello, text("Two?")],
        [brief, text("Three?")],
    ]
    assert person.output().count("Hello.\n") == 3


def test_without_sound_only_text_is_requested() -> None:
    person = Person(["Hi"])
    person.talk().run()
    assert person.bodies[0]["modalities"] == ["text"]
    assert "no sound device here" in person.output()


def test_answers_are_played() -> None:
    person, device = Person(["Hi"]), FakeSound()
    person.talk(device, voice="Ethan").run()
    assert person.bodies[0]["audio"] == {"format": "pcm16", "voice": "Ethan"}
    assert (device.played, device.waited, device.closed) == (PCM, 1, 0)


def test_answers_are_saved(tmp_path: Path) -> None:
    person = Person(["Hi", "Again"])
    person.talk(save=tmp_path / "new").run()
    for n in (1, 2):
        with wave.open(str(tmp_path / "new" / f"answer-{n}.wav")) as file:
            assert (file.getframerate(), file.readframes(9999)) == (24000, PCM)


def test_spoken_question() -> None:
    person, device = Person(["", ""]), FakeSound()
    person.talk(device).run()
    (part,) = person.bodies[0]["messages"][0]["content"]
    assert base64.b64decode(part["input_audio"]["data"]) == wav_file(MICROPHONE_RATE, PCM)


def test_speaking_without_a_microphone_is_explained() -> None:
    person = Person([""])
    person.talk().run()
    assert person.bodies == []
    assert "! there is no microphone" in person.output()


def test_voice_is_chosen_from_those_there_are() -> None:
    person = Person(["/voice chelsie", "/voice Bob", "/voice", "Hi"])
    person.talk(FakeSound()).run()
    assert person.bodies[0]["audio"]["voice"] == "Chelsie"
    assert "! no voice 'Bob'; there are Ethan, Chelsie" in person.output()
    assert "Voices: Ethan, Chelsie" in person.output()


def test_image_goes_with_the_next_question_only(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    person = Person(
        [f"/image {tmp_path / 'a.png'}", "/image nothing.png", "/image notes.txt", "What?", "And?"]
    )
    person.talk().run()
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"png").decode()},
    }
    assert person.bodies[0]["messages"][0]["content"] == [image, {"type": "text", "text": "What?"}]
    assert person.bodies[1]["messages"][-1] == text("And?")
    assert "! nothing.png: No such file" in person.output()
    assert "! notes.txt: not an image" in person.output()


def test_sound_file_as_question(tmp_path: Path) -> None:
    (tmp_path / "q.wav").write_bytes(wav_file(16000, PCM))
    person = Person([f"/file {tmp_path / 'q.wav'}", "/file missing.wav"])
    person.talk().run()
    (part,) = person.bodies[0]["messages"][0]["content"]
    assert part["input_audio"]["format"] == "wav"
    assert "! missing.wav" in person.output()
    once = Person([])
    assert once.talk().once("What is it?", tmp_path / "q.wav") == 0
    assert [p["type"] for p in once.bodies[0]["messages"][0]["content"]] == ["input_audio", "text"]


def test_failure_is_shown_and_forgotten() -> None:
    person, device = Person(["One?", "Two?"]), FakeSound()
    person.answers = [[Words("Hal"), ANSWER[1], RequestFailed("http 503", "the stage died")]]
    person.talk(device).run()
    assert "! the stage died" in person.output()
    assert device.closed == 1
    assert person.bodies[1]["messages"] == [text("Two?")]
    with pytest.raises(RequestFailed):
        Person([], [[RequestFailed("connect", "nobody there")]]).talk().once("Hi", None)


def test_interrupting_an_answer_keeps_the_conversation() -> None:
    person, device = Person([KeyboardInterrupt(), "One?", "Two?"]), FakeSound()
    person.answers = [[Words("So far"), ANSWER[1], KeyboardInterrupt()]]
    assert person.talk(device).run() == 0
    assert "So far (stopped)" in person.output()
    assert device.closed == 1
    assert person.bodies[1]["messages"][1] == {"role": "assistant", "content": "So far"}


def test_unknown_command_shows_those_there_are() -> None:
    person = Person(["/dance", "/help"])
    person.talk().run()
    assert person.bodies == []
    assert person.output().count("/image FILE") == 3


class Stream:
    """A sound device's, whose thread is the test."""

    def __init__(self, **settings: Any) -> None:
        self.fill = settings["callback"]
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


class Module:
    """As far as a loudspeaker and a microphone need the package `sounddevice`."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def RawOutputStream(self, **settings: Any) -> Stream:
        self.streams.append(Stream(**settings))
        return self.streams[-1]

    RawInputStream = RawOutputStream


def test_a_loudspeaker_plays_silence_where_it_has_nothing() -> None:
    module = Module()
    speaker, out = Speaker(module, 24_000), bytearray(b"xxxxxx")
    [stream] = module.streams
    speaker.write(b"abcd")
    speaker.write(b"efgh")
    stream.fill(out, 3, None, None)
    assert (out, speaker.pending) == (b"abcdef", 2)
    stream.fill(out, 3, None, None)
    assert (out, speaker.pending) == (b"gh\0\0\0\0", 0)
    speaker.wait()  # returns, since nothing is left
    assert stream.calls == ["start", "stop", "close"]


def test_a_microphone_passes_its_samples_on() -> None:
    module, samples = Module(), []
    microphone = SoundDevice(module).listen(24_000, samples.append)
    microphone.fill(bytearray(b"abcd"), 2, None, None)
    microphone.close()
    assert samples == [b"abcd"]
    assert microphone.calls == ["start", "close"]


def test_missing_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("stretto.talk.sound.import_module", nothing)
    found = find_sound()
    assert isinstance(found, NoSound)
    assert "pip install sounddevice" in found.why


def test_talk_understands_exit_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "answer-1.wav").write_bytes(b"mine")
    lines = iter(["hello", "exit", "never asked"])
    out, bodies = io.StringIO(), []

    def ask(body):
        bodies.append(body)
        return iter([Words("Hi.")])

    talk = Talk(
        ask, ListedModel("m"), out, lambda prompt: next(lines), NoSound("none"), save=tmp_path
    )
    assert talk.run() == 0
    assert len(bodies) == 1
    talk.save_speech(24000, b"\0\0" * 2400)
    assert (tmp_path / "answer-1.wav").read_bytes() == b"mine"
    assert (tmp_path / "answer-2.wav").exists()

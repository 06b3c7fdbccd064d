"""`stretto talk --live`: against the real server with a scripted engine, and what happens on an
interruption."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.talk.live import FileMicrophone, LiveTalk, realtime_url
from tests.loadtest.command import run
from tests.server.realtime.conftest import talking
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import say


def test_a_file_is_spoken_and_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = tmp_path / "question.wav"
    with wave.open(str(question), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes(pcm(silence(0.2), speech(0.6)))
    engine = ScriptedEngine(script=lambda ask: say("Good day to you.", 0.5))
    with talking(engine, api_key=("k",)) as server:
        live = (
            "talk",
            server.url,
            "--key",
            "k",
            "--live",
            "--file",
            str(question),
            "--save",
            str(tmp_path / "out"),
        )
        assert run(*live, "--system", "Be brief.", "--voice", "chelsie") == 0
        assert run(*live) == 0
        with pytest.raises(Invalid, match="--text-only"):
            run(*live, "--text-only")
    shown = capsys.readouterr().out
    assert "Good day to you." in shown
    assert "ms from the end of speech to the first sound" in shown
    for name in ("answer-1.wav", "answer-2.wav"):  # what was saved before stays
        with wave.open(str(tmp_path / "out" / name)) as file:
            assert file.getnframes() == 12_000
    assert engine.asks[0].texts[0] == "system: Be brief."
    assert engine.asks[0].given["voice"] == "Chelsie"


class Loudspeaker:
    def __init__(self, rate: int) -> None:
        self.written = b""
        self.played, self.closed = 0, False

    def write(self, data: bytes) -> None:
        self.written += data

    def wait(self) -> None:
        self.played = len(self.written)

    def close(self) -> None:
        self.closed = True

    @property
    def pending(self) -> int:
        return len(self.written) - self.played


class Script:
    """A server that sends what it was told to, and keeps what it gets."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events, self.sent = list(events), []  # type: ignore[var-annotated]

    def send(self, message: str) -> None:
        self.sent.append(json.loads(message))

    def recv(self) -> str:
        if not self.events:
            raise KeyboardInterrupt
        return json.dumps(self.events.pop(0))


class Microphone:
    def close(self) -> None:
        pass


def delta(data: bytes) -> dict[str, Any]:
    return {
        "type": "response.output_audio.delta",
        "response_id": "r",
        "delta": base64.b64encode(data).decode(),
    }


def test_speech_stops_the_loudspeaker_and_truncates_the_answer() -> None:
    made: list[Loudspeaker] = []

    def speaker(rate: int) -> Loudspeaker:
        made.append(Loudspeaker(rate))
        return made[-1]

    server = Script(
        {"type": "response.created", "response": {"id": "r"}},
        {
            "type": "response.output_item.added",
            "response_id": "r",
            "item": {"id": "i", "type": "message"},
        },
        delta(bytes(48_000)),
    )
    out = io.StringIO()
    talk = LiveTalk(server, out, lambda rate, take: Microphone(), speaker)
    for event in server.events:
        talk.handle(event)
    assert len(made[0].written) == 48_000
    made[0].played = 24_000  # half a second was heard
    talk.handle({"type": "input_audio_buffer.speech_started"})
    assert made[0].closed
    assert server.sent[-1] == {
        "type": "conversation.item.truncate", "item_id": "i", "content_index": 0,
        "audio_end_ms": 500,
    }  # fmt: skip
    talk.handle(delta(bytes(4800)))  # was on its way
    assert len(made) == 1
    talk.handle({"type": "response.done", "response": {"id": "r", "status": "cancelled"}})
    assert "(interrupted)" in out.getvalue()
    count = len(server.sent)
    talk.handle({"type": "input_audio_buffer.speech_started"})
    assert len(server.sent) == count


def test_leaving_stops_the_loudspeaker() -> None:
    loudspeaker = Loudspeaker(24_000)
    talk = LiveTalk(
        Script({"type": "response.created", "response": {"id": "r"}}, delta(bytes(48_000))),
        io.StringIO(), lambda rate, take: Microphone(), lambda rate: loudspeaker,
    )  # fmt: skip
    assert talk.run() == 0  # the script ends as Ctrl-C does
    assert loudspeaker.closed
    assert loudspeaker.played == 0, "nobody waits for the rest"


def test_a_recording_goes_on_as_silence() -> None:
    import threading

    got: list[bytes] = []
    enough = threading.Event()

    def take(piece: bytes) -> None:
        got.append(piece)
        if len(got) == 4:
            enough.set()

    microphone = FileMicrophone(b"\x01" * 2000, 24_000, take)
    assert enough.wait(60)
    microphone.close()
    assert b"".join(got[:2]) == b"\x01" * 2000
    assert set(got[2]) == {0}


def test_addresses() -> None:
    assert realtime_url("http://127.0.0.1:8000/v1/") == "ws://127.0.0.1:8000/v1/realtime"
    assert realtime_url("https://omni.example/api/v1") == "wss://omni.example/api/v1/realtime"


def test_no_microphone(monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.commands import talk as talk_command
    from stretto.talk import sound

    monkeypatch.setattr(sound, "find_sound", lambda: sound.NoSound("there is none"))
    args = type("Args", (), {"file": None, "key": None, "text": None, "text_only": False})()
    with pytest.raises(Invalid, match="no microphone"):
        talk_command.run_live(args, "http://127.0.0.1:1/v1", "m")

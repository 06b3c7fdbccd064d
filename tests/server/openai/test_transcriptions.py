"""Transcriptions and translations of sound files, as OpenAI's client sends them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine

RATE = 16_000
FEW = {"max_tokens": 8}  # random weights find no end


def sound(seconds: float, format: str = "WAV") -> io.BytesIO:
    rng = np.random.default_rng(1)
    file = io.BytesIO()
    soundfile.write(
        file, 0.1 * rng.standard_normal(int(seconds * RATE)).astype(np.float32), RATE, format=format
    )
    file.seek(0)
    file.name = f"question.{format.lower()}"
    return file


def test_the_stock_client_transcribes_and_translates(real_server: Running) -> None:
    client = real_server.client()
    options: Any = {
        "model": "default",
        "language": "en",
        "prompt": "About Rome.",
        "extra_body": FEW,
    }
    answer = client.audio.transcriptions.create(file=sound(1.5, "FLAC"), **options)
    assert answer.text
    assert client.models.list().data[0].to_dict()["transcribes"]
    again = client.audio.transcriptions.create(
        file=sound(1.5, "FLAC"), response_format="text", **options
    )
    assert again.strip() == answer.text
    other = client.audio.translations.create(file=sound(1.5), model="default", extra_body=FEW)
    assert other.text != answer.text  # another question was put


def test_streamed(real_server: Running) -> None:
    events = list(
        real_server.client().audio.transcriptions.create(
            file=sound(1.5), model="default", stream=True, extra_body=FEW
        )
    )
    assert {e.type for e in events[:-1]} == {"transcript.text.delta"}
    assert events[-1].type == "transcript.text.done"
    assert "".join(e.delta for e in events[:-1]).strip() == events[-1].text


def test_a_long_sound_is_heard_window_by_window(real_server: Running) -> None:
    answer = real_server.client().audio.transcriptions.create(
        file=sound(40),
        model="default",
        response_format="verbose_json",
        extra_body={**FEW, "seed": 1},
    )
    told = answer.to_dict()
    assert told["duration"] == pytest.approx(40, abs=0.01)
    first, second = told["segments"]  # type: ignore[misc]
    assert first["end"] == second["start"]
    assert 24 <= first["end"] <= 30
    assert told["text"] == f"{first['text']} {second['text']}".strip()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "srt"}, "response_format"),
        ({"model": "other"}, "model"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_mistakes_are_named(real_server: Running, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        real_server.client().audio.transcriptions.create(
            **{"file": sound(0.5), "model": "default", **change}
        )
    assert caught.value.status_code in (400, 404)
    assert caught.value.body["param"] == param  # type: ignore[index]


@pytest.mark.parametrize("route", ["transcriptions", "translations"])
def test_a_model_that_cannot_transcribe_refuses(route: str) -> None:
    with serve(ScriptedEngine(transcription=None)) as running:
        client = running.client()
        assert not client.models.list().data[0].to_dict()["transcribes"]
        with pytest.raises(openai.BadRequestError) as caught:
            getattr(client.audio, route).create(file=sound(0.5), model="default")
    body: Any = caught.value.body
    assert (body["message"], body["param"]) == ("this model cannot transcribe speech", "model")


def test_what_is_no_sound_is_a_400(real_server: Running) -> None:
    for file in (io.BytesIO(b"not a sound at all"), io.BytesIO(b"")):
        file.name = "x.wav"
        with pytest.raises(openai.BadRequestError):
            real_server.client().audio.transcriptions.create(file=file, model="default")
    reply = real_server.ask("/v1/audio/transcriptions", {"file": "x"})
    assert reply.status == 415
    form = {"Content-Type": "multipart/form-data"}
    assert real_server.ask("/v1/chat/completions", {"messages": []}, headers=form).status == 415

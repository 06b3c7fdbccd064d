"""Sound files written down, as OpenAI's client sends them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from stretto.errors import Invalid
from stretto.preprocess.media import cut_sound
from stretto.server.http.forms import boundary, parse_form
from tests.server.conftest import Running

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


def test_the_stock_client_transcribes_and_translates(real: Running) -> None:
    client = real.client()
    options: Any = {
        "model": "default",
        "language": "en",
        "prompt": "About Rome.",
        "extra_body": FEW,
    }
    answer = client.audio.transcriptions.create(file=sound(1.5, "FLAC"), **options)
    assert answer.text
    again = client.audio.transcriptions.create(
        file=sound(1.5, "FLAC"), response_format="text", **options
    )
    assert again.strip() == answer.text
    other = client.audio.translations.create(file=sound(1.5), model="default", extra_body=FEW)
    assert other.text != answer.text  # another question was put


def test_streamed(real: Running) -> None:
    events = list(
        real.client().audio.transcriptions.create(
            file=sound(1.5), model="default", stream=True, extra_body=FEW
        )
    )
    assert {e.type for e in events[:-1]} == {"transcript.text.delta"}
    assert events[-1].type == "transcript.text.done"
    assert "".join(e.delta for e in events[:-1]).strip() == events[-1].text


def test_a_long_sound_is_heard_window_by_window(real: Running) -> None:
    answer = real.client().audio.transcriptions.create(
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


def test_windows_end_where_it_is_quiet() -> None:
    samples = np.ones(10 * RATE, np.float32)
    samples[int(3.7 * RATE) : int(3.9 * RATE)] = 0
    samples[int(7.4 * RATE) : int(7.7 * RATE)] = 0
    parts = cut_sound(samples, 4.0)
    assert sum(len(p) for p in parts) == len(samples)
    ends = np.cumsum([len(p) for p in parts]) / RATE
    assert 3.7 <= ends[0] <= 3.9
    assert 7.4 <= ends[1] <= 7.7


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "srt"}, "response_format"),
        ({"model": "other"}, "model"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_mistakes_are_named(real: Running, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        real.client().audio.transcriptions.create(
            **{"file": sound(0.5), "model": "default", **change}
        )
    assert caught.value.status_code in (400, 404)
    assert caught.value.body["param"] == param  # type: ignore[index]


def test_what_is_no_sound_is_a_400(real: Running) -> None:
    for file in (io.BytesIO(b"not a sound at all"), io.BytesIO(b"")):
        file.name = "x.wav"
        with pytest.raises(openai.BadRequestError):
            real.client().audio.transcriptions.create(file=file, model="default")
    reply = real.ask("/v1/audio/transcriptions", {"file": "x"})
    assert reply.status == 415
    form = {"Content-Type": "multipart/form-data"}
    assert real.ask("/v1/chat/completions", {"messages": []}, headers=form).status == 415


def test_forms() -> None:
    mark = boundary('multipart/form-data; boundary="a b"')
    body = (
        b'--a b\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n'
        b'--a b\r\nContent-Disposition: form-data; name="file"; '
        b'filename="../../etc"\r\n\r\n\r\n\r\n\x00--a\r\n'
        b"--a b--\r\n"
    )
    form = parse_form(body, mark)
    assert form.fields == {"model": "x"}
    assert body[slice(*form.files["file"])] == b"\r\n\r\n\x00--a"
    for i in range(len(body) - 4):
        with pytest.raises(Invalid):
            parse_form(body[:i], mark)
    with pytest.raises(Invalid, match="twice"):
        parse_form(body[:-9] + b"\r\n" + body, mark)
    with pytest.raises(Invalid, match="boundary"):
        boundary("multipart/form-data")
    assert json.dumps(form.fields)

"""Transcriptions and translations of sound files, as OpenAI's client sends them."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from stretto.engine.events import Event
from stretto.preprocess.pool.jobs import Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.split import do_cut
from stretto.server.openai.schema import Segment
from stretto.server.openai.transcriptions import srt, vtt
from tests.server.conftest import Running, serve
from tests.server.realtime.sounds import speech
from tests.server.scripted_engine import ScriptedEngine, decoded

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
    segments: Any = told["segments"]
    assert len(segments) >= 4  # noise without a pause
    assert all(a["end"] <= b["start"] < b["end"] for a, b in pairwise(segments))
    assert told["text"] == " ".join(s["text"] for s in segments)


# ---- times


class Scribe(ScriptedEngine):
    """Hears how long each window is; a sound is cut for real."""

    async def cut(
        self, sound: MemFile, seconds: float | None, client: str = ""
    ) -> tuple[Windows, MemFile]:
        return do_cut(sound.view(), seconds)

    def generate(self, messages: Any, **given: Any) -> AsyncIterator[Event]:
        data = decoded(messages)[0][0]["content"][0]["input_audio"]["data"]
        self.pieces = (f"I heard {len(base64.b64decode(data)) / 2 / RATE:.0f}", " <seconds>.\n")
        return super().generate(messages, **given)


@pytest.fixture(scope="module")
def scribe() -> Iterator[Running]:
    with serve(Scribe()) as running:
        yield running


def two_sentences() -> io.BytesIO:
    """Speech from 0 to 4 s and from 5 to 9 s."""
    parts = [speech(4.0), np.zeros(RATE), speech(4.0, seed=1), np.zeros(2 * RATE)]
    file = io.BytesIO()
    soundfile.write(file, np.concatenate(parts).astype(np.float32), RATE, format="WAV")
    file.seek(0)
    file.name = "two.wav"
    return file


def times_of(text: str) -> list[float]:
    found = re.findall(r"(\d\d):(\d\d):(\d\d)[.,](\d{3})", text)
    return [int(h) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000 for h, m, s, ms in found]


def test_subtitles(scribe: Running) -> None:
    create = scribe.client().audio.transcriptions.create
    srt = create(file=two_sentences(), model="default", response_format="srt")
    assert re.sub(r"\d\d:\d\d:\d\d,\d{3}", "T", str(srt)) == (
        "1\nT --> T\nI heard 4 <seconds>.\n\n2\nT --> T\nI heard 6 <seconds>.\n\n"
    )
    np.testing.assert_allclose(times_of(str(srt)), [0, 4, 5, 9], atol=0.15)
    vtt = create(file=two_sentences(), model="default", response_format="vtt")
    assert str(vtt).startswith("WEBVTT\n\n00:00:00.")
    assert str(vtt).count("&lt;seconds&gt;") == 2
    assert times_of(str(vtt)) == times_of(str(srt))
    told = create(
        file=two_sentences(),
        model="default",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert told.segments is not None
    assert [t for s in told.segments for t in (s.start, s.end)] == times_of(str(srt))
    assert (told.duration, told.text) == (11.0, "I heard 4 <seconds>.\n I heard 6 <seconds>.")


def test_a_stream_with_times_brings_each_segment_when_it_is_complete(scribe: Running) -> None:
    options: Any = {"model": "default", "stream": True, "response_format": "verbose_json"}
    stream = scribe.client().audio.transcriptions.create(file=two_sentences(), **options)
    events: list[Any] = [e.to_dict() for e in stream]
    kinds = [e["type"].removeprefix("transcript.text.") for e in events]
    assert kinds == ["delta", "delta", "segment", "delta", "delta", "segment", "done"]
    segments = [e for e in events if e["type"].endswith("segment")]
    assert [s["text"] for s in segments] == ["I heard 4 <seconds>.", "I heard 6 <seconds>."]
    assert 0 <= segments[0]["start"] < segments[0]["end"] < segments[1]["start"]


def test_silence_has_no_subtitles(scribe: Running) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(RATE, np.float32), RATE, format="WAV")
    file.seek(0)
    file.name = "silence.wav"
    create = scribe.client().audio.transcriptions.create
    assert create(file=file, model="default", response_format="vtt") == "WEBVTT\n"  # type: ignore[comparison-overlap]


def test_what_a_player_would_misread_is_written_otherwise() -> None:
    segments = [Segment(0, 3599.9996, 36_000.05, "a\n\nb --> c & d")]
    assert srt(segments) == "1\n01:00:00,000 --> 10:00:00,050\na b → c & d\n\n"
    assert vtt(segments) == "WEBVTT\n\n01:00:00.000 --> 10:00:00.050\na b → c &amp; d\n"


@pytest.mark.parametrize("asked", [["word"], ["word", "segment"], ["segment", "word"]])
def test_times_of_words_are_refused_in_a_sentence(scribe: Running, asked: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="no times of words") as caught:
        scribe.client().audio.transcriptions.create(
            file=two_sentences(),
            model="default",
            response_format="verbose_json",
            timestamp_granularities=asked,
        )
    assert caught.value.body["param"] == "timestamp_granularities"  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "srt", "stream": True}, "response_format"),
        ({"timestamp_granularities": ["letter"]}, "timestamp_granularities[0]"),
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

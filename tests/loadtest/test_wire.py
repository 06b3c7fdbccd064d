from __future__ import annotations

import base64
import io
import json
import wave
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.loadtest.sse import (
    PCM_RATE,
    EventSplitter,
    RequestFailed,
    Sound,
    StreamEnd,
    Used,
    Words,
    read_event,
    read_wav,
    wav_file,
)


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def event(delta: dict[str, object], **more: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta}], **more}).encode()


@given(
    events=st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20),
        max_size=8,
    ),
    ends=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_events_are_the_same_however_the_bytes_are_cut(
    events: list[str], ends: str, cuts: list[int]
) -> None:
    stream = "".join(f": ping{ends}event: x{ends}data: {e}{ends}{ends}" for e in events).encode()
    places = [0, *sorted(min(c, len(stream)) for c in cuts), len(stream)]
    splitter = EventSplitter()
    got = [e for a, b in pairwise(places) for e in splitter.feed(stream[a:b])]
    assert got == [e.encode() for e in events]


def test_lines_of_one_event_are_joined() -> None:
    assert EventSplitter().feed(b"data: a\ndata:b\n\ndata: unfinished\n") == [b"a\nb"]


def test_openai_form() -> None:
    assert read_event(event({"role": "assistant", "content": ""})) == []
    assert read_event(event({"content": "Hi"})) == [Words("Hi")]
    assert read_event(event({"audio": {"transcript": "Hi", "data": "AAAA"}})) == [
        Words("Hi"),
        Sound("AAAA"),
    ]
    assert read_event(event({"audio": {"id": "audio_1"}})) == []
    assert read_event(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}') == [
        StreamEnd("stop")
    ]
    assert read_event(b'{"choices": [], "usage": {"completion_tokens": 3}}') == [
        Used({"completion_tokens": 3})
    ]
    assert read_event(b'{"choices": [{"delta": null}], "usage": null}') == []


def test_sound_in_content_as_small_wav_files() -> None:
    pcm = bytes(range(200))
    (piece,) = read_event(event({"content": encoded(wav_file(16000, pcm))}, modality="audio"))
    assert isinstance(piece, Sound)
    assert piece.pcm() == (16000, pcm)
    assert piece.seconds() == 100 / 16000
    assert read_event(event({"content": "Hi"}, modality="text")) == [Words("Hi")]


@given(st.binary(max_size=300).filter(lambda raw: len(raw) % 2 == 0))
def test_length_is_known_without_decoding(pcm: bytes) -> None:
    sound = Sound(encoded(pcm))
    if pcm.startswith(b"RIFF"):
        return
    assert sound.seconds() == len(pcm) / 2 / PCM_RATE
    assert sound.pcm() == (PCM_RATE, pcm)


def test_wav_files_are_what_the_standard_library_reads_and_writes() -> None:
    pcm = bytes(range(256))
    with wave.open(io.BytesIO(wav_file(24000, pcm))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.readframes(1000) == pcm
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(pcm)
    assert read_wav(out.getvalue()) == (8000, pcm)
    endless = wav_file(24000, pcm).replace(b"data\x00\x01\x00\x00", b"data\xff\xff\xff\xff")
    assert read_wav(endless) == (24000, pcm), "a streamed file does not know its length"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"error": {"message": "the talker died"}}', "error in stream"),
        (b"not json", "bad event"),
        (b"[1]", "bad event"),
        (b'{"choices": [7]}', "bad event"),
        (b'{"choices": [{"delta": "text"}]}', "bad event"),
    ],
)
def test_bad_events_say_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        read_event(data)
    assert failed.value.reason == reason
    assert str(failed.value)


@pytest.mark.parametrize("raw", [b"RIFF", b"RIFF0000WAVE", wav_file(24000, b"")[:30]])
def test_broken_wav_files(raw: bytes) -> None:
    with pytest.raises(RequestFailed):
        read_wav(raw)


def test_stereo_is_refused() -> None:
    raw = bytearray(wav_file(24000, b"1234"))
    raw[22] = 2
    with pytest.raises(RequestFailed, match="2 channels"):
        read_wav(bytes(raw))


def test_broken_base64() -> None:
    with pytest.raises(RequestFailed, match="base64"):
        Sound("!!!").pcm()

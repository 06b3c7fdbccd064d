"""AAC: a stream of frames that stand for themselves. The other formats are tested where they are
asked for (`test_client.py`)."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
import pytest

from stretto.errors import Invalid
from stretto.server.openai import codecs
from tests.server.conftest import Running, read_open, serve
from tests.server.realtime.sounds import speech
from tests.server.scripted_engine import ScriptedEngine

RATE = 24_000
PRIMING = 1024  # samples of silence that an encoder begins with
SOUND = speech(2.0, RATE)
PCM = (SOUND * 32767).astype("<i2").tobytes()


def frames(data: bytes) -> Iterator[bytes]:
    """As a player finds them: each header says where the next one is."""
    while data:
        assert int.from_bytes(data[:2], "big") == 0xFFF1
        size = (data[3] & 3) << 11 | data[4] << 3 | data[5] >> 5
        assert size <= len(data)
        yield data[:size]
        data = data[size:]


def test_it_is_the_sound() -> None:
    samples, rate = read_open(codecs.encode("aac", PCM, RATE))
    assert rate == RATE
    heard = samples[PRIMING : PRIMING + len(SOUND)].astype(np.float64)
    assert np.corrcoef(heard, SOUND)[0, 1] > 0.95
    assert len(SOUND) <= len(samples) - PRIMING < len(SOUND) + 2048


@pytest.mark.parametrize("size", [2, 2730, 30_000])
def test_streamed_it_is_the_same(size: int) -> None:
    encoder = codecs.streamed("aac", RATE)
    pieces = [encoder.feed(PCM[i : i + size]) for i in range(0, len(PCM), size)]
    assert b"".join(pieces) + encoder.finish() == codecs.encode("aac", PCM, RATE)
    for piece in pieces:
        assert all(frames(piece)) or not piece  # only whole frames are sent


def test_it_can_be_played_from_any_frame() -> None:
    found = list(frames(codecs.encode("aac", PCM, RATE)))
    with av.open(io.BytesIO(b"".join(found[10:]))) as file:
        assert (file.format.name, file.streams.audio[0].codec_context.name) == ("aac", "aac")
        assert sum(f.samples for f in file.decode(audio=0)) == 1024 * len(found[10:])


def test_no_sound_is_a_file_too() -> None:
    assert len(list(frames(codecs.encode("aac", b"", RATE)))) >= 1


def test_without_ffmpeg_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    codecs.check("aac", "response_format")
    monkeypatch.setattr(codecs, "find_spec", lambda name: None)
    with pytest.raises(Invalid, match=r"stretto\[video\]") as e:
        codecs.check("aac", "response_format")
    assert e.value.param == "response_format"
    codecs.check("opus", "response_format")


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_speech_and_chat_in_aac(stream_format: str) -> None:
    packets = np.split(SOUND, [1365, 9000])
    with serve(ScriptedEngine(packets=packets)) as running:
        whole = b"".join(sent(running, stream_format))
        audio = {"format": "aac", "voice": "Ethan"}
        chat = running.client().chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Hi"}],
            modalities=["text", "audio"],
            audio=audio,  # type: ignore[arg-type]
        )
        assert chat.choices[0].message.audio is not None
    pcm = (SOUND * np.float32(32767)).round().astype("<i2").tobytes()
    assert whole == codecs.encode("aac", pcm, RATE)


def sent(running: Running, stream_format: str) -> list[bytes]:
    import base64

    body = {"input": "Hi", "response_format": "aac", "stream_format": stream_format}
    reply = running.ask("/v1/audio/speech", body)
    assert reply.status == 200
    if stream_format == "audio":
        assert reply.headers["content-type"] == "audio/aac"
        return [reply.body]
    assert reply.events[-1]["type"] == "speech.audio.done"
    return [base64.b64decode(e["audio"]) for e in reply.events[:-1]]

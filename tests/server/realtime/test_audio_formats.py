"""Sound in and out: no sample is lost or made up, wherever the pieces are cut; G.711 is checked
against the values of the standard."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import Invalid
from stretto.server.realtime.audio_formats import (
    RATES,
    AudioDecoder,
    AudioEncoder,
    Law,
    check_rate,
    decode_g711,
    decode_whole,
    encode_g711,
)
from tests.server.realtime.sounds import pcm, speech

EVERY = np.arange(-32768, 32768).astype(np.int16)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    law=st.sampled_from(sorted(RATES)),
)
def test_as_many_samples_as_went_in(sizes: list[int], law: str) -> None:
    sound = AudioDecoder(law)  # type: ignore[arg-type]
    width = 2 if law == "audio/pcm" else 1
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
    got, at = 0, 0
    for size in sizes:
        got += len(sound.feed(data[at : at + size]))
        at += size
    got += len(sound.flush())
    assert abs(got - (len(data) // width) * 16_000 / RATES[law]) <= 0.5


def test_pieces_give_what_the_whole_gives() -> None:
    data = pcm(speech(0.7))
    sound, parts, at = AudioDecoder("audio/pcm"), [], 0
    for size in (1, 3, 961, 2, 0, 4801, 10**6):  # halves of samples too
        parts.append(sound.feed(data[at : at + size]))
        at += size
    parts.append(sound.flush())
    assert np.allclose(np.concatenate(parts), decode_whole(data, "audio/pcm"), atol=1e-6)


def test_a_voice_is_still_that_voice() -> None:
    voice = speech(1.0)
    back = decode_whole(pcm(voice), "audio/pcm")
    assert np.corrcoef(voice, back)[0, 1] > 0.98


@pytest.mark.parametrize("format", sorted(RATES))
def test_out_has_the_format_s_length(format: str) -> None:
    out = AudioEncoder(format, 24_000)  # type: ignore[arg-type]
    data = b"".join(
        [out.feed(np.zeros(1365, np.float32)), out.feed(np.zeros(1920, np.float32)), out.flush()]
    )
    width = 2 if format == "audio/pcm" else 1
    assert len(data) == round(3285 * RATES[format] / 24_000) * width


def test_pcm_out_is_the_samples_themselves() -> None:
    samples = np.array([0.0, 0.5, -1.0, 2.0], np.float32)
    assert np.frombuffer(AudioEncoder("audio/pcm", 24_000).feed(samples), "<i2").tolist() == [
        0,
        16384,
        -32767,
        32767,
    ]


def test_another_rate_is_refused() -> None:
    check_rate("audio/pcm", None, "x")
    with pytest.raises(Invalid, match="24000"):
        check_rate("audio/pcm", 16_000, "x")


# G.711


def test_known_values() -> None:
    # Full scale, silence and the smallest steps, as ITU-T G.711 and every telephone have them.
    assert decode_g711(bytes([0x00, 0x80, 0xFF, 0x7F, 0xFE]), "mu").tolist() == [
        -32124,
        32124,
        0,
        0,
        8,
    ]
    assert decode_g711(bytes([0x2A, 0xAA, 0xD5, 0x55, 0xD4]), "a").tolist() == [
        -32256,
        32256,
        8,
        -8,
        24,
    ]
    assert encode_g711(np.array([0, 32767, -32768, 8], np.int16), "mu") == bytes(
        [0xFF, 0x80, 0x00, 0xFE]
    )
    assert encode_g711(np.array([0, 32767, -32768, -1], np.int16), "a") == bytes(
        [0xD5, 0xAA, 0x2A, 0x55]
    )


@pytest.mark.parametrize("law", ["mu", "a"])
def test_every_code_comes_back(law: Law) -> None:
    codes = bytes(range(256))
    samples = decode_g711(codes, law)
    again = decode_g711(encode_g711(samples, law), law)
    assert np.array_equal(samples, again)  # μ-law has two zeros


@pytest.mark.parametrize("law", ["mu", "a"])
def test_the_nearest_code_within_a_step(law: Law) -> None:
    back = decode_g711(encode_g711(EVERY, law), law).astype(int)
    size = np.abs(EVERY.astype(int))
    step = np.maximum(16, size // 16)  # sixteen steps to each octave
    assert (np.abs(back - EVERY) <= np.maximum(step, size - 32124)).all()
    assert (np.diff(back) >= 0).all()


def test_against_the_standard_library() -> None:
    audioop = pytest.importorskip("audioop", reason="gone from Python 3.13 on")
    data = EVERY.astype("<i2").tobytes()
    assert encode_g711(EVERY, "mu") == audioop.lin2ulaw(data, 2)
    assert encode_g711(EVERY, "a") == audioop.lin2alaw(data, 2)
    codes = bytes(range(256))
    assert decode_g711(codes, "mu").astype("<i2").tobytes() == audioop.ulaw2lin(codes, 2)
    assert decode_g711(codes, "a").astype("<i2").tobytes() == audioop.alaw2lin(codes, 2)

"""Sound as the files and streams of each format."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.server.openai import codecs
from tests.server.conftest import read_file, read_open


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_pieces_join_as_base64(parts: list[bytes]) -> None:
    pieces = codecs.Pieces()
    cut = [pieces.feed(p) for p in parts] + [pieces.finish()]
    assert base64.b64decode("".join(base64.b64encode(p).decode() for p in cut)) == b"".join(parts)


@pytest.mark.parametrize("format", ["pcm", "wav", "flac", "mp3", "opus"])
@pytest.mark.parametrize("sizes", [[1365, 1920, 3840, 15360], [1] * 9, [24000]])
def test_streamed_files_can_be_read(format: str, sizes: list[int]) -> None:
    n = sum(sizes)
    samples = (9000 * np.sin(np.arange(n) * 0.07)).astype("<i2")
    encoder = codecs.streamed(format, 24_000)
    ends = np.cumsum(sizes)
    data = b"".join(
        encoder.feed(samples[e - s : e].tobytes()) for e, s in zip(ends, sizes, strict=True)
    )
    data += encoder.finish()
    if format == "pcm":
        assert data == samples.tobytes()
        return
    got, rate = (read_open if format == "flac" else read_file)(data)
    assert rate == 24_000
    if format in ("wav", "flac"):
        np.testing.assert_array_equal(got, samples)
    else:
        assert n <= len(got) + (1 if n < 100 else 0) <= n + 4 * 1152


def test_streamed_flac_is_whole_but_for_its_length() -> None:
    """A reader that wants a length, such as libsndfile, finds the rest in order once it is written
    in."""
    samples = (9000 * np.sin(np.arange(50_000) * 0.07)).astype("<i2")
    encoder = codecs.streamed("flac", 24_000)
    data = bytearray(encoder.feed(samples.tobytes()) + encoder.finish())
    length = int.from_bytes(data[21:26], "big")  # the last 36 bits, in the header of the stream
    assert length & ((1 << 36) - 1) == 0, "unknown"
    data[21:26] = (length | len(samples)).to_bytes(5, "big")
    np.testing.assert_array_equal(read_file(bytes(data))[0], samples)


def test_a_whole_flac_file_says_how_long_it_is() -> None:
    samples = (9000 * np.sin(np.arange(50_000) * 0.07)).astype("<i2")
    np.testing.assert_array_equal(
        read_file(codecs.encode("flac", samples.tobytes(), 24_000))[0], samples
    )


@pytest.mark.parametrize("format", ["flac", "mp3", "opus"])
def test_compressed_sound_is_not_held_back(format: str) -> None:
    """After half a second of sound, some of it is on its way."""
    encoder = codecs.streamed(format, 24_000)
    start = len(encoder.feed(bytes(2 * 960)))
    rng = np.random.default_rng(0)
    later = [
        len(encoder.feed(rng.integers(-3000, 3000, 1920).astype("<i2").tobytes())) for _ in range(6)
    ]
    assert start >= 0
    assert sum(later) > 600


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_whole_files_of_nothing(format: str) -> None:
    assert codecs.encode(format, b"", 24_000)

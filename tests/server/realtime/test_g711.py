"""Both laws against the values of the standard."""

import numpy as np
import pytest

from stretto.server.realtime import g711

EVERY = np.arange(-32768, 32768).astype(np.int16)


def test_known_values() -> None:
    # Full scale, silence and the smallest steps, as ITU-T G.711 and every telephone have them.
    assert g711.decode(bytes([0x00, 0x80, 0xFF, 0x7F, 0xFE]), "mu").tolist() == [
        -32124,
        32124,
        0,
        0,
        8,
    ]
    assert g711.decode(bytes([0x2A, 0xAA, 0xD5, 0x55, 0xD4]), "a").tolist() == [
        -32256,
        32256,
        8,
        -8,
        24,
    ]
    assert g711.encode(np.array([0, 32767, -32768, 8], np.int16), "mu") == bytes(
        [0xFF, 0x80, 0x00, 0xFE]
    )
    assert g711.encode(np.array([0, 32767, -32768, -1], np.int16), "a") == bytes(
        [0xD5, 0xAA, 0x2A, 0x55]
    )


@pytest.mark.parametrize("law", ["mu", "a"])
def test_every_code_comes_back(law: g711.Law) -> None:
    codes = bytes(range(256))
    samples = g711.decode(codes, law)
    again = g711.decode(g711.encode(samples, law), law)
    assert np.array_equal(samples, again)  # μ-law has two zeros


@pytest.mark.parametrize("law", ["mu", "a"])
def test_the_nearest_code_within_a_step(law: g711.Law) -> None:
    back = g711.decode(g711.encode(EVERY, law), law).astype(int)
    size = np.abs(EVERY.astype(int))
    step = np.maximum(16, size // 16)  # sixteen steps to each octave
    assert (np.abs(back - EVERY) <= np.maximum(step, size - 32124)).all()
    assert (np.diff(back) >= 0).all()


def test_against_the_standard_library() -> None:
    audioop = pytest.importorskip("audioop", reason="gone from Python 3.13 on")
    data = EVERY.astype("<i2").tobytes()
    assert g711.encode(EVERY, "mu") == audioop.lin2ulaw(data, 2)
    assert g711.encode(EVERY, "a") == audioop.lin2alaw(data, 2)
    codes = bytes(range(256))
    assert g711.decode(codes, "mu").astype("<i2").tobytes() == audioop.ulaw2lin(codes, 2)
    assert g711.decode(codes, "a").astype("<i2").tobytes() == audioop.alaw2lin(codes, 2)

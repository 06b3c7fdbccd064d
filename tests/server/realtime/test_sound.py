"""Sound in and out: no sample is lost or made up, wherever the pieces are cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import Invalid
from stretto.server.realtime.sound import RATES, SoundIn, SoundOut, check_rate, convert
from tests.server.realtime.sounds import pcm, speech


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    law=st.sampled_from(sorted(RATES)),
)
def test_as_many_samples_as_went_in(sizes: list[int], law: str) -> None:
    sound = SoundIn(law)  # type: ignore[arg-type]
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
    sound, parts, at = SoundIn("audio/pcm"), [], 0
    for size in (1, 3, 961, 2, 0, 4801, 10**6):  # halves of samples too
        parts.append(sound.feed(data[at : at + size]))
        at += size
    parts.append(sound.flush())
    assert np.allclose(np.concatenate(parts), convert(data, "audio/pcm"), atol=1e-6)


def test_a_voice_is_still_that_voice() -> None:
    voice = speech(1.0)
    back = convert(pcm(voice), "audio/pcm")
    assert np.corrcoef(voice, back)[0, 1] > 0.98


@pytest.mark.parametrize("format", sorted(RATES))
def test_out_has_the_format_s_length(format: str) -> None:
    out = SoundOut(format, 24_000)  # type: ignore[arg-type]
    data = b"".join(
        [out.feed(np.zeros(1365, np.float32)), out.feed(np.zeros(1920, np.float32)), out.flush()]
    )
    width = 2 if format == "audio/pcm" else 1
    assert len(data) == round(3285 * RATES[format] / 24_000) * width


def test_pcm_out_is_the_samples_themselves() -> None:
    samples = np.array([0.0, 0.5, -1.0, 2.0], np.float32)
    assert np.frombuffer(SoundOut("audio/pcm", 24_000).feed(samples), "<i2").tolist() == [
        0,
        16384,
        -32767,
        32767,
    ]


def test_another_rate_is_refused() -> None:
    check_rate("audio/pcm", None, "x")
    with pytest.raises(Invalid, match="24000"):
        check_rate("audio/pcm", 16_000, "x")

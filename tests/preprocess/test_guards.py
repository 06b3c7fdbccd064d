"""Decoders keep to what they were given, and to what it may cost. Each guard has a file here that
it alone stops."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from stretto.errors import MediaError
from stretto.preprocess import audio, video
from stretto.preprocess.audio import decode_audio, decode_pcm16
from stretto.preprocess.media import (
    COST_PER_FRAME_BYTE,
    COST_PER_KEPT_PIXEL,
    COST_PER_PICTURE_PIXEL,
    Budget,
    MediaLimits,
    Mixer,
    decode_image,
)
from stretto.preprocess.video import decode_sound, decode_video
from tests.preprocess.samples import (
    image_file,
    picture,
    shifting_video,
    silence_file,
    sound_file,
    tone,
    video_file,
)


def same_size(height: int, width: int, frames: int) -> tuple[int, int]:
    return height, width


def decode(data: bytes, **limits: Any) -> list[Image.Image]:
    return decode_video(data, Budget(MediaLimits(**limits)), same_size).frames


# Other files and hosts


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with real videos, and this process in it."""
    (tmp_path / "a.ts").write_bytes(video_file(format="mpegts"))
    (tmp_path / "a.mp4").write_bytes(video_file())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def concat(*names: str) -> bytes:
    return "".join(["ffconcat version 1.0\n", *(f"file '{n}'\n" for n in names)]).encode()


def hls(name: str) -> bytes:
    head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:3\n#EXT-X-MEDIA-SEQUENCE:0\n"
    return f"{head}#EXTINF:2.0,\n{name}\n#EXT-X-ENDLIST\n".encode()


def dash(name: str) -> bytes:
    head = (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'minBufferTime="PT1S" '
    )
    head += (
        'mediaPresentationDuration="PT2S" '
        'profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period>'
    )
    track = (
        '<AdaptationSet mimeType="video/mp4"><Representation id="1" bandwidth="1000" width="96" '
        'height="64">'
    )
    return f"{head}{track}<BaseURL>{name}</BaseURL></Representation></AdaptationSet></Period></MPD>".encode()  # noqa: E501


def names(folder: Path) -> list[str]:
    ts = folder / "a.ts"
    return [
        "a.ts",
        "a.mp4",
        str(ts),
        ts.as_uri(),
        f"file:{ts}",
        f"concat:{ts}|{ts}",
        f"subfile,,start,0,end,0,,:{ts}",
        "data:video/mp2t;base64," + base64.b64encode(ts.read_bytes()).decode(),
        "http://127.0.0.1:9/a.ts",
        "tcp://127.0.0.1:9",
    ]


@pytest.mark.parametrize("script", [concat, hls, dash])
def test_files_that_name_others(script: Any, beside: Path) -> None:
    for name in names(beside):
        for decoder in (decode, lambda data: decode_sound(data, Budget(MediaLimits()))):
            with pytest.raises(MediaError, match="cannot be decoded"):
                decoder(script(name))
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode(
            b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP "
            b"96\n"
        )


def test_a_script_is_read_without_the_guards(beside: Path) -> None:
    """What the tests here are about does work: FFmpeg follows a relative name, from wherever the
    process is."""
    with av.open(io.BytesIO(concat("a.mp4"))) as container:
        assert container.format.name == "concat"
        assert sum(1 for _ in container.decode(video=0)) == 20


def test_no_protocol_even_for_a_format_that_names_files(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No format on the list opens other files. Should one come to be on it, nothing can be
    opened."""
    monkeypatch.setattr(video, "FORMATS", video.FORMATS + ",concat")
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode(concat("a.mp4"))


def test_formats_off_the_list() -> None:
    """A whole, harmless video in a container that we did not choose."""
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode(video_file(format="nut"))


@pytest.mark.parametrize(
    ("codec", "format"), [("ffv1", "matroska"), ("rawvideo", "avi"), ("jpeg2000", "matroska")]
)
def test_decoders_off_the_list(codec: str, format: str) -> None:
    with pytest.raises(MediaError, match=f"{codec} is not supported"):
        decode(video_file(codec=codec, format=format))


def test_audio_decoders_off_the_list() -> None:
    data = sound_file(tone(0.5), format="AIFF", subtype="IMA_ADPCM")
    with pytest.raises(MediaError, match="adpcm_ima_qt is not supported"):
        decode_audio(data, Budget(MediaLimits()))


def test_opening_a_file_uses_no_other_decoders() -> None:
    """Only its decoder could tell the colours of ffv1."""
    with video.open_container(
        video_file(codec="ffv1", format="matroska"), Budget(MediaLimits()), "video"
    ) as (_, container):
        assert container.streams.video[0].codec_context.pix_fmt is None


@pytest.mark.parametrize("format", ["TIFF", "PPM", "TGA", "ICO"])
def test_picture_formats_off_the_list(format: str) -> None:
    data = image_file(picture(64, 64), format)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (64, 64)
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_image(data, Budget(MediaLimits()))


# Headers that lie


def test_frames_as_large_as_the_header_says() -> None:
    data = video_file(codec="mpeg2video", format="matroska")
    decode(data, image_pixels=2 * 96 * 64)  # the decoder counts the borders that it adds
    with pytest.raises(MediaError, match="96x64 pixels are too many"):
        decode(data, image_pixels=96 * 64 - 1)


def test_larger_frames_than_the_header_says() -> None:
    """One large frame that is not even shown: the decoder refuses it before it allocates it."""
    data = shifting_video((64, 3), (256, 2), (64, 5))
    assert {f.size for f in decode(data)} == {(64, 64)}
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode(data, image_pixels=64 * 64)


def test_opening_a_file_decodes_no_larger_frame() -> None:
    limits = MediaLimits(image_pixels=64 * 64)
    with video.open_container(shifting_video((256, 10)), Budget(limits), "video") as (_, container):
        assert container.streams.video[0].codec_context.pix_fmt is None
    with pytest.raises(MediaError, match="over 4,096 pixels"):
        decode(shifting_video((256, 10)), image_pixels=64 * 64)


def cost(side: int, decoded: int, kept: int) -> float:
    """Of square frames in 4:2:0."""
    return side * side * (1.5 * decoded * COST_PER_FRAME_BYTE + kept * COST_PER_KEPT_PIXEL)


def test_frames_that_cost_more_than_the_header_says() -> None:
    data = shifting_video(
        (64, 3), (256, 2), (64, 5)
    )  # the third that comes out is large; 0 and 5 are kept
    allowed = cost(64, 5, 2) + cost(256, 1, 0)
    assert len(decode(data, decode_seconds=1.001 * allowed)) == 2
    with pytest.raises(MediaError, match="too large"):
        decode(data, decode_seconds=0.999 * allowed)


def test_kept_frames_that_cost_more_than_the_header_says() -> None:
    data = shifting_video((64, 6), (256, 2), (64, 2))
    allowed = cost(64, 5, 1) + cost(256, 1, 1)
    assert len(decode(data, decode_seconds=1.001 * allowed)) == 2
    with pytest.raises(MediaError, match="too large"):
        decode(data, decode_seconds=0.999 * allowed)


# What it costs


def test_costly_videos_are_refused_before_they_are_decoded() -> None:
    data = shifting_video((64, 10))  # 0 and 5 are kept, 6 to 9 not decoded
    allowed = cost(64, 6, 2)
    assert len(decode(data, decode_seconds=1.001 * allowed)) == 2
    budget = Budget(MediaLimits(decode_seconds=0.999 * allowed))
    with pytest.raises(MediaError, match="too large"):
        decode_video(data, budget, same_size)
    assert budget.decode_seconds == 0.0


def test_a_small_file_of_large_frames() -> None:
    """A thousand of them were minutes of work in a small file; eight stand for six hundred here."""
    data = video_file(8, 1, (2048, 2048))
    assert len(data) < 8 * 2048 * 2048 / 50
    with pytest.raises(MediaError, match="too large"):
        decode(data, decode_seconds=MediaLimits().decode_seconds * 8 / 600)


def test_pictures_cost_by_their_pixels() -> None:
    allowed = 100 * 80 * COST_PER_PICTURE_PIXEL
    decode_image(image_file(picture(100, 80)), Budget(MediaLimits(decode_seconds=1.001 * allowed)))
    with pytest.raises(MediaError, match="too large"):
        decode_image(
            image_file(picture(100, 80)), Budget(MediaLimits(decode_seconds=0.999 * allowed))
        )
    with pytest.raises(MediaError, match="at most 7,999"):
        decode_image(image_file(picture(100, 80)), Budget(MediaLimits(image_pixels=7_999)))


def test_one_budget_for_all() -> None:
    """Pictures, videos and their frames draw on the same; sound on its own."""
    budget = Budget(MediaLimits(decode_seconds=10.0, audio_seconds=3.0))
    decode_image(image_file(picture(100, 80)), budget)
    decode_video(shifting_video((64, 10)), budget, same_size)
    assert budget.decode_seconds == pytest.approx(8_000 * COST_PER_PICTURE_PIXEL + cost(64, 6, 2))
    decode_audio(sound_file(tone(1.0)), budget)
    decode_sound(sound_file(tone(1.0), format="AIFF", subtype="PCM_16"), budget)
    decode_pcm16(bytes(48_000), budget)
    assert (budget.audio_seconds, budget.audio_values) == (
        pytest.approx(3.0),
        16_000 + 16_000 + 24_000,
    )
    with pytest.raises(MediaError, match=r"over 3 s in the request"):
        decode_audio(sound_file(tone(0.1)), budget)


# Sound that packs well


@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3"])
def test_packed_silence(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = silence_file(30, format)
    assert len(data) < 30 * 48_000 * 4 / 45  # an hour fits into a few hundred kB to a few MB
    assert len(decode_audio(data, Budget(MediaLimits(audio_seconds=31)))) >= 30 * 16_000
    monkeypatch.setattr(Mixer, "add", lambda *_: pytest.fail("decoded"))
    with pytest.raises(MediaError, match="too long: over 29 s"):
        decode_audio(data, Budget(MediaLimits(audio_seconds=29)))
    with pytest.raises(MediaError, match="too large: over 2,800,000 sample values"):
        decode_audio(data, Budget(MediaLimits(audio_values=2_800_000)))


@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3"])
def test_packed_silence_is_counted_as_it_is_decoded(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the header had stated no length: decoding ends where the limit is, not where the file
    does."""
    monkeypatch.setattr(audio, "_UNKNOWN", 0)
    data = silence_file(30, format)
    for limits in (MediaLimits(audio_seconds=5), MediaLimits(audio_values=5 * 96_000)):
        budget = Budget(limits)
        with pytest.raises(MediaError, match=r"too (long|large)"):
            decode_audio(data, budget)
        assert budget.audio_seconds <= 5


def test_channels() -> None:
    many = sound_file(np.zeros((500, 5), np.float32))
    decode_audio(many, Budget(MediaLimits(audio_channels=5)))
    with pytest.raises(MediaError, match="5 channels"):
        decode_audio(many, Budget(MediaLimits(audio_channels=4)))


# One file, or all of them


def test_size_of_a_file() -> None:
    for decoder, data in (
        (decode_audio, sound_file(tone(0.5))),
        (decode_pcm16, bytes(16_000)),
        (decode_image, image_file(picture())),
        (lambda d, b: decode_video(d, b, same_size), video_file()),
    ):
        decoder(data, Budget(MediaLimits(file_bytes=len(data))))
        with pytest.raises(MediaError, match="too large"):
            decoder(data, Budget(MediaLimits(file_bytes=len(data) - 1)))


def test_frames_of_all_videos() -> None:
    budget = Budget(MediaLimits(video_input_frames=39))
    decode_video(video_file(20), budget, same_size)
    with pytest.raises(MediaError, match="over 39 in the request"):
        decode_video(video_file(20), budget, same_size)


def test_seconds_of_a_video() -> None:
    decode(video_file(20, 10), video_seconds=2.0)
    with pytest.raises(MediaError, match=r"at most 1\.9 s"):
        decode(video_file(20, 10), video_seconds=1.9)

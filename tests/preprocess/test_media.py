"""Decoding: formats, limits, and bytes that are not what they claim to be."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from functools import cache

import av
import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stretto.errors import MediaError
from stretto.preprocess.audio import decode_audio, decode_pcm16, mix
from stretto.preprocess.media import (
    MAX_SCANS,
    Budget,
    MediaLimits,
    decode_image,
    image_from_array,
    jpeg_scans,
    open_image,
)
from stretto.preprocess.video import decode_sound, decode_video
from tests.preprocess.samples import FIXED, image_file, picture, sound_file, tone, video_file

LIMITS = MediaLimits()
SMALL = MediaLimits(
    file_bytes=1 << 20,
    audio_seconds=20,
    image_pixels=100_000,
    video_seconds=20,
    video_input_frames=200,
)


def same_size(height: int, width: int, frames: int) -> tuple[int, int]:
    return height, width


# Audio


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "PCM_U8"])
def test_wav_at_16_khz_is_untouched(subtype: str) -> None:
    samples = tone(0.5)
    ours = decode_audio(sound_file(samples, subtype=subtype), Budget(LIMITS))
    assert ours.dtype == np.float32
    assert len(ours) == len(samples)
    assert (
        np.abs(ours - samples).max()
        <= {"PCM_16": 4e-5, "PCM_24": 2e-7, "FLOAT": 0, "PCM_U8": 1e-2}[subtype]
    )


@pytest.mark.parametrize("rate", [8_000, 22_050, 24_000, 44_100, 48_000])
def test_resampled_like_soxr_hq(rate: int) -> None:
    samples = tone(6.0, rate)  # several blocks
    ours = decode_audio(sound_file(samples, rate, subtype="FLOAT"), Budget(LIMITS))
    assert np.array_equal(ours, soxr.resample(samples, rate, 16_000, quality="HQ"))


def test_channels_are_averaged() -> None:
    left, right = tone(0.3, hz=300), tone(0.3, hz=700)
    ours = decode_audio(sound_file(np.stack([left, right], 1), subtype="FLOAT"), Budget(LIMITS))
    assert np.allclose(ours, (left + right) / 2, atol=1e-7)


@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3"])
def test_compressed(format: str) -> None:
    samples = tone(1.0, 24_000)
    ours = decode_audio(sound_file(samples, 24_000, format), Budget(LIMITS))
    assert abs(len(ours) - 16_000) < 1_600
    spectrum = np.abs(np.fft.rfft(ours[4_000:12_000]))
    assert spectrum.argmax() * 2 == pytest.approx(440, abs=3)


@pytest.mark.parametrize("format", ["AIFF", "AU"])
def test_rarer_formats_through_pyav(format: str) -> None:
    samples = tone(0.5)
    ours = decode_audio(sound_file(samples, format=format, subtype="PCM_16"), Budget(LIMITS))
    assert np.abs(ours - samples).max() < 4e-5


def test_pcm16() -> None:
    raw = (tone(0.5, 24_000) * 32767).astype("<i2")
    expected = soxr.resample(
        raw.astype(np.float32) / np.float32(32768), 24_000, 16_000, quality="HQ"
    )
    assert np.array_equal(decode_pcm16(raw.tobytes(), Budget(LIMITS)), expected)
    assert np.array_equal(
        decode_pcm16(raw.tobytes(), Budget(LIMITS), 16_000),
        raw.astype(np.float32) / np.float32(32768),
    )
    with pytest.raises(MediaError, match="two bytes"):
        decode_pcm16(raw.tobytes()[:-1], Budget(LIMITS))
    with pytest.raises(MediaError, match="24000 or 16000"):
        decode_pcm16(raw.tobytes(), Budget(LIMITS), 8_000)


def test_arrays() -> None:
    samples = tone(0.1)
    assert np.array_equal(mix(samples, 16_000, Budget(LIMITS)), samples)
    assert np.array_equal(mix(samples.astype(np.float64), 16_000, Budget(LIMITS)), samples)
    assert np.array_equal(mix(np.stack([samples, samples], 1), 16_000, Budget(LIMITS)), samples)
    for bad in (samples.astype(np.int64), samples.reshape(1, 2, -1), np.array(["a"] * 500)):
        with pytest.raises(MediaError):
            mix(bad, 16_000, Budget(LIMITS))


@pytest.mark.parametrize(
    ("data", "limits", "message"),
    [
        (b"", LIMITS, "empty"),
        (sound_file(tone(1.0)), MediaLimits(file_bytes=1_000), "too large"),
        (sound_file(tone(1.0)), MediaLimits(audio_seconds=0.9), "too long"),
        (sound_file(tone(1.0)), MediaLimits(audio_values=15_999), "too large"),
        (sound_file(np.zeros((500, 9), np.float32)), LIMITS, "9 channels"),
        (sound_file(tone(0.0125)), LIMITS, "too short"),
        (sound_file(np.zeros(0, np.float32)), LIMITS, "too short"),
        (sound_file(np.full(500, np.nan, np.float32), subtype="FLOAT"), LIMITS, "finite"),
        (sound_file(np.full(500, np.inf, np.float32), subtype="FLOAT"), LIMITS, "finite"),
        (sound_file(tone(1.0), 500), LIMITS, "500 Hz"),
        (b"RIFF\x00\x00\x00\x00WAVE", LIMITS, "cannot be decoded"),
        (b"fLaC" + bytes(100), LIMITS, "cannot be decoded"),
        (b"hello, this is no sound", LIMITS, "cannot be decoded"),
        (image_file(picture()), LIMITS, "cannot be decoded"),
    ],
)
def test_bad_audio(data: bytes, limits: MediaLimits, message: str) -> None:
    with pytest.raises(MediaError, match=message) as e:
        decode_audio(data, Budget(limits))
    assert "object at" not in str(e.value), "addresses do not belong into messages"


def test_wav_of_unstated_length() -> None:
    """A wav written to a pipe states the largest length there is."""
    samples = tone(0.5)
    data = bytearray(sound_file(samples))
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"
    assert len(decode_audio(bytes(data), Budget(LIMITS))) == len(samples)


def test_flac_that_lies_about_its_length() -> None:
    """The header's sample count is not what is allocated."""
    data = bytearray(sound_file(np.zeros(400_000, np.float32), format="FLAC"))
    head = int.from_bytes(data[18:26], "big")
    data[18:26] = (head & ~((1 << 36) - 1) | 1_000).to_bytes(8, "big")
    with pytest.raises(MediaError):  # refused for either reason: too long, or not what it says
        decode_audio(bytes(data), Budget(MediaLimits(audio_seconds=0.05)))
    data[18:26] = (head | (1 << 36) - 1).to_bytes(8, "big")
    with pytest.raises(MediaError, match="too long"):
        decode_audio(bytes(data), Budget(LIMITS))


# Images


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_lossless_images(format: str) -> None:
    image = picture()
    ours = decode_image(image_file(image, format, lossless=True), Budget(LIMITS))
    assert np.array_equal(np.asarray(ours), np.asarray(image))


@pytest.mark.parametrize("format", ["JPEG", "GIF"])
def test_lossy_images(format: str) -> None:
    image = picture()
    ours = decode_image(image_file(image, format), Budget(LIMITS))
    assert ours.mode == "RGB"
    assert np.abs(np.asarray(ours).astype(int) - np.asarray(image)).mean() < 12


@pytest.mark.parametrize(
    ("mode", "colour"),
    [("RGBA", (255, 0, 0, 0)), ("LA", (0, 0)), ("RGBA", (0, 0, 0, 0))],
    ids=["red", "grey", "black"],
)
def test_transparent_is_white(mode: str, colour: tuple[int, ...]) -> None:
    ours = decode_image(image_file(Image.new(mode, (40, 40), colour)), Budget(LIMITS))
    assert ours.getpixel((3, 3)) == (255, 255, 255)


def test_palette_with_transparency() -> None:
    image = Image.new("P", (40, 40), 1)
    image.putpalette([0, 0, 0, 200, 10, 10])
    assert decode_image(image_file(image, transparency=1), Budget(LIMITS)).getpixel((0, 0)) == (
        255,
        255,
        255,
    )
    assert decode_image(image_file(image), Budget(LIMITS)).getpixel((0, 0)) == (200, 10, 10)


@pytest.mark.parametrize("mode", ["L", "1", "CMYK"])
def test_other_modes(mode: str) -> None:
    image = picture().convert(mode)
    assert (
        decode_image(image_file(image, "JPEG" if mode == "CMYK" else "PNG"), Budget(LIMITS)).mode
        == "RGB"
    )


def test_16_bit_greys_are_scaled() -> None:
    greys = np.array([[0, 256 * 128], [256 * 200, 65_535]], np.uint16)
    ours = np.asarray(decode_image(image_file(Image.fromarray(greys)), Budget(LIMITS)))
    assert ours[:, :, 0].tolist() == [[0, 128], [200, 255]]


def test_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    ours = decode_image(image_file(picture(80, 60), "JPEG", exif=exif), Budget(LIMITS))
    assert ours.size == (60, 80)


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (
        struct.pack(">I", 13)
        + body
        + struct.pack(">I", zlib.crc32(body))
        + struct.pack(">I", 1 << 20)
        + b"IDAT"
    )
    return b"\x89PNG\r\n\x1a\n" + chunks + bytes(50)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"not an image at all", "cannot be decoded"),
        (png_header(9_000, 8_000), "too many"),
        (png_header(60_000, 60_000), "cannot be decoded|too many"),
        (image_file(picture(200, 200))[:300], "cannot be decoded"),
        (sound_file(tone(0.1)), "cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "cannot be decoded"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bad_images(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message) as e:
        decode_image(data, Budget(LIMITS))
    assert "object at" not in str(e.value)


def test_image_arrays() -> None:
    pixels = np.asarray(picture())
    assert np.array_equal(np.asarray(image_from_array(pixels, LIMITS)), pixels)
    for bad in (pixels[:, :, 0], pixels.astype(np.float32), pixels[:0]):
        with pytest.raises(MediaError):
            image_from_array(bad, LIMITS)


# Videos


def brightness(frames: list[Image.Image]) -> list[int]:
    """The indexes of `video_file`'s frames."""
    return [round(float(np.asarray(f).mean()) / 10) for f in frames]


@pytest.mark.parametrize(
    ("num_frames", "fps", "shown"),
    [
        (20, 10, [0, 5, 10, 15]),
        (21, 10, [0, 5, 10, 15, 20, 20]),
        (24, 10, [0, 5, 10, 15, 20, 23]),
        (1, 10, [0, 0]),
        (2, 1, [0, 0, 1, 1]),
    ],
)
def test_sampled_at_two_a_second(num_frames: int, fps: int, shown: list[int]) -> None:
    ours = decode_video(video_file(num_frames, fps), Budget(LIMITS), same_size)
    assert brightness(ours.frames) == shown
    assert ours.fps == 2.0
    assert ours.sound is None


@pytest.mark.parametrize("format", ["avi", "matroska", "mov", "mpegts"])
def test_containers(format: str) -> None:
    assert brightness(
        decode_video(video_file(20, 10, format=format), Budget(LIMITS), same_size).frames
    ) == [
        0,
        5,
        10,
        15,
    ]


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9"])
def test_codecs(codec: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV was built without {codec}")
    data = video_file(20, 10, format="matroska", codec=codec)
    assert brightness(decode_video(data, Budget(LIMITS), same_size).frames) == [0, 5, 10, 15]


def test_videos_of_a_turned_camera() -> None:
    """A phone held upright: the file says to turn the frames by 90 degrees clockwise."""
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    head, tail = video_file(2, 10, (96, 64), left_black=True).rsplit(upright, 1)
    frame = np.asarray(decode_video(head + turned + tail, Budget(LIMITS), same_size).frames[0])
    assert frame.shape == (96, 64, 3)
    assert frame[:40].mean() < 10
    assert frame[56:].mean() > 240


def test_long_videos_are_sampled_thinly() -> None:
    ours = decode_video(video_file(24, 10), Budget(MediaLimits(video_frames=5)), same_size)
    assert brightness(ours.frames) == [0, 6, 12, 18]
    assert ours.fps == pytest.approx(4 / 2.4)


def test_frames_are_resized_as_told() -> None:
    asked = []

    def fit(height: int, width: int, frames: int) -> tuple[int, int]:
        asked.append((height, width, frames))
        return 32, 64

    ours = decode_video(video_file(20, 10, (96, 64)), Budget(LIMITS), fit)
    assert asked == [(64, 96, 4)]
    assert {f.size for f in ours.frames} == {(64, 32)}


def test_sound_track() -> None:
    ours = decode_video(video_file(sound_seconds=1.5), Budget(LIMITS), same_size, sound=True)
    assert ours.sound is not None
    assert 24_000 <= len(ours.sound) < 26_000
    assert np.abs(np.fft.rfft(ours.sound[4_000:12_000])).argmax() * 2 == pytest.approx(440, abs=3)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(file_bytes=100), "too large"),
        (MediaLimits(image_pixels=96 * 64 - 1), "over 6,143 pixels"),
        (MediaLimits(video_seconds=1.9), "lasts 2.0 s"),
        (MediaLimits(video_input_frames=19), "too many frames"),
        (MediaLimits(audio_seconds=1.0), "too long"),
    ],
)
def test_video_limits(limits: MediaLimits, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        decode_video(video_file(sound_seconds=1.5), Budget(limits), same_size, sound=True)


def test_bad_videos() -> None:
    whole = video_file()
    playlist = (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://localhost/a.ts\n#EXT-X-ENDLIST\n"
    )
    for bad in (
        b"",
        b"no video",
        whole[:500],
        playlist,
        b"ffconcat version 1.0\nfile /etc/hostname\n",
    ):
        with pytest.raises(MediaError):
            decode_video(bad, Budget(LIMITS), same_size)
    with pytest.raises(MediaError, match="no video stream"):
        decode_video(sound_file(tone(0.5)), Budget(LIMITS), same_size)
    with pytest.raises(MediaError, match="no audio stream"):
        decode_video(whole, Budget(LIMITS), same_size, sound=True)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match=r"stretto\[video\]"):
        decode_video(b"anything", Budget(LIMITS), same_size)
    with pytest.raises(MediaError, match=r"stretto\[video\]"):
        decode_audio(b"anything", Budget(LIMITS))


# Bytes that are not what they claim to be


@cache
def originals() -> tuple[bytes, ...]:
    files = [sound_file(tone(0.1), format=f) for f in ("WAV", "FLAC", "OGG", "MP3", "AIFF")]
    files += [image_file(picture(30, 20), f) for f in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    return (
        *files,
        video_file(6, 10, (32, 32), 0.2),
        video_file(6, 10, (32, 32), format="matroska"),
    )


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(originals())))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, min(len(data) - 1, draw(st.sampled_from([64, 1 << 20])))))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data[: draw(st.integers(1, len(data)))] if draw(st.booleans()) else data)


def decode_any(data: bytes) -> None:
    """Each decoder gives something sane or a MediaError; anything else fails the test."""
    for decoder in (decode_audio, decode_sound):
        try:
            samples = decoder(data, Budget(SMALL))
        except MediaError as e:
            assert str(e)  # noqa: PT017
        else:
            assert 200 < len(samples) <= 16_000 * SMALL.audio_seconds + 1
            assert np.isfinite(samples).all()
    try:
        image = decode_image(data, Budget(SMALL))
    except MediaError as e:
        assert str(e)  # noqa: PT017
    else:
        assert image.mode == "RGB"
        assert image.width * image.height <= SMALL.image_pixels
    try:
        clip = decode_video(data, Budget(SMALL), same_size)
    except MediaError as e:
        assert str(e)  # noqa: PT017
    else:
        assert len(clip.frames) % 2 == 0
        assert clip.fps > 0


@settings(FIXED, max_examples=150)
@given(mutated())
@pytest.mark.filterwarnings("ignore")
def test_mutated_files(data: bytes) -> None:
    decode_any(data)


MAGIC = [
    b"",
    b"RIFF\xff\xff\xff\xffWAVEfmt ",
    b"fLaC",
    b"OggS",
    b"ID3\x04",
    b"\xff\xfb\x90",
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
]
MAGIC += [
    b"GIF89a",
    b"BM",
    b"RIFF\xff\xff\xff\xffWEBPVP8 ",
    b"\x00\x00\x00\x18ftypmp42",
    b"\x1a\x45\xdf\xa3",
    b"FORM",
]


@settings(FIXED, max_examples=100)
@given(st.sampled_from(MAGIC), st.binary(max_size=300))
@pytest.mark.filterwarnings("ignore")
def test_random_bytes(magic: bytes, data: bytes) -> None:
    decode_any(magic + data)


def test_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import pkgutil, sys, stretto.preprocess as p\n"
        "for m in pkgutil.walk_packages(p.__path__, 'stretto.preprocess.'): __import__(m.name)\n"
        "bad = {'torch', 'transformers', 'av'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def jpeg(side: int, scans: int = 0, thumbnail: bytes = b"") -> bytes:
    """A progressive file, its last scan so many times more; `thumbnail` stands in its first
    segment."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x927C] = thumbnail
    Image.new("RGB", (side, side), (9, 99, 200)).save(
        file, "JPEG", progressive=True, exif=exif.tobytes()
    )
    data = file.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + data[-2:]


def test_scans_of_a_jpeg_are_counted() -> None:
    """Each is a way over the whole picture, and may be ten bytes long."""
    plain, thumbnail = jpeg(64), jpeg(8)
    assert jpeg_scans(plain) == 10
    assert jpeg_scans(jpeg(64, 30, thumbnail)) == 40  # the thumbnail's own do not count
    assert jpeg_scans(plain + plain) == 10  # nor what stands behind the picture
    assert jpeg_scans(plain[:300]) <= 10
    assert decode_image(jpeg(64, MAX_SCANS - 10), Budget(LIMITS)).size == (64, 64)
    with pytest.raises(MediaError, match="scans"):
        decode_image(jpeg(64, MAX_SCANS - 9), Budget(LIMITS))
    costs = []
    for scans in (0, 40, 200):
        budget = Budget(LIMITS)
        open_image(jpeg(512, scans), budget)
        costs.append(budget.decode_seconds)
    assert costs[1] > costs[0]
    assert costs[2] == pytest.approx(4.2 * costs[1])
    with pytest.raises(MediaError, match="too large"):
        decode_image(jpeg(512, 200), Budget(MediaLimits(decode_seconds=2 * costs[1])))

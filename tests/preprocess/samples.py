"""Media files made in memory for the prompt tests."""

from __future__ import annotations

import base64
import io
from fractions import Fraction

import numpy as np
import soundfile
from hypothesis import HealthCheck, settings
from PIL import Image

# The same examples in every run, and no example database left behind.
FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def tone(seconds: float, rate: int = 16_000, hz: float = 440.0) -> np.ndarray:
    t = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * hz * t)).astype(np.float32)


def sound_file(
    samples: np.ndarray, rate: int = 16_000, format: str = "WAV", subtype: str | None = None
) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=format, subtype=subtype)
    return out.getvalue()


def picture(width: int = 80, height: int = 60, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height))


def image_file(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def grey_frame(index: int, width: int, height: int) -> np.ndarray:
    """A frame whose brightness tells its index (0..25)."""
    return np.full((height, width, 3), 10 * index, np.uint8)


def video_file(
    num_frames: int = 20,
    fps: int = 10,
    size: tuple[int, int] = (96, 64),
    sound_seconds: float | None = None,
    format: str = "mp4",
    codec: str = "mpeg4",
    left_black: bool = False,
) -> bytes:
    """Frames of growing brightness (or white with a black left half), and a tone."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        screen = container.add_stream(codec, rate=fps)
        screen.max_b_frames = 2
        screen.width, screen.height, screen.pix_fmt = *size, "yuv420p"
        audio = container.add_stream("aac", rate=24_000) if sound_seconds else None
        for i in range(num_frames):
            pixels = grey_frame(25 if left_black else i % 25, *size)
            if left_black:
                pixels[:, : size[0] // 2] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, fps)
            container.mux(screen.encode(frame))
        container.mux(screen.encode())
        if audio is not None and sound_seconds is not None:
            block = av.AudioFrame.from_ndarray(
                tone(sound_seconds, 24_000)[None], format="fltp", layout="mono"
            )
            block.sample_rate = 24_000
            container.mux(audio.encode(block))
            container.mux(audio.encode())
    return out.getvalue()


def shifting_video(*runs: tuple[int, int]) -> bytes:
    """Square frames, ten a second: runs of (side, how many), all in one stream whose header states
    the first size.

    FFmpeg's decoder drops the last frame before each change."""
    import av

    out, index = io.BytesIO(), 0
    with av.open(out, "w", format="mpegts") as container:
        stream = container.add_stream("mpeg2video", rate=25)
        stream.width, stream.height, stream.pix_fmt = runs[0][0], runs[0][0], "yuv420p"
        for side, count in runs:
            encoder = av.CodecContext.create("mpeg2video", "w")
            encoder.width, encoder.height, encoder.pix_fmt = side, side, "yuv420p"
            encoder.framerate, encoder.time_base, encoder.gop_size = (
                Fraction(25),
                Fraction(1, 25),
                1,
            )
            grey = np.full((side, side, 3), 128, np.uint8)
            packets = []
            for i in range(count):
                frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
                frame.pts, frame.time_base = i, Fraction(1, 25)
                packets += encoder.encode(frame)
            for packet in [*packets, *encoder.encode()]:
                packet.stream, packet.time_base = stream, Fraction(1, 10)
                packet.pts = packet.dts = index
                index += 1
                container.mux(packet)
    return out.getvalue()


def silence_file(seconds: int, format: str, channels: int = 2) -> bytes:
    """Silence at 48 kHz, which packs well. Second by second: libsndfile overflows its stack on a
    long ogg at once."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 48_000, channels, format=format) as f:
        for _ in range(seconds):
            f.write(np.zeros((48_000, channels), np.float32))
    return out.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64(data)}"

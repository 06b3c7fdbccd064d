"""Videos and rarer audio formats, through PyAV: frames at a steady rate, and the sound track.

Called by `media.py` and the prompt builder. PyAV is an extra (`stretto[video]`), so it is imported when the first
such file arrives. The bytes are untrusted: only self-contained formats are opened (a playlist could name other
files or hosts), and sizes are bounded before frames are decoded."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from stretto.errors import MediaError
from stretto.prompt.media import MediaLimits, Mixer, check_bytes, check_pixels, decoding
from stretto.prompt.prompt import Array

SAMPLE_FPS = 2.0
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,aac,mp3,flac,wav,aiff,au,caf,amr"
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}

Fit = Callable[[int, int, int], tuple[int, int]]
"""(height, width, number of frames) -> (height, width) to keep the frames at."""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """RGB frames of one size, an even number of them, `fps` a second, and the sound at 16 kHz if asked for."""

    frames: list[Image.Image]
    fps: float
    sound: Array | None


def decode_video(data: bytes, limits: MediaLimits, fit: Fit, *, fps: float = SAMPLE_FPS, sound: bool = False) -> Video:
    """Sample a video at `fps`, more thinly if that would exceed the limits.

    Sample k shows what is on screen at k / fps, up to the last frame, which repeats if that makes the number even.
    Frames are resized as they are decoded, so that a long video of large frames is never held whole."""
    check_bytes(len(data), limits)
    times, duration = _schedule(data, limits)
    count = max(2, 2 * math.ceil(duration * fps / 2))
    most = max(2, limits.video_frames // 2 * 2)
    if count > most:
        count, fps = most, most / duration
    wanted = np.searchsorted(times, np.arange(count) / fps + 1e-6, side="right") - 1
    frames = _pick(data, wanted, limits, fit)
    return Video(frames, fps, decode_sound(data, limits, "the video's sound track") if sound else None)


def decode_sound(data: bytes, limits: MediaLimits, what: str = "audio") -> Array:
    """Mono samples at 16 kHz of a file's first audio stream."""
    with _opened(data, what) as (av, container):
        if not container.streams.audio:
            raise MediaError(f"{what} cannot be decoded: the file has no audio stream")
        stream = container.streams.audio[0]
        planes = av.AudioResampler(format="fltp")
        mixer: Mixer | None = None
        for frame in container.decode(stream):
            mixer = mixer or Mixer(frame.sample_rate, len(frame.layout.channels), limits)
            if (frame.sample_rate, len(frame.layout.channels)) != (mixer.rate, mixer.channels):
                raise MediaError(f"{what} changes its sample rate or channels half way")
            for plane in planes.resample(frame):
                mixer.add(plane.to_ndarray().T)
        if mixer is None:
            raise MediaError(f"{what} cannot be decoded: no sound in it")
        return mixer.finish()


@contextmanager
def _opened(data: bytes, what: str) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ImportError:
        raise MediaError(
            f"{what} cannot be decoded: this format needs PyAV, which is not installed; "
            "install it with `pip install 'stretto[video]'`"
        ) from None
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    with decoding(what, av.error.FFmpegError), av.open(io.BytesIO(data), options=options) as container:
        yield av, container


@contextmanager
def _screen(data: bytes, limits: MediaLimits) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    with _opened(data, "video") as (_, container):
        if not container.streams.video:
            raise MediaError("video cannot be decoded: the file has no video stream")
        stream = container.streams.video[0]
        # The decoder itself refuses larger frames, whatever the container's header says.
        stream.codec_context.options = {"max_pixels": str(limits.image_pixels)}
        yield container, stream


def _schedule(data: bytes, limits: MediaLimits) -> tuple[npt.NDArray[np.float64], float]:
    """When each frame appears, in seconds from the first, and how long all of them last. Decodes nothing."""
    times: list[float] = []
    last = 0.0
    with _screen(data, limits) as (container, stream):
        check_pixels(stream.codec_context.width, stream.codec_context.height, limits)
        rate = float(stream.average_rate or 25)
        for packet in container.demux(stream):
            if not packet.size:
                continue
            stamp = packet.pts if packet.pts is not None else packet.dts
            times.append(float(stamp * packet.time_base) if stamp is not None else len(times) / rate)
            last = float(packet.duration * packet.time_base) if packet.duration else 1.0 / rate
            if len(times) > limits.video_input_frames:
                raise MediaError(f"video has too many frames: over {limits.video_input_frames:,}")
    if not times:
        raise MediaError("video cannot be decoded: no frames in it")
    moments = np.sort(np.array(times)) - min(times)
    duration = float(moments[-1]) + last
    if not 0 < duration <= limits.video_seconds:
        raise MediaError(
            f"video lasts {duration:.1f} s; more than 0 and at most {limits.video_seconds:g} s are allowed"
        )
    return moments, duration


def _pick(data: bytes, wanted: npt.NDArray[np.int64], limits: MediaLimits, fit: Fit) -> list[Image.Image]:
    """The frames with these ascending indexes; one that is wanted twice comes twice."""
    frames: list[Image.Image] = []
    with _screen(data, limits) as (container, stream):
        size: tuple[int, int] | None = None
        shown: Image.Image | None = None
        for index, frame in enumerate(container.decode(stream)):
            if index < wanted[len(frames)]:
                continue
            check_pixels(frame.width, frame.height, limits)
            picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
            turn = _TURNS.get(round(frame.rotation) % 360)
            picture = picture if turn is None else picture.transpose(turn)
            if size is None:
                height, width = fit(picture.height, picture.width, len(wanted))
                size = (width, height)
            shown = picture.resize(size, Image.Resampling.BICUBIC)
            while len(frames) < len(wanted) and wanted[len(frames)] <= index:
                frames.append(shown)
            if len(frames) == len(wanted):
                return frames
    if not frames:
        raise MediaError("video cannot be decoded: no frames in it")
    # Some packets made no frame: the last one stays on screen.
    return frames + frames[-1:] * (len(wanted) - len(frames))

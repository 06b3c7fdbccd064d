"""Videos and rarer audio formats, through PyAV: frames at a steady rate, and the sound track.

Called by `audio.py` and the reader of messages. PyAV is an extra (`stretto[video]`), imported
when the first such file arrives. The bytes are untrusted: only self-contained formats are opened (a
playlist could name other files or hosts), with decoders whose speed is known, and sizes are bounded
before frames are decoded and again while they are."""

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
from stretto.preprocess.media import (
    COST_PER_FRAME_BYTE,
    COST_PER_KEPT_PIXEL,
    Budget,
    Mixer,
    check_bytes,
    check_pixels,
    decoding,
)
from stretto.preprocess.prompt import Array

SAMPLE_FPS = 2.0
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,"
    "ogg,aac,mp3,flac,wav,aiff,au,caf,amr"
)
DECODERS = (  # FFmpeg has hundreds more: slower ones, and such as few people ever fuzzed
    "h264,hevc,vp8,vp9,av1,libdav1d,mpeg1video,mpeg2video,mpeg4,mjpeg,h263,flv,theora,"
    "msmpeg4v2,msmpeg4,wmv1,wmv2,wmv3,vc1,"
    "aac,aac_latm,mp2float,mp2,mp3float,mp3,flac,vorbis,opus,libopus,alac,ac3,eac3,amrnb,amrwb,"
    "libopencore_amrnb,libopencore_amrwb,wmav1,wmav2,wmapro,pcm_u8,pcm_s8,pcm_s16le,pcm_s16be,pcm_s24le,pcm_s24be,"
    "pcm_s32le,pcm_s32be,pcm_f32le,pcm_f32be,pcm_f64le,pcm_f64be,pcm_alaw,pcm_mulaw"
)
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}

Fit = Callable[[int, int, int], tuple[int, int]]
"""(height, width, number of frames) -> (height, width) to keep the frames at."""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """RGB frames of one size, an even number of them, `fps` a second, and the sound at 16 kHz if
    asked for."""

    frames: list[Image.Image]
    fps: float
    sound: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What a video's packets and header say of it, before anything is decoded."""

    times: npt.NDArray[np.float64]  # when each frame appears, in seconds from the first
    duration: float
    pixels: int  # of a frame
    frame_bytes: float  # of a decoded frame


def decode_video(
    data: bytes, budget: Budget, fit: Fit, *, fps: float = SAMPLE_FPS, sound: bool = False
) -> Video:
    """Sample a video at `fps`, more thinly if that would exceed the limits.

    Sample k shows what is on screen at k / fps, up to the last frame, which repeats if that makes
    the number even. Frames are resized as they are decoded, so that a long video of large frames is
    never held whole."""
    check_bytes(len(data), budget.limits)
    plan = _schedule(data, budget)
    count = max(2, 2 * math.ceil(plan.duration * fps / 2))
    most = max(2, budget.limits.video_frames // 2 * 2)
    if count > most:
        count, fps = most, most / plan.duration
    indexes = np.searchsorted(plan.times, np.arange(count) / fps + 1e-6, side="right") - 1
    # Every frame up to the last index: the ones between are what the others are made from.
    decoded = (int(indexes[-1]) + 1) * plan.frame_bytes * COST_PER_FRAME_BYTE
    budget.check_decoding(decoded + len(np.unique(indexes)) * plan.pixels * COST_PER_KEPT_PIXEL)
    frames = _pick(data, indexes, budget, fit)
    return Video(
        frames, fps, decode_sound(data, budget, "the video's sound track") if sound else None
    )


def decode_sound(data: bytes, budget: Budget, what: str = "audio") -> Array:
    """Mono samples at 16 kHz of a file's first audio stream."""
    with open_container(data, budget, what) as (av, container):
        if not container.streams.audio:
            raise MediaError(f"{what} cannot be decoded: the file has no audio stream")
        stream = _known(container.streams.audio[0], what)
        planes = av.AudioResampler(format="fltp")
        mixer: Mixer | None = None
        for frame in container.decode(stream):
            mixer = mixer or Mixer(frame.sample_rate, len(frame.layout.channels), budget)
            if (frame.sample_rate, len(frame.layout.channels)) != (mixer.rate, mixer.channels):
                raise MediaError(f"{what} changes its sample rate or channels half way")
            for plane in planes.resample(frame):
                mixer.add(plane.to_ndarray().T)
        if mixer is None:
            raise MediaError(f"{what} cannot be decoded: no sound in it")
        return mixer.finish()


@contextmanager
def open_container(data: bytes, budget: Budget, what: str) -> Iterator[tuple[Any, Any]]:
    """PyAV, and the file as it opens it: with our formats and decoders alone."""
    try:
        import av
    except ImportError:
        raise MediaError(
            f"{what} cannot be decoded: this format needs PyAV, which is not installed; "
            "install it with `pip install 'stretto[video]'`"
        ) from None
    options = {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "none",  # should a format on the list ever name another file
        # Opening a file decodes a frame or two to learn what they are.
        "codec_whitelist": DECODERS,
        "max_pixels": str(budget.limits.image_pixels),
    }
    with (
        decoding(what, av.error.FFmpegError),
        av.open(io.BytesIO(data), options=options) as container,
    ):
        yield av, container


def _known(stream: Any, what: str) -> Any:
    """The stream, if its decoder is one of ours."""
    name = stream.codec_context.name
    if name not in DECODERS.split(","):
        raise MediaError(f"{what} cannot be decoded: {name} is not supported")
    return stream


@contextmanager
def _screen(data: bytes, budget: Budget) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    with open_container(data, budget, "video") as (_, container):
        if not container.streams.video:
            raise MediaError("video cannot be decoded: the file has no video stream")
        stream = _known(container.streams.video[0], "video")
        # The decoder itself refuses larger frames, whatever the container's header says.
        stream.codec_context.options = {"max_pixels": str(budget.limits.image_pixels)}
        yield container, stream


def _schedule(data: bytes, budget: Budget) -> _Plan:
    """Decodes nothing."""
    times: list[float] = []
    last, most = 0.0, budget.limits.video_seconds
    with _screen(data, budget) as (container, stream):
        screen = stream.codec_context
        if not screen.width * screen.height:  # opening the file read no frame
            known = f"its frames are broken, or have over {budget.limits.image_pixels:,} pixels"
            raise MediaError(f"video cannot be decoded: {known}")
        check_pixels(screen.width, screen.height, budget.limits)
        rate = float(stream.average_rate or 25)
        for packet in container.demux(stream):
            if not packet.size:
                continue
            budget.add_input_frame()
            stamp = packet.pts if packet.pts is not None else packet.dts
            times.append(
                float(stamp * packet.time_base) if stamp is not None else len(times) / rate
            )
            last = float(packet.duration * packet.time_base) if packet.duration else 1.0 / rate
        pixels, frame_bytes = screen.width * screen.height, _raw_bytes(screen)
    if not times:
        raise MediaError("video cannot be decoded: no frames in it")
    moments = np.sort(np.array(times)) - min(times)
    duration = float(moments[-1]) + last
    if not 0 < duration <= most:
        raise MediaError(
            f"video lasts {duration:.1f} s; more than 0 and at most {most:g} s are allowed"
        )
    return _Plan(moments, duration, pixels, frame_bytes)


def _raw_bytes(shape: Any) -> float:
    """The size of a decoded frame, from a decoder's state or a frame."""
    bits = shape.format.padded_bits_per_pixel if shape.format is not None else 12
    return float(shape.width * shape.height * bits) / 8


def _pick(
    data: bytes, indexes: npt.NDArray[np.int64], budget: Budget, fit: Fit
) -> list[Image.Image]:
    """The frames with these ascending indexes; an index that stands twice gives its frame twice."""
    frames: list[Image.Image] = []
    with _screen(data, budget) as (container, stream):
        size: tuple[int, int] | None = None
        shown: Image.Image | None = None
        for index, frame in enumerate(container.decode(stream)):
            budget.spend_decoding(_raw_bytes(frame) * COST_PER_FRAME_BYTE)
            if index < indexes[len(frames)]:
                continue
            budget.spend_decoding(frame.width * frame.height * COST_PER_KEPT_PIXEL)
            picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
            turn = _TURNS.get(round(frame.rotation) % 360)
            picture = picture if turn is None else picture.transpose(turn)
            if size is None:
                height, width = fit(picture.height, picture.width, len(indexes))
                size = (width, height)
            shown = picture.resize(size, Image.Resampling.BICUBIC)
            while len(frames) < len(indexes) and indexes[len(frames)] <= index:
                frames.append(shown)
            if len(frames) == len(indexes):
                return frames
    if not frames:
        raise MediaError("video cannot be decoded: no frames in it")
    # Some packets made no frame: the last one stays on screen.
    return frames + frames[-1:] * (len(indexes) - len(frames))

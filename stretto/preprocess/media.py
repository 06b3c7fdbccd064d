"""Limits on untrusted media, what one request has used of them, and the decoding of pictures.

`audio.py` decodes sound and `video.py` videos, within the same limits. The reader of messages keeps
one `Budget` per request: a hundred small files must not cost what one large one may not. Sizes are
checked against `MediaLimits` before anything is allocated for them and again while reading, because
headers lie. Whatever goes wrong is a `MediaError`; the caller adds which part of which message it
was."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soxr
from PIL import Image, ImageOps

from stretto.errors import MediaError
from stretto.preprocess.mel import PAD, SAMPLE_RATE
from stretto.preprocess.prompt import Array

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # PIL's rarer parsers stay out of reach
# of a JPEG's segment; the others stand within coded data
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_ALONE = (0x01, 0xD8)  # markers without a length
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)

# What decoders written for honest files raise on others, besides their own errors.
BROKEN: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The most one request may hold. Where nothing else is said, all of it together."""

    # every string the template may read, keys too; a million take a second or two
    text_chars: int = 1_000_000
    # in tools, tool_calls and the like: items of lists and of objects, strings or not
    values: int = 100_000
    depth: int = 64  # of the same
    messages: int = 4096
    parts: int = 4096  # of the content of all messages
    media: int = 64

    file_bytes: int = 64 << 20  # one file
    audio_seconds: float = 2400.0
    sample_rate: int = SAMPLE_RATE  # that clips are brought to
    # samples times channels, before resampling: up to 17 ns each; 40 min at CD rate fit
    audio_values: int = 1 << 28
    audio_channels: int = 8  # one clip
    image_pixels: int = 64_000_000  # one picture, or one frame of a video
    video_seconds: float = 600.0  # one video
    video_input_frames: int = 36_000  # in the files: each costs something however small it is
    video_frames: int = 768  # kept of one video; a longer one is sampled more thinly
    decode_seconds: float = 20.0  # of one core, for pictures and videos, as estimated below


# What decoding costs one core, in seconds, measured on an EPYC of 2025. What a frame takes goes
# with its raw size over all codecs on our list, chroma formats and depths: 0.7 to 1.8 ns a byte. 20
# s are five minutes of 1280x720 at 25 frames a second or ten of 854x480, both sampled at two a
# second; or 333 million pixels of pictures.
COST_PER_FRAME_BYTE = 1.25e-9
COST_PER_KEPT_PIXEL = 9.0e-9  # to RGB and to the size that is kept
COST_PER_PICTURE_PIXEL = 60.0e-9  # the slowest: a transparent WebP or PNG
COST_PER_SCAN_PIXEL = 2.0e-9  # of a JPEG: 0.9 ns for an empty scan of one component
# of a JPEG: encoders make ten or so, and each costs something however small the picture is
MAX_SCANS = 256


LONG_SOUND = MediaLimits(audio_seconds=7200.0)
"""Limits of sound that the model takes window by window: it need not fit into one prompt."""


@dataclass(slots=True)
class Budget:
    """How much of a request's limits its media have used so far."""

    limits: MediaLimits
    media: int = 0
    audio_seconds: float = 0.0
    audio_values: int = 0
    video_input_frames: int = 0
    decode_seconds: float = 0.0

    def check_decoding(self, seconds: float) -> None:
        """Refuses what would cost more than is left."""
        if self.decode_seconds + seconds > self.limits.decode_seconds:
            raise MediaError(
                "pictures and videos are too large: decoding all of this request's would take over "
                f"{self.limits.decode_seconds:g} s; send smaller, shorter or fewer ones"
            )

    def spend_decoding(self, seconds: float) -> None:
        self.check_decoding(seconds)
        self.decode_seconds += seconds

    def add_medium(self) -> None:
        self.media += 1
        if self.media > self.limits.media:
            raise MediaError(
                f"too many media: at most {self.limits.media} are allowed in a request"
            )

    def add_input_frame(self) -> None:
        self.video_input_frames += 1
        if self.video_input_frames > self.limits.video_input_frames:
            raise MediaError(
                f"video has too many frames: over {self.limits.video_input_frames:,} in the request"
            )


def check_bytes(size: int, limits: MediaLimits) -> None:
    if size > limits.file_bytes:
        raise MediaError(
            f"the file is too large: {size:,} bytes, at most {limits.file_bytes:,} are allowed"
        )
    if size == 0:
        raise MediaError("the file is empty")


@contextmanager
def decoding(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns whatever a decoder raises into a MediaError."""
    caught: tuple[type[Exception], ...] = (*BROKEN, *errors)
    try:
        yield
    except caught as e:
        raise MediaError(f"{what} cannot be decoded: {_reason(e)}") from None


def _reason(error: Exception) -> str:
    """A decoder's complaint without what says nothing to a client: error numbers, addresses of our
    buffers."""
    text = re.sub(r" ?<_io\.BytesIO object at 0x\w+>", "", str(error))
    text = re.sub(r"\[Errno \d+\] |: '<none>'| returned \d+", "", text)
    return " ".join(text.split())[:200] or type(error).__name__


class Mixer:
    """Collects blocks of decoded audio as mono samples at 16 kHz, within the limits. One per
    clip."""

    def __init__(self, rate: int, channels: int, budget: Budget) -> None:
        if not 1_000 <= rate <= 384_000:
            raise MediaError(f"a sample rate of {rate} Hz is not supported")
        most = budget.limits.audio_channels
        if not 1 <= channels <= most:
            raise MediaError(f"audio with {channels} channels is not supported, at most {most} are")
        self.rate = rate
        self.channels = channels
        self.budget = budget
        self.num_samples = 0
        self._before = budget.audio_seconds, budget.audio_values  # used by other clips
        self.sample_rate = sample_rate = budget.limits.sample_rate
        self._resampler: soxr.ResampleStream | None = None
        if rate != sample_rate:
            self._resampler = soxr.ResampleStream(rate, sample_rate, 1, quality="HQ")
        self._blocks: list[Array] = []

    def check(self, num_samples: int) -> tuple[float, int]:
        """Refuses a clip of this length; else says how much audio the request then holds."""
        limits = self.budget.limits
        seconds = self._before[0] + num_samples / self.rate
        values = self._before[1] + num_samples * self.channels
        if seconds > limits.audio_seconds:
            raise MediaError(f"audio is too long: over {limits.audio_seconds:g} s in the request")
        if values > limits.audio_values:
            raise MediaError(
                f"audio is too large: over {limits.audio_values:,} sample values in the request"
            )
        return seconds, values

    def add(self, block: npt.NDArray[np.float32]) -> None:
        """One block, [samples, channels]."""
        self.num_samples += len(block)
        self.budget.audio_seconds, self.budget.audio_values = self.check(self.num_samples)
        mono = block[:, 0] if self.channels == 1 else block.mean(axis=1, dtype=np.float32)
        self._blocks.append(
            self._resampler.resample_chunk(mono) if self._resampler else mono.copy()
        )

    def finish(self) -> Array:
        if self._resampler:
            self._blocks.append(self._resampler.resample_chunk(np.empty(0, np.float32), last=True))
        samples = np.concatenate(self._blocks) if self._blocks else np.empty(0, np.float32)
        self._blocks.clear()
        if not np.isfinite(samples).all():
            raise MediaError("audio holds values that are not finite numbers")
        if len(samples) <= PAD:
            raise MediaError(
                f"audio is too short: {1000 * len(samples) / self.sample_rate:.1f} ms, at least "
                f"{1000 * (PAD + 1) / self.sample_rate:.1f} ms are needed"
            )
        return samples


def open_image(data: bytes, budget: Budget) -> Image.Image:
    """A picture of which the header alone was read; `load_image` decodes it."""
    check_bytes(len(data), budget.limits)
    with decoding("image", *_BOMBS):
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        check_pixels(image.width, image.height, budget.limits)
    scans = jpeg_scans(data) if image.format in ("JPEG", "MPO") else 1
    if scans > MAX_SCANS:
        raise MediaError(
            f"a JPEG of over {MAX_SCANS} scans is not decoded; send one of fewer scans"
        )
    cost = max(COST_PER_PICTURE_PIXEL, scans * COST_PER_SCAN_PIXEL)
    budget.spend_decoding(image.width * image.height * cost)
    return image


def load_image(image: Image.Image) -> Image.Image:
    """An upright RGB image; transparent parts become white. Of an animation, the first frame."""
    with decoding("image", *_BOMBS):
        image.load()
        return to_rgb(ImageOps.exif_transpose(image))


def decode_image(data: bytes, budget: Budget) -> Image.Image:
    return load_image(open_image(data, budget))


def jpeg_scans(data: bytes) -> int:
    """How often a decoder goes over the picture: progressive files have about ten scans, each of
    which may be a few bytes. Counted up to one more than is allowed."""
    at = 2
    scans = 0
    while scans <= MAX_SCANS and (marker := _MARKER.search(data, at)) is not None:
        at = marker.end()
        kind = data[at - 1]
        if kind == _END_OF_IMAGE:
            break
        scans += kind == _START_OF_SCAN
        if kind not in _ALONE:
            # skip its content, which may look like anything
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return scans


def check_pixels(width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"an image of {width}x{height} pixels has nothing to see")
    if width * height > limits.image_pixels:
        raise MediaError(
            f"{width}x{height} pixels are too many, at most {limits.image_pixels:,} are allowed"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):  # PIL would clip 16-bit greys instead of scaling them
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def image_from_array(pixels: npt.NDArray[np.generic], limits: MediaLimits) -> Image.Image:
    """An RGB image of an array [height, width, 3] of bytes."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise MediaError(
            f"an image must be bytes [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    check_pixels(pixels.shape[1], pixels.shape[0], limits)
    return Image.fromarray(np.ascontiguousarray(pixels))

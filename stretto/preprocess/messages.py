"""Reads chat messages and tools as clients send them: checks every field, decodes the media, leaves
plain turns to render. Nothing is decoded before all fields, and the headers of all pictures, have
been looked at.

Called by the prompt builder only. Messages are plain dictionaries in OpenAI's chat format, straight
from JSON or from a local caller (who may also pass arrays and, if allowed, file paths). A bad field
is an `Invalid` whose `param` is the field's path, such as
`messages[0].content[1].image_url.url`."""

from __future__ import annotations

import binascii
import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
import numpy as np
from msgspec import Meta, Struct
from PIL import Image

from stretto._validation import wrong_field
from stretto.errors import Invalid, MediaError, TooLong
from stretto.preprocess.audio import PCM_RATES, decode_audio, decode_pcm16, mix
from stretto.preprocess.media import (
    Budget,
    MediaLimits,
    check_pixels,
    image_from_array,
    load_image,
    open_image,
    to_rgb,
)
from stretto.preprocess.mel import SAMPLE_RATE
from stretto.preprocess.prompt import Array, AudioClip, Patches
from stretto.preprocess.video import SAMPLE_FPS, Fit, Video, decode_video

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# fields that templates may read, besides content
_PASSED = ("tool_calls", "tool_call_id", "name", "reasoning_content")

_DATA_HEAD = 1024  # where the content of a data URI begins at the latest

Medium = Array | Image.Image | Video | AudioClip | Patches
Kind = Literal["audio", "image", "video"]
MEDIA: dict[str, Kind] = {
    "input_audio": "audio",
    "audio_url": "audio",
    "image_url": "image",
    "video_url": "video",
    "audio": "audio",
    "image": "image",
    "video": "video",
}


@dataclass(slots=True)
class Reader:
    """Reads the messages of one prompt. `found` is called with each medium, in order."""

    budget: Budget
    allow_paths: bool
    sound_in_video: bool
    fit: Fit
    found: Callable[[Medium, Kind], None]
    # called for each picture with its size, before any is decoded
    expect_picture: Callable[[int, int], None] = lambda height, width: None
    _undecoded: deque[tuple[str, Kind, Callable[[], Medium]]] = field(default_factory=deque)
    _chars: int = 0
    _values: int = 0
    _parts: int = 0

    @property
    def limits(self) -> MediaLimits:
        return self.budget.limits

    def read_tools(self, tools: object) -> list[dict[str, Any]] | None:
        """Tools for the chat template; None if there are none."""
        if tools is None:
            return None
        self._count(tools, "tools")
        return check_tools(tools) or None

    def read(self, messages: object) -> list[dict[str, Any]]:
        """Turns for the chat template: text and, where a medium was, {"type": its kind}."""
        if not isinstance(messages, list | tuple):
            raise Invalid(f"messages must be a list, got {_kind(messages)}", "messages")
        if not messages:
            raise Invalid("messages is empty: at least one message is needed", "messages")
        if len(messages) > self.limits.messages:
            raise Invalid(
                f"messages: at most {self.limits.messages:,} are allowed, got {len(messages):,}",
                "messages",
            )
        try:
            turns = [self._message(m, f"messages[{i}]") for i, m in enumerate(messages)]
            while self._undecoded:
                at, kind, decode = self._undecoded.popleft()
                with _naming_part(at):
                    self.found(decode(), kind)
        finally:
            # What waits here refers to this reader: without this circle, the media of a request
            # that is refused go with it rather than when the interpreter looks for circles.
            self._undecoded.clear()
        return turns

    def _message(self, message: object, at: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise Invalid(f"{at} must be an object, got {_kind(message)}", at)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise Invalid(
                f"{at}.role must be one of {', '.join(ROLES)}, got {reprlib.repr(role)}",
                f"{at}.role",
            )
        turn: dict[str, Any] = {"role": ROLES[role]}
        for name in _PASSED:
            if (value := message.get(name)) is not None:
                self._count(value, f"{at}.{name}")
                turn[name] = value
        calls = turn.get("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
            raise Invalid(f"{at}.tool_calls must be a list of objects", f"{at}.tool_calls")
        turn["content"] = self._content(message.get("content"), role, bool(calls), f"{at}.content")
        return turn

    def _content(
        self, content: object, role: str, optional: bool, at: str
    ) -> str | list[dict[str, str]]:
        if content is None and optional:
            return ""
        if isinstance(content, str):
            if not content and role == "user":
                raise Invalid(f"{at} is empty", at)
            self._add_chars(len(content), at)
            return content
        if content is None:
            raise Invalid(f"{at} is missing", at)
        if not isinstance(content, list | tuple):
            raise Invalid(f"{at} must be a string or a list of parts, got {_kind(content)}", at)
        if not content:
            raise Invalid(f"{at} is empty", at)
        self._parts += len(content)
        if self._parts > self.limits.parts:
            raise Invalid(
                f"{at}: at most {self.limits.parts:,} parts are allowed in all messages", at
            )
        parts = [self._part(p, role, f"{at}[{i}]") for i, p in enumerate(content)]
        if all(p["type"] == "text" for p in parts):
            # Templates differ in where they accept a list; joined text means the same everywhere.
            return "".join(p["text"] for p in parts)
        return parts

    def _part(self, part: object, role: str, at: str) -> dict[str, str]:
        if not isinstance(part, Mapping):
            raise Invalid(f"{at} must be an object, got {_kind(part)}", at)
        name = part.get("type")
        if name == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise Invalid(f"{at}.text must be a string, got {_kind(text)}", f"{at}.text")
            self._add_chars(len(text), f"{at}.text")
            return {"type": "text", "text": text}
        kind = MEDIA.get(name) if isinstance(name, str) else None
        if kind is None:
            raise Invalid(
                f"{at}.type must be one of text, {', '.join(MEDIA)}, got {reprlib.repr(name)}",
                f"{at}.type",
            )
        if role != "user":
            # Speech looks for media in user turns only.
            raise Invalid(
                f"{at}: {kind} is only allowed in user messages, not in a {role} message", at
            )
        with _naming_part(at):
            if not isinstance(part.get("data"), AudioClip | Patches):  # these cost nothing any more
                self.budget.add_medium()
            self._undecoded.append((at, kind, self._medium(kind, part, at)))
        return {"type": kind}

    def _add_chars(self, count: int, at: str) -> None:
        self._chars += count
        if self._chars > self.limits.text_chars:
            raise TooLong(
                f"{at}: the request has over {self.limits.text_chars:,} characters of text", at
            )

    def _count(self, value: object, at: str) -> None:
        """Refuse a field beyond the limits, if it is passed on as it came. The walk goes layer by
        layer and ends at the limits, however deep or wide the field is."""
        layer, depth = [value], 0
        while layer:
            if depth > self.limits.depth:
                raise Invalid(f"{at} is nested more than {self.limits.depth} levels deep", at)
            below: list[object] = []
            for v in layer:
                if isinstance(v, str):
                    self._add_chars(len(v), at)
                elif isinstance(v, int):
                    # JSON's numbers may have thousands of digits
                    self._add_chars(v.bit_length() // 3, at)
                elif isinstance(v, dict | list | tuple):
                    self._values += len(v)
                    if self._values > self.limits.values:
                        raise Invalid(
                            f"{at}: the request has over {self.limits.values:,} nested values", at
                        )
                    below.extend(v)
                    if isinstance(v, dict):
                        below.extend(v.values())
            layer, depth = below, depth + 1

    def _medium(self, kind: Kind, part: Mapping[str, Any], at: str) -> Callable[[], Medium]:
        """The function that decodes it."""
        match part["type"]:
            case "input_audio":
                return self._input_audio(part.get("input_audio"), f"{at}.input_audio")
            case "audio_url" | "image_url" | "video_url" as name:
                return self._decode(kind, self._fetch(part.get(name), f"{at}.{name}"))
        if part.get("path") is not None:
            return self._decode(kind, self._open(str(part["path"]), f"{at}.path"))
        data = part.get("data")
        if isinstance(data, str):
            data = self._base64(data, f"{at}.data")
        if isinstance(data, bytes | bytearray | memoryview):
            return self._decode(kind, bytes(data))
        return partial(self._from_memory, kind, data, part, at)

    def _decode(self, kind: Kind, data: bytes) -> Callable[[], Medium]:
        if kind == "audio":
            return partial(decode_audio, data, self.budget)
        if kind == "image":
            picture = open_image(data, self.budget)
            self.expect_picture(picture.height, picture.width)
            return partial(load_image, picture)
        return partial(decode_video, data, self.budget, self.fit, sound=self.sound_in_video)

    def _input_audio(self, value: object, at: str) -> Callable[[], Array]:
        if not isinstance(value, Mapping):
            raise Invalid(f"{at} must be an object with data and format, got {_kind(value)}", at)
        text, format = value.get("data"), value.get("format")
        if not isinstance(text, str):
            raise Invalid(f"{at}.data must be a base64 string, got {_kind(text)}", f"{at}.data")
        if format is not None and not isinstance(format, str):
            raise Invalid(f"{at}.format must be a string, got {_kind(format)}", f"{at}.format")
        data = self._base64(text, f"{at}.data")
        if format == "pcm16":  # no header: the only format whose name matters
            rate = _integer(value.get("sample_rate", PCM_RATES[0]), f"{at}.sample_rate")
            return partial(decode_pcm16, data, self.budget, rate)
        return partial(decode_audio, data, self.budget)

    def _from_memory(self, kind: Kind, data: object, part: Mapping[str, Any], at: str) -> Medium:
        """What a local caller passes: samples, a picture, or frames; or the features of such."""
        if isinstance(data, AudioClip if kind == "audio" else Patches):
            return data
        if kind == "audio" and isinstance(data, np.ndarray):
            rate = _integer(part.get("sample_rate", SAMPLE_RATE), f"{at}.sample_rate")
            return mix(data, rate, self.budget)
        if kind == "image" and isinstance(data, np.ndarray | Image.Image):
            return self._picture(data)
        if kind == "video" and isinstance(data, np.ndarray | list | tuple):
            fps = part.get("fps", SAMPLE_FPS)
            if isinstance(fps, bool) or not isinstance(fps, int | float):
                raise Invalid(f"{at}.fps must be a number, got {_kind(fps)}", f"{at}.fps")
            return self._frames(data, float(fps), part.get("sound"))
        raise Invalid(
            f"{at} needs `path` or `data` (bytes, or what the medium is in memory), got "
            f"{_kind(data)}",
            at,
        )

    def _picture(self, data: object) -> Image.Image:
        if isinstance(data, np.ndarray):
            return image_from_array(data, self.limits)
        if isinstance(data, Image.Image):
            check_pixels(data.width, data.height, self.limits)
            return to_rgb(data)
        raise MediaError(f"a picture must be an array or a PIL image, got {_kind(data)}")

    def _frames(
        self, data: np.ndarray[Any, Any] | list[Any] | tuple[Any, ...], fps: float, sound: object
    ) -> Video:
        if not len(data):
            raise MediaError("a video needs at least one frame")
        if len(data) > self.limits.video_frames:
            raise MediaError(
                f"{len(data)} frames are too many, at most {self.limits.video_frames} are allowed"
            )
        pictures = [self._picture(f) for f in data]
        height, width = self.fit(pictures[0].height, pictures[0].width, len(pictures))
        if any(p.size != pictures[0].size for p in pictures):
            raise MediaError("all frames of a video must have the same size")
        track = None
        if self.sound_in_video:
            if not isinstance(sound, np.ndarray):
                raise MediaError("the video has no sound track, which use_audio_in_video asks for")
            track = mix(sound, SAMPLE_RATE, self.budget)
        resized = [p.resize((width, height), Image.Resampling.BICUBIC) for p in pictures]
        return Video(resized, fps, track)

    def _fetch(self, value: object, at: str) -> bytes:
        """The content of {"url": ...}: a data URI, or a path where those are allowed."""
        url = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(url, str):
            raise Invalid(f"{at}.url must be a string, got {_kind(url)}", f"{at}.url")
        at = f"{at}.url"
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            comma = url.find(",", 0, _DATA_HEAD)
            if comma < 0 or not url[:comma].lower().endswith(";base64"):
                raise Invalid(
                    f"{at} must be a data URI in base64: data:<type>;base64,<content>", at
                )
            return self._base64(url[comma + 1 :], at)
        if scheme in ("http", "https"):
            raise Invalid(f"{at}: remote files are not fetched; send the content as a data URI", at)
        return self._open(unquote(url.partition("://")[2]) if scheme == "file" else url, at)

    def _open(self, path: str, at: str) -> bytes:
        if not self.allow_paths:
            raise Invalid(f"{at}: files are not read here; send the content as a data URI", at)
        try:
            if not Path(path).is_file():  # a pipe or a device would never end
                raise Invalid(f"{at}: no such file: {path}", at)
            with open(path, "rb") as f:
                # one byte too many is refused when the file is decoded
                return f.read(self.limits.file_bytes + 1)
        except (OSError, ValueError) as e:
            raise Invalid(f"{at}: the file cannot be read ({e})", at) from None

    def _base64(self, text: str, at: str) -> bytes:
        try:
            # straight from the string, without a copy in between
            return binascii.a2b_base64(text, strict_mode=True)
        except (binascii.Error, ValueError) as e:
            raise Invalid(f"{at} is not valid base64 ({e})", at) from None


@contextmanager
def _naming_part(at: str) -> Iterator[None]:
    """Put the place of the part into the error of its medium."""
    try:
        yield
    except (MediaError, TooLong) as e:
        raise type(e)(f"{at}: {e}", at) from None


def _integer(value: object, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"{at} must be an integer, got {_kind(value)}", at)
    return value


def _kind(value: object) -> str:
    """How JSON calls the type of a value."""
    if value is None:
        return "nothing"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


# ---- tools: the server publishes these structs in its description


class Function(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=256)]


def check_tools(tools: object) -> list[dict[str, Any]]:
    """The tools as plain data for the template, without fields that say nothing."""
    try:
        return [msgspec.to_builtins(t) for t in msgspec.convert(tools, Tools | None) or ()]
    except msgspec.ValidationError as e:
        raise wrong_field(e, "tools") from None
    except TypeError as e:  # from a local caller, who can pass what JSON has no words for
        raise Invalid(f"tools: {e}", "tools") from None

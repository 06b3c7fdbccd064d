"""How an error of msgspec's becomes one that a client understands: which field it is, and what is
wrong with it.

Used wherever fields that a client sent are read: the server's bodies, the prompt's tools.
`read_json_file` is for the files of checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stretto.errors import CheckpointError, Invalid

T = TypeVar("T")
_SHOWN = 64  # characters of a name that a client made up


def wrong_field(error: msgspec.ValidationError, root: str = "") -> Invalid:
    """The same as an `Invalid`; `root` is the path of the value that was read."""
    words, _, path = str(error).partition(" - at ")
    param = _path(path, words, root)
    return Invalid(f"{param}: {_plain(words)}" if param else _plain(words), param)


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not JSON."""


MOST_HALVES = 4096
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATES = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2})(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def read_json(data: bytes | memoryview, decode: Callable[[bytes | memoryview], T]) -> T:
    """What `decode` makes of JSON. Halves of surrogate pairs, as cutting a JavaScript string in two
    leaves them, become replacement characters: JSON allows them, msgspec does not."""
    try:
        return decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not 0 < len(_HALF.findall(data)) <= MOST_HALVES:  # more would take long
            raise
        return decode(_SURROGATES.sub(_whole, data))


def _whole(found: re.Match[bytes]) -> bytes:
    """What stands in the place of surrogates: pairs stay."""
    data, start = found.string, found.start()
    at = start
    while at and data[at - 1] == ord("\\"):
        at -= 1
    first, second = found[1], found[2]
    if (start - at) % 2:  # the backslash belongs to the one before it: this is text
        return first + b"\\ufffd" if second else found[0]
    return found[0] if second else b"\\ufffd"


def not_json(error: Exception) -> str:
    """What is wrong with them, in a client's words."""
    return f"the request is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _path(path: str, words: str, root: str) -> str | None:
    """From msgspec's `$.audio[...]` and its message to `audio.format`."""
    steps = re.sub(r"\[\.\.\.\]", "", path.strip("`")).removeprefix("$")
    steps = f"{root}{steps}".strip(".")
    if field := re.search(r"(?:unknown|required) field `([^`]*)`", words):
        steps = f"{steps}.{field[1][:_SHOWN]}" if steps else field[1][:_SHOWN]
    return steps or None


def _plain(words: str) -> str:
    unknown = re.search(r"unknown field `([^`]*)`", words)
    if unknown:
        return f"unknown field {unknown[1][:_SHOWN]!r}"
    return words.replace("Object missing", "missing").replace("`", "")


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return raw

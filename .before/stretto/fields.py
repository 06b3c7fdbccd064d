"""How an error of msgspec's becomes one that a client understands: which field it is, and what is wrong with it.

Used wherever fields that a client sent are read: the server's bodies, the prompt's tools."""

from __future__ import annotations

import re

import msgspec

from stretto.errors import Invalid

_SHOWN = 64  # characters of a name that a client made up


def wrong_field(error: msgspec.ValidationError, root: str = "") -> Invalid:
    """The same as an `Invalid`; `root` is the path of the value that was read."""
    words, _, path = str(error).partition(" - at ")
    param = _path(path, words, root)
    return Invalid(f"{param}: {_plain(words)}" if param else _plain(words), param)


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not JSON."""


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

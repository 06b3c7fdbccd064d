"""Media that messages name by address: which addresses are in a request, and their content in place
of them. The server fetches it between the two (`server/media_fetcher.py`); nothing here opens a
connection. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.errors import Invalid

MAX_REMOTE = 8
"""Addresses that one request may name."""
MAX_URL = 2048
"""Bytes of an address as JSON text."""
NOT_FETCHED = "remote files are fetched only from hosts that --allowed-media-domains names"
TOO_MANY = f"a request names at most {MAX_REMOTE} remote files"
# names of fields in which messages and items have addresses
_FIELD = rb'"(?:url|image_url|audio_url|video_url|file_url|file_data|data)"'
# a quote within a string has a backslash before it, so no text of a message looks like a field
_ADDRESS = re.compile(
    _FIELD + rb'[ \t\r\n]*:[ \t\r\n]*("(?i:https?):(?:[^"\\]|\\.){1,%d}")' % MAX_URL
)
_PARTS = {"image_url": "image", "audio_url": "audio", "video_url": "video", "file_url": ""}
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM")
_SOUNDS = (b"fLaC", b"OggS", b"ID3", b"caff", b"#!AMR", b".snd")


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    """What was fetched: by address its content, or a sentence that says why there is none."""

    content: Mapping[str, memoryview] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    def find(self, url: str, at: str) -> memoryview:
        if url not in self.content:
            many = len(self.content) + len(self.failures) >= MAX_REMOTE
            why = self.failures.get(url, TOO_MANY if many else NOT_FETCHED)
            raise Invalid(f"{at}: {why}; send the content as a data URI", at)
        return self.content[url]


NONE = RemoteMedia()


def remote_urls(data: bytes | memoryview) -> tuple[str, ...]:
    """Addresses that JSON has where messages name media, each once; no more than are fetched."""
    found: dict[str, None] = {}
    for match in _ADDRESS.finditer(data):
        try:
            found[msgspec.json.decode(match[1])] = None
        except msgspec.DecodeError:
            continue  # whoever reads the messages says what is wrong with it
        if len(found) == MAX_REMOTE:
            break
    return tuple(found)


def is_remote(url: object) -> bool:
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


def with_content(messages: Any, remote: RemoteMedia) -> Any:
    """The messages with the content of remote media in them. Raises what is wrong with one."""
    if not isinstance(messages, list):
        return messages  # the builder says what is wrong with it
    return [_message(m, f"messages[{i}].content", remote) for i, m in enumerate(messages)]


def _message(message: Any, at: str, remote: RemoteMedia) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(address_of(p)[0] for p in content):
        return message
    parts = [_part(part, f"{at}[{i}]", remote) for i, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, at: str, remote: RemoteMedia) -> Any:
    url, place = address_of(part)
    if not url:
        return part
    data = remote.find(url, f"{at}.{place}")
    kind = _PARTS.get(part["type"], "audio") or kind_of(bytes(data[:12]))
    return {"type": kind, "data": data}


def address_of(part: Any) -> tuple[str, str]:
    """The address that a part of a message names, and where; empty if it names none."""
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in (*_PARTS, "input_audio"):
        return "", ""
    value = part.get(name)
    key = "data" if name == "input_audio" else "url"
    url = value.get(key) if isinstance(value, dict) else value
    return (url, f"{name}.{key}") if isinstance(url, str) and is_remote(url) else ("", "")


def kind_of(head: bytes) -> str:
    """The kind of a file whose message does not name it. What is neither a picture nor sound by its
    first bytes is left to the reader of videos, which refuses what it does not know."""
    if head.startswith(_IMAGES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return "image"
    mpeg = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    wave = head[:4] in (b"RIFF", b"FORM") and head[8:12] in (b"WAVE", b"AIFF", b"AIFC")
    if head.startswith(_SOUNDS) or mpeg or wave or head[4:11] == b"ftypM4A":
        return "audio"
    return "video"

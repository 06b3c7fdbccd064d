"""Messages of a conversation that goes on, whose media are decoded once. Pure; called by the engine's sessions, what
takes long in a thread. Imports no torch.

Media that come as text (a picture in a data URI) are a stranger's: `encoded` sets them apart, so that they can be
decoded where there are limits on time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto.prompt.messages import MEDIA
from stretto.prompt.prompt import AudioClip, Patches, Prompt
from stretto.prompt.work import Builder


def prepared(builder: Builder, message: Mapping[str, Any], allow_paths: bool = False) -> Mapping[str, Any]:
    """A message with features in place of its media, so that these are decoded once for many prompts."""
    kinds = [_kind(p) for p in _parts(message)]
    if not any(kinds):
        return message
    return _filled(message, kinds, builder.build([message], allow_paths=allow_paths))


def encoded(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The media that come as text, each at its place, with a word in place of all else; None if there are none."""
    kinds = _encoded_kinds(message)
    if not any(kinds):
        return None
    word = {"type": "text", "text": "-"}
    return {
        "role": message.get("role"),
        "content": [p if k else word for p, k in zip(_parts(message), kinds, strict=True)],
    }


def with_encoded(message: Mapping[str, Any], prompt: Prompt) -> Mapping[str, Any]:
    """The message with their features, from the prompt that was built of `encoded(message)`."""
    return _filled(message, _encoded_kinds(message), prompt)


def _filled(message: Mapping[str, Any], kinds: list[str | None], prompt: Prompt) -> Mapping[str, Any]:
    media: dict[str, Iterator[AudioClip | Patches]] = {
        "audio": iter(prompt.audios),
        "image": iter(prompt.images),
        "video": iter(prompt.videos),
    }
    parts = zip(_parts(message), kinds, strict=True)
    return {**message, "content": [{"type": k, "data": next(media[k])} if k else p for p, k in parts]}


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else []


def _kind(part: Any) -> str | None:
    return MEDIA.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def _encoded_kinds(message: Mapping[str, Any]) -> list[str | None]:
    return [
        _kind(p) if isinstance(p, Mapping) and isinstance(p.get("data", ""), str) else None for p in _parts(message)
    ]

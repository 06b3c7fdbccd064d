"""Messages of a conversation that goes on, whose media are decoded once. Pure; called by the engine's sessions, in a
thread. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto.prompt.messages import MEDIA
from stretto.prompt.prompt import AudioClip, Patches
from stretto.prompt.work import Builder


def prepared(builder: Builder, message: Mapping[str, Any], allow_paths: bool = False) -> Mapping[str, Any]:
    """A message with features in place of its media, so that these are decoded once for many prompts."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    kinds = [MEDIA.get(str(p.get("type"))) if isinstance(p, Mapping) else None for p in parts]
    if not any(kinds):
        return message
    prompt = builder.build([message], allow_paths=allow_paths)
    media: dict[str, Iterator[AudioClip | Patches]] = {
        "audio": iter(prompt.audios),
        "image": iter(prompt.images),
        "video": iter(prompt.videos),
    }
    ready = [{"type": k, "data": next(media[k])} if k else p for p, k in zip(parts, kinds, strict=True)]
    return {**message, "content": ready}

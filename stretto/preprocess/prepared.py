"""Messages of a conversation that goes on, whose media are decoded once. Pure; called by the
engine's sessions, what takes long in a thread. Imports no torch.

Media that come as text (a picture in a data URI) are a stranger's: `encoded` sets them apart, so
that they can be decoded where there are limits on time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stretto.preprocess.build import Builder
from stretto.preprocess.messages import MEDIA
from stretto.preprocess.prompt import AudioClip, Patches, Prompt


def prepared(
    builder: Builder, message: Mapping[str, Any], allow_paths: bool = False
) -> Mapping[str, Any]:
    """A message with features in place of its media, so that these are decoded once for many
    prompts."""
    kinds = [_kind(p) for p in _parts(message)]
    if not any(kinds):
        return message
    return _filled(message, kinds, _in_turn(builder.build([message], allow_paths=allow_paths)))


def encoded(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The media that come as text, each at its place, with a word in place of all else; None if
    there are none."""
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
    return _filled(message, _encoded_kinds(message), _in_turn(prompt))


def without_features(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], Prompt]:
    """Messages whose media are features, with the kind of each alone in its place; and the media,
    as a prompt that has nothing else."""
    media: dict[str, list[Any]] = {"audio": [], "image": [], "video": []}

    def bare(part: Any) -> Any:
        kind = _kind(part)
        if kind is None:
            return part
        media[kind].append(part["data"])
        return {"type": kind}

    bared = [
        {**m, "content": [bare(p) for p in _parts(m)]} if any(map(_kind, _parts(m))) else m
        for m in messages
    ]
    return bared, Prompt((), tuple(media["audio"]), tuple(media["image"]), tuple(media["video"]))


def with_features(messages: Any, media: Prompt) -> Any:
    """What `without_features` was given: whatever a message says of a medium gives way to what is
    known of it."""
    if not isinstance(messages, list):
        return messages  # the builder says what is wrong with it
    rest = _in_turn(media)
    return [
        _filled(m, [_kind(p) for p in _parts(m)], rest) if isinstance(m, Mapping) else m
        for m in messages
    ]


def _in_turn(media: Prompt) -> dict[str, Iterator[AudioClip | Patches]]:
    return {"audio": iter(media.audios), "image": iter(media.images), "video": iter(media.videos)}


def _filled(
    message: Mapping[str, Any],
    kinds: list[str | None],
    media: dict[str, Iterator[AudioClip | Patches]],
) -> Mapping[str, Any]:
    if not any(kinds):
        return message
    parts = zip(_parts(message), kinds, strict=True)
    return {
        **message,
        "content": [{"type": k, "data": next(media[k])} if k else p for p, k in parts],
    }


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else []


def _kind(part: Any) -> str | None:
    return MEDIA.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def _encoded_kinds(message: Mapping[str, Any]) -> list[str | None]:
    return [
        _kind(p) if isinstance(p, Mapping) and isinstance(p.get("data", ""), str) else None
        for p in _parts(message)
    ]

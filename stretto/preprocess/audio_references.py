"""References to earlier spoken answers in a conversation, replaced by what was said. Pure; imports
no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.errors import Invalid


def recall(messages: Any, recalled: Mapping[str, str]) -> Any:
    """The messages with every reference to an earlier spoken answer replaced by its words."""
    if not isinstance(messages, list):
        return messages  # the builder says what is wrong with it
    return [_resolve(m, recalled, f"messages[{i}].audio") for i, m in enumerate(messages)]


def _resolve(message: Any, recalled: Mapping[str, str], at: str) -> Any:
    if (
        not isinstance(message, dict)
        or message.get("role") != "assistant"
        or message.get("audio") is None
    ):
        return message
    reference = message["audio"]
    audio_id = reference.get("id") if isinstance(reference, dict) else None
    if not isinstance(audio_id, str):
        raise Invalid(f"{at} must be an object with the id of an earlier answer", at)
    if audio_id not in recalled:
        raise Invalid(
            f"{at}.id: there is no answer {audio_id[:80]!r} (any more); send its words as content",
            at,
        )
    rest = {k: v for k, v in message.items() if k != "audio"}
    return {**rest, "content": recalled[audio_id] or rest.get("content") or ""}

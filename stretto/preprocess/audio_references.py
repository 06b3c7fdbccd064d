"""References to earlier answers in a conversation: found by the server, which knows what they said,
and replaced by that where the prompt is built. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stretto.errors import Invalid

# how the server names spoken answers, and items of responses
ANSWER_ID = re.compile(rb"(audio|msg|fc)_[0-9a-f]{32}")
MAX_REFERENCES = 1024  # they fit into a datagram


def references(data: bytes | memoryview) -> tuple[str, ...]:
    """Ids of earlier answers that JSON may refer to."""
    found: dict[str, None] = {}
    # these have ids where they are sent whole, too: the last ones count
    items: dict[str, None] = {}
    for match in ANSWER_ID.finditer(data):
        if match[1] != b"audio":
            items.pop(id := match[0].decode(), None)
            items[id] = None
            if len(items) > MAX_REFERENCES:
                del items[next(iter(items))]
            continue
        found[match[0].decode()] = None
        if len(found) > MAX_REFERENCES:
            raise Invalid(
                f"the messages refer to over {MAX_REFERENCES} earlier answers", "messages"
            )
    room = MAX_REFERENCES - len(found)
    return (*found, *list(items)[max(0, len(items) - room) :])


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

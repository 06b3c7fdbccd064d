"""From what a client sent to a prompt: the work itself, wherever it runs (a prompt worker, or a thread of the
engine's). Pure functions; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.errors import Invalid
from stretto.fields import NOT_JSON, not_json
from stretto.prompt.build import PromptBuilder
from stretto.prompt.prompt import Prompt

Json = bytes | memoryview


def build_conversation(
    builder: PromptBuilder,
    messages: Any,
    tools: Json | None,
    recalled: Mapping[str, str],
    audio_in_video: bool = False,
) -> Prompt:
    """A prompt of messages from the network: they name no local files."""
    declared = decode(tools, "tools") if tools is not None else None
    return builder.build(recall(messages, recalled), declared or None, audio_in_video, allow_paths=False)


def read_aloud(builder: PromptBuilder, text: str) -> tuple[Prompt, tuple[int, ...]]:
    """The prompt before a text that is read aloud, and the text's tokens."""
    return builder.build([{"role": "user", "content": text}]), tuple(builder.tokenizer.encode(text))


def decode(data: Json, name: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except NOT_JSON as e:
        raise Invalid(f"{name}: {not_json(e)}", name) from None


def has_media(messages: Any) -> bool:
    """Is there anything but text in them? Then a prompt takes longer than a moment."""
    if not isinstance(messages, list):
        return False
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [p for c in contents if isinstance(c, list) for p in c]
    return any(isinstance(p, dict) and p.get("type") != "text" for p in parts)


def recall(messages: Any, recalled: Mapping[str, str]) -> Any:
    """The messages with every reference to an earlier spoken answer replaced by its words."""
    if not isinstance(messages, list):
        return messages  # the builder says what is wrong with it
    return [_resolve(m, recalled, f"messages[{i}].audio") for i, m in enumerate(messages)]


def _resolve(message: Any, recalled: Mapping[str, str], at: str) -> Any:
    if not isinstance(message, dict) or message.get("role") != "assistant" or message.get("audio") is None:
        return message
    reference = message["audio"]
    audio_id = reference.get("id") if isinstance(reference, dict) else None
    if not isinstance(audio_id, str):
        raise Invalid(f"{at} must be an object with the id of an earlier answer", at)
    if audio_id not in recalled:
        raise Invalid(f"{at}.id: there is no answer {audio_id[:80]!r} (any more); send its words as content", at)
    rest = {k: v for k, v in message.items() if k != "audio"}
    return {**rest, "content": recalled[audio_id] or rest.get("content") or ""}


def outline(body: Json, long: Sequence[str], most: int) -> tuple[bytes, dict[str, memoryview]]:
    """A JSON object without its long fields, and these, as they stand in the body."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise Invalid("the request must be a JSON object") from None
    except NOT_JSON as e:
        raise Invalid(not_json(e)) from None
    size = 0
    for name, value in fields.items():
        if name not in long:
            size += len(memoryview(value)) + len(name)
            if size > most:
                others = f"all fields but {', '.join(long)} may have {most:,} bytes"
                raise Invalid(f"{name[:80]} is too large: {others}", name[:80])
    short = {k: v for k, v in fields.items() if k not in long}
    return msgspec.json.encode(short), {k: memoryview(fields[k]) for k in long if k in fields}

"""From what a client sent to a prompt: the work itself, wherever it runs (a prompt worker, or a
thread of the engine's). Pure functions; imports no torch."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import soundfile
from PIL import Image

from stretto._validation import NOT_JSON, not_json, read_json
from stretto.errors import Invalid
from stretto.preprocess.audio_references import recall
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.remote_media import NONE, RemoteMedia, with_content
from stretto.preprocess.response_items import Translation, chat_tools
from stretto.preprocess.template import Tokenizer, check_variables, each_string, well_formed

Json = bytes | memoryview
Form = Literal["chat", "responses"]
"""Messages and tools of a chat, or input items and tools of a response."""


class Builder(Protocol):
    """What a family makes prompts with. Holds no state of a request; called from any thread."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def build(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        *,
        allow_paths: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt for messages in OpenAI's chat format, ending where the assistant's answer
        begins."""
        ...


def build_conversation(
    builder: Builder,
    messages: Any,
    tools: Json | None,
    recalled: Mapping[str, str],
    audio_in_video: bool = False,
    variables: Mapping[str, Any] | None = None,
    remote: RemoteMedia = NONE,
) -> Prompt:
    """A prompt of messages from the network, as `read_messages` gave them: they name no local
    files."""
    declared = decode(tools, "tools") if tools is not None else None
    more: dict[str, Any] = {"variables": check_variables(dict(variables))} if variables else {}
    if not isinstance(messages, Translation):
        plain = with_content(recall(messages, recalled), remote)
        return builder.build(plain, declared or None, audio_in_video, allow_paths=False, **more)
    tools_of_chat = chat_tools(declared) or None
    try:
        plain = with_content(messages.messages, remote)
        return builder.build(plain, tools_of_chat, audio_in_video, allow_paths=False, **more)
    except Invalid as e:
        raise messages.blame(e) from None


def read_messages(
    data: Json, form: Form, instructions: Json | None, recalled: Mapping[str, str]
) -> Any:
    """Messages as `build_conversation` takes them."""
    if form == "chat":
        return decode(data, "messages")
    words = decode(instructions, "instructions") if instructions is not None else None
    return Translation.of(decode(data, "input"), words, recalled)


def read_aloud(
    builder: Builder, text: str, instructions: str = ""
) -> tuple[Prompt, tuple[int, ...]]:
    """The prompt before a text that is read aloud, and the text's tokens. Without text, one that is
    still to be written. Instructions say how it is to be read."""
    system = [{"role": "system", "content": instructions}] if instructions or not text else []
    spoken = [{"role": "user", "content": text}] if text else []
    return builder.build([*system, *spoken]), tuple(builder.tokenizer.encode(text))


def warm(builder: Builder) -> None:
    """Build a prompt of text and with each kind of media once: what that imports and computes is
    there then, for the children of this process too."""
    for part in ({"type": "text", "text": "Hello"}, sound_part(0.1), picture_part()):
        with suppress(
            Exception
        ):  # a model that takes no such media refuses it; what else is wrong is told to clients
            builder.build([{"role": "user", "content": [part]}])


def sound_part(seconds: float) -> dict[str, Any]:
    """A message's part: noise of this length."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(int(24_000 * seconds), dtype=np.float32)
    soundfile.write(file, 0.1 * noise, 24_000, format="WAV")
    return {
        "type": "input_audio",
        "input_audio": {"data": b64encode(file.getvalue()).decode(), "format": "wav"},
    }


def picture_part() -> dict[str, Any]:
    """A message's part: a small black picture."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    url = "data:image/png;base64," + b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def decode(data: Json, name: str) -> Any:
    try:
        return read_json(data, msgspec.json.decode)
    except NOT_JSON as e:
        raise Invalid(f"{name}: {not_json(e)}", name) from None


def encode(value: Any, name: str) -> bytes:
    """What `decode` reads."""
    try:
        return msgspec.json.encode(value)
    except (
        UnicodeEncodeError
    ):  # half of a surrogate pair, which JSON that was decoded elsewhere may hold
        return msgspec.json.encode(each_string(value, well_formed))
    except (TypeError, RecursionError) as e:
        raise Invalid(f"{name}: {e}", name) from None


def has_media(messages: Any) -> bool:
    """Is there anything but text in them? Then a prompt takes longer than a moment."""
    if isinstance(messages, Translation):
        messages = messages.messages
    if not isinstance(messages, list):
        return False
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [p for c in contents if isinstance(c, list) for p in c]
    return any(isinstance(p, dict) and p.get("type") != "text" for p in parts)

"""Reads the items that a client sends: each becomes an entry of the conversation and a message for
the model. Sounds are converted in threads and pictures decoded in the prompt worker where that
takes long. A session has one `ItemReader`, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET

from stretto.engine.events import Message
from stretto.engine.session import INPUT_RATE, Session
from stretto.engine.session import Item as EngineItem
from stretto.errors import Invalid
from stretto.server.realtime import client_events as c
from stretto.server.realtime.audio_formats import FormatName, decode_whole
from stretto.server.realtime.items import (
    Conversation,
    Entry,
    call_message,
    media_bytes,
    new_id,
    text_bytes,
)
from stretto.server.realtime.server_events import Item, Part
from stretto.server.realtime.session_memory import SessionMemory
from stretto.server.service import Service

THREAD_BYTES = 64 << 10  # of an item's sounds; more are converted in a thread
MAX_INLINE_SOUNDS = 4  # converted on the event loop: each has a resampler of its own
MAX_ITEM_BYTES = 768 << 10  # bytes of an item in JSON: clients take messages of up to a MiB
SHOWN_URL = 64 << 10  # characters of a picture's address that events show


@dataclass(slots=True, eq=False)
class ItemReader:
    service: Service
    engine_session: Session
    conversation: Conversation
    client: str
    memory: SessionMemory

    async def read(self, fields: c.Item, format: FormatName) -> tuple[Entry, Message | None]:
        if _has_many_sounds(fields):
            return await asyncio.to_thread(read_item, fields, format)
        return read_item(fields, format)

    def conversion(self, fields: c.Item) -> AbstractAsyncContextManager[None]:
        """A turn for the threads that convert an item's sounds. Pictures are decoded in other
        processes, which have turns of their own."""
        pictures = any(p.image_url for p in fields.content or ())
        if pictures or not _has_many_sounds(fields):
            return nullcontext()
        return self.service.thread_turns.turn(self.client)

    async def read_input(
        self, items: Sequence[c.Item], options_bytes: int, format: FormatName
    ) -> tuple[list[EngineItem], int]:
        """The items that a response answers instead of the conversation, and their bytes. Reserves
        memory for them and for the response's options."""
        size = 0
        out = []
        for number, fields in enumerate(items):
            if fields.type == "item_reference":
                entry = self.conversation.find(fields.id)
                found = self.conversation.engine_item(entry) if entry is not None else None
                if found is None:
                    raise Invalid(f"there is no item {fields.id!r}", "response.input")
                out.append(found)
            else:
                place = f"response.input[{number}]"
                async with self.conversion(fields):
                    entry, message = await self.read(fields, format)
                    if message is None:
                        continue
                    self.memory.reserve(
                        options_bytes + size + entry.size, "conversation_full", place
                    )
                    try:
                        item = await self.engine_session.item(message, id=entry.id)
                    except Invalid as e:
                        raise at_place(e, place) from None
                size += max(entry.size, entry.text_size + media_bytes(item.message))
                self.memory.reserve(options_bytes + size, "conversation_full", place)
                out.append(item)
        return out, size


def _has_many_sounds(fields: c.Item) -> bool:
    sizes = [len(p.audio) for p in fields.content or () if p.audio]
    return sum(sizes) > THREAD_BYTES or len(sizes) > MAX_INLINE_SOUNDS


def at_place(error: Invalid, place: str) -> Invalid:
    """The same error, with the item's place in the event where the engine names a message."""
    param = error.param and error.param.replace("messages[0]", place, 1)
    return Invalid(str(error).replace("messages[0]", place, 1), param)


def read_item(fields: c.Item, format: FormatName) -> tuple[Entry, Message | None]:
    """An item of a client as an entry of the conversation and as a message for the model.

    Converts sound, so a large item belongs in a thread."""
    item, message = _read(fields, format)
    text_size = text_bytes(item)
    if text_size > MAX_ITEM_BYTES:
        raise Invalid(
            f"the item's text has {text_size:,} bytes, more than the {MAX_ITEM_BYTES:,} allowed",
            "item",
        )
    size = text_size + (media_bytes(message) if message is not None else 0)
    return Entry(item, text_size=text_size, size=size), message


def _read(fields: c.Item, format: FormatName) -> tuple[Item, Message | None]:
    id = fields.id or new_id("item")
    if fields.type == "function_call":
        name = _required(fields.name, "item.name")
        call = fields.call_id or new_id("call")
        arguments = fields.arguments or "{}"
        item = Item(
            id, fields.type, status="completed", call_id=call, name=name, arguments=arguments
        )
        return item, call_message(call, name, arguments)
    if fields.type == "function_call_output":
        call = _required(fields.call_id, "item.call_id")
        output = fields.output or ""
        item = Item(id, fields.type, status="completed", call_id=call, output=output)
        return item, {"role": "tool", "tool_call_id": call, "content": output}
    if fields.type != "message":
        raise Invalid(f"an item of type {fields.type} cannot be created", "item.type")
    role = _required(fields.role, "item.role")
    parts = fields.content or []
    item = Item(
        id, "message", status="completed", role=role, content=[_to_wire(p, role) for p in parts]
    )
    if role != "user":
        text = "".join(p.text or p.transcript or "" for p in parts)
        return item, {"role": role, "content": text} if text else None
    content = [part for p in parts if (part := _to_message(p, format)) is not None]
    return item, {"role": "user", "content": content} if content else None


def _required(value: str | None, param: str) -> str:
    if not value:
        raise Invalid(f"{param} is missing", param)
    return value


def _to_wire(part: c.Part, role: str) -> Part:
    """The part with the type that parts of this role have in items, whatever type the client wrote:
    strict clients accept no other."""
    side = "output" if role == "assistant" else "input"
    kind = part.type.rpartition("_")[2]
    if role != "user" and kind == "image":
        raise Invalid(f"there are no pictures in a message of role {role}", "item.content")
    if kind == "text" or role == "system":
        return Part(f"{side}_text", text=part.text or part.transcript or "")
    if kind == "audio":
        return Part(f"{side}_audio", transcript=part.transcript or part.text)
    url = part.image_url or ""
    return Part(
        "input_image",
        image_url=url if len(url) <= SHOWN_URL else UNSET,
        detail=part.detail or UNSET,
    )


def _to_message(part: c.Part, format: FormatName) -> dict[str, Any] | None:
    if part.image_url:
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    if part.audio:
        samples = np.asarray(decode_whole(part.audio, format), np.float32)
        return {"type": "audio", "data": samples, "sample_rate": INPUT_RATE}
    text = part.text or part.transcript
    return {"type": "text", "text": text} if text else None

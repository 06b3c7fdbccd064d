"""Items of a client as messages for the model: their sounds are converted and their pictures
decoded, elsewhere where that takes long. One per session, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from stretto.engine.events import Message
from stretto.engine.session import Item as EngineItem
from stretto.engine.session import Session
from stretto.errors import Invalid
from stretto.server.realtime import client_events as c
from stretto.server.realtime.audio_formats import FormatName
from stretto.server.realtime.items import Conversation, Entry, media_bytes, read_item
from stretto.server.service import Service

THREAD_BYTES = 64 << 10
# of an item, that are converted on the event loop: each has a resampler of its own
MAX_INLINE_SOUNDS = 4


class Problem(Exception):
    """What a client is told in an `error` event."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(slots=True, eq=False)
class ItemReader:
    service: Service
    engine_session: Session
    conversation: Conversation
    sender: str
    reserve: Callable[[int, str, str], None]  # bytes of the session's memory, or a `Problem`

    async def read(self, fields: c.Item, format: FormatName) -> tuple[Entry, Message | None]:
        if _has_many_sounds(fields):
            return await asyncio.to_thread(read_item, fields, format)
        return read_item(fields, format)

    def conversion(self, fields: c.Item) -> AbstractAsyncContextManager[None]:
        """A turn for what is done with an item's sounds in threads. Pictures are decoded in other
        processes, which have turns of their own."""
        pictures = any(p.image_url for p in fields.content or ())
        if pictures or not _has_many_sounds(fields):
            return nullcontext()
        return self.service.thread_turns.turn(self.sender)

    async def read_input(
        self, items: Sequence[c.Item], beside: int, format: FormatName
    ) -> tuple[list[EngineItem], int]:
        """What is answered instead of the conversation, and its bytes, for which there is room with
        so many `beside` them."""
        size = 0
        out = []
        for number, fields in enumerate(items):
            if fields.type == "item_reference":
                entry = next((e for e in self.conversation.entries if e.id == fields.id), None)
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
                    self.reserve(beside + size + entry.size, "conversation_full", place)
                    try:
                        item = await self.engine_session.item(message, id=entry.id)
                    except Invalid as e:
                        raise named(e, place) from None
                size += max(entry.size, entry.text_size + media_bytes(item.message))
                self.reserve(beside + size, "conversation_full", place)
                out.append(item)
        return out, size


def _has_many_sounds(fields: c.Item) -> bool:
    sizes = [len(p.audio) for p in fields.content or () if p.audio]
    return sum(sizes) > THREAD_BYTES or len(sizes) > MAX_INLINE_SOUNDS


def named(error: Invalid, place: str) -> Invalid:
    """The same error with the item's place in the event, where the engine names a message."""
    message, param = (
        text and text.replace("messages[0]", place, 1) for text in (str(error), error.param)
    )
    return Invalid(message or "", param)

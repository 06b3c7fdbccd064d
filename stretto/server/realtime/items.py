"""The conversation as clients see it: items with ids, in order, each with its item in the engine's
session. A realtime session's own tasks use it, on the event loop.

`Conversation` keeps the two in step. An item that says nothing to the model, such as an empty
message, has no counterpart in the engine's session."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np

from stretto.engine.events import Message
from stretto.engine.session import END, Session
from stretto.engine.session import Item as EngineItem
from stretto.errors import Invalid
from stretto.preprocess.prompt import AudioClip, Patches
from stretto.server.realtime.client_events import EventError
from stretto.server.realtime.playback_estimate import Speech
from stretto.server.realtime.server_events import Item, Part

MAX_ITEMS = 4000
FRONT = "root"


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


@dataclass(slots=True, eq=False)
class Entry:
    item: Item
    engine_id: str | None = None  # in the engine's session
    speech: Speech | None = None
    text_size: int = 0  # bytes of the item as clients see it
    size: int = 0  # those, and of what the engine's session has of its media, about

    @property
    def id(self) -> str:
        return self.item.id


@dataclass(slots=True)
class Conversation:
    session: Session
    entries: list[Entry] = field(default_factory=list)
    size: int = 0  # bytes of its entries, about

    @property
    def last_id(self) -> str | None:
        return self.entries[-1].id if self.entries else None

    def find(self, id: str | None) -> Entry | None:
        return next((entry for entry in self.entries if entry.id == id), None)

    def before(self, entry: Entry) -> str | None:
        """The id of the item before it."""
        at = self.entries.index(entry)
        return self.entries[at - 1].id if at else None

    def engine_item(self, entry: Entry) -> EngineItem | None:
        return next((i for i in self.session.items if i.id == entry.engine_id), None)

    def check_new(self, id: str | None) -> None:
        if id == FRONT or self.find(id) is not None:
            raise duplicate_item(f"there is an item {id!r} already")
        if len(self.entries) >= MAX_ITEMS:
            raise Invalid(f"a conversation has at most {MAX_ITEMS} items", "item")

    def append(self, entry: Entry) -> None:
        """Add an entry that the engine's session has already, or will never have."""
        self.entries.append(entry)
        self.size += entry.size

    def resize(self, entry: Entry, size: int) -> None:
        self.size += size - entry.size
        entry.size = size

    async def insert(self, entry: Entry, message: Message | None, after: str | None) -> None:
        """Add an entry behind the item `after`; None: behind all, `FRONT`: before all. What the
        engine refuses is taken out again.

        The entry's size is then that of the features that the engine has made of it, which may be
        many times larger than a compressed picture."""
        place = (
            len(self.entries) if after is None else 0 if after == FRONT else self._place(after) + 1
        )
        self.check_new(entry.id)
        self.entries.insert(place, entry)
        self.size += entry.size
        try:
            await self.update_engine(entry, message)
        except BaseException:
            self.entries.remove(entry)
            self.size -= entry.size
            raise
        if (added := self.engine_item(entry)) is not None:
            features = entry.text_size + media_bytes(added.message)
            self.resize(entry, max(entry.size, features))

    def _place(self, id: str) -> int:
        entry = self.find(id)
        if entry is None:
            raise EventError(
                "item_create_invalid_previous_item_id",
                f"there is no item {id[:128]!r}",
                "previous_item_id",
            )
        return self.entries.index(entry)

    async def update_engine(self, entry: Entry, message: Message | None) -> None:
        """Give the engine's session this message for an entry; None: none, since the entry says
        nothing to the model."""
        engine_ids = self._engine_ids()
        if entry.engine_id is not None:
            if entry.engine_id not in engine_ids:
                return  # the engine has forgotten it, as its context was full
            if message is not None:
                await self.session.replace(entry.engine_id, message)
                return
            await self.session.remove(entry.engine_id)
            entry.engine_id = None
        elif message is not None:
            at = self.entries.index(entry)
            after = next(
                (e.engine_id for e in reversed(self.entries[:at]) if e.engine_id in engine_ids),
                None,
            )
            last = not any(e.engine_id in engine_ids for e in self.entries[at:])
            entry.engine_id = entry.id
            await self.session.add(message, id=entry.id, after=END if last else after)

    async def delete(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.size -= entry.size
        if entry.engine_id is not None and entry.engine_id in self._engine_ids():
            await self.session.remove(entry.engine_id)

    def release_forgotten(self) -> None:
        """Stop counting the media that the engine has forgotten."""
        engine_ids = self._engine_ids()
        for entry in self.entries:
            if entry.engine_id is not None and entry.engine_id not in engine_ids:
                self.resize(entry, entry.text_size)

    def _engine_ids(self) -> set[str]:
        """Ids in the engine's session, which may have forgotten the oldest turns."""
        return {i.id for i in self.session.items}

    async def truncate(self, entry: Entry, played: float) -> None:
        """Forget the words of a spoken answer after this time, which were not played."""
        assert entry.speech is not None
        words = entry.speech.played_text(played)
        entry.item.content = [Part("output_audio", transcript=words)]
        await self.update_engine(entry, {"role": "assistant", "content": words} if words else None)

    def forgotten(self) -> list[str]:
        """Ids in the engine's session without an entry: an answer that the engine stored by
        itself."""
        known = {e.engine_id for e in self.entries}
        return [i.id for i in self.session.items if i.id not in known]


def duplicate_item(message: str) -> EventError:
    return EventError("item_create_duplicate_item_id", message, "item.id")


def text_bytes(item: Item) -> int:
    """Bytes of an item as clients see it."""
    return len(msgspec.json.encode(item))


def media_bytes(message: Message) -> int:
    """Bytes of the features of a message's media, or of its media where it has no features."""
    content = message.get("content")
    return sum(map(_media_bytes, content)) if isinstance(content, list | tuple) else 0


def _media_bytes(part: Mapping[str, Any]) -> int:
    if (picture := part.get("image_url")) is not None:
        return len(picture["url"])
    match part.get("data"):
        case AudioClip(pieces=pieces):
            return sum(4 * prod(p.shape) for p in pieces)
        case Patches(piece=piece):
            return 4 * prod(piece.shape)
        case np.ndarray(nbytes=size):
            return size
    return 0


def call_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}

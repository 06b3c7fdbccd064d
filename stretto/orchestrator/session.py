"""A conversation that goes on: what was said so far, the sound that is coming in, and answers to both. Asyncio.

`engine.session()` makes one. Sound is appended while it is spoken and committed when the turn is over; text, pictures
and earlier answers are added as messages. `respond` answers all that is there. Every method is called on the engine's
event loop, by one task at a time; several sessions go on side by side."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stretto.control.request import Params
from stretto.errors import Gone, Invalid
from stretto.orchestrator.api import Event, Message, Modality, TextDelta

if TYPE_CHECKING:
    from stretto.orchestrator.engine import PipelineEngine

INPUT_RATE = 16_000
"""Of appended sound, samples per second: what the model hears."""
END = "end"
"""Where `add` puts an item unless told otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One entry of the conversation. `message` is in OpenAI's chat format; its parts may hold arrays."""

    id: str
    message: Message


class Session:
    """Made by `engine.session`. `async with` closes it."""

    def __init__(self, engine: PipelineEngine, *, owner: str = "") -> None:
        self._engine, self._owner = engine, owner
        self._name = f"s-{secrets.token_hex(8)}"
        self._items: list[Item] = []
        self._open: list[npt.NDArray[np.float32]] = []
        self._closed = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- sound that is being spoken

    @property
    def pending(self) -> int:
        """Samples that were appended and not committed yet."""
        return sum(map(len, self._open))

    async def append(self, samples: npt.NDArray[np.float32]) -> None:
        """More of the sound that is being spoken: mono, from -1 to 1, at `INPUT_RATE`."""
        self._check()
        self._open.append(np.asarray(samples, np.float32))

    async def clear(self) -> None:
        """Forget what was appended since the last commit."""
        self._check()
        self._open.clear()

    async def commit(self, id: str | None = None) -> Item:
        """The turn is over: what was appended becomes an item of the user, the last one."""
        self._check()
        if not self.pending:
            raise Invalid("there is no sound to commit", "audio")
        samples = np.concatenate(self._open)
        self._open.clear()
        part = {"type": "audio", "data": samples, "sample_rate": INPUT_RATE}
        return await self.add({"role": "user", "content": [part]}, id=id)

    # -- the conversation

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    async def add(self, message: Message, *, id: str | None = None, after: str | None = END) -> Item:
        """A message behind the item called `after`: None puts it in front of all, `END` behind all."""
        self._check()
        item = Item(id or f"item_{secrets.token_hex(12)}", message)
        if any(i.id == item.id for i in self._items):
            raise Invalid(f"there is an item {item.id} already", "item.id")
        place = 0 if after is None else len(self._items) if after == END else self._find(after) + 1
        self._items.insert(place, item)
        return item

    async def remove(self, id: str) -> None:
        self._check()
        del self._items[self._find(id)]

    async def replace(self, id: str, message: Message) -> None:
        """Another message in an item's place: an answer that was cut short keeps the words that were heard."""
        self._check()
        self._items[self._find(id)] = Item(id, message)

    def respond(
        self,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        instructions: str | None = None,
        items: Sequence[Item] | None = None,
        remember: bool = True,
    ) -> AsyncGenerator[Event]:
        """Answer the conversation (or, instead, `items`). Events as those of `Engine.generate`; closing the iterator
        cancels the answer in all stages at once. `remember` adds the answer to the conversation, as far as it came."""
        self._check()
        system = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*system, *(i.message for i in (self._items if items is None else items))]
        events = self._engine.generate(
            messages,
            modalities=modalities,
            voice=voice,
            params=params,
            tools=tools,
            session=self._name,
            owner=self._owner,
        )
        return self._answer(events, remember)

    async def _answer(self, events: AsyncIterator[Event], remember: bool) -> AsyncGenerator[Event]:
        said: list[str] = []
        try:
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, TextDelta):
                        said.append(event.text)
                    yield event
        finally:
            if remember and said and not self._closed:
                await self.add({"role": "assistant", "content": "".join(said)})

    async def close(self) -> None:
        """Give back what the session holds. A running answer is cancelled by whoever reads it."""
        self._closed = True
        self._items.clear()
        self._open.clear()

    def _find(self, id: str) -> int:
        for place, item in enumerate(self._items):
            if item.id == id:
                return place
        raise Invalid(f"there is no item {id}", "item_id")

    def _check(self) -> None:
        if self._closed:
            raise Gone("the session was closed")

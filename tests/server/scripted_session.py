"""The sessions of the scripted engine (`scripted_engine.py`): they hold their conversation and
their sound as real ones do, and are answered by the engine's script."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stretto.engine.events import AudioChunk, Event, Finished, Message, TextDelta, Usage
from stretto.engine.session import END, INPUT_RATE, Item
from stretto.errors import Gone, Invalid

if TYPE_CHECKING:
    from tests.server.scripted_engine import ScriptedEngine

Float = npt.NDArray[np.float32]
RATE = 24_000


@dataclass(slots=True)
class Ask:
    """What an answer is asked for with."""

    messages: Sequence[Message]
    given: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        """What each message says, in short: words, or how much sound."""
        return [short(m) for m in self.messages]


Events = Sequence[Event] | AsyncIterable[Event]
Answers = Callable[[Ask], Events]


def short(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        calls = [c["function"]["name"] for c in message.get("tool_calls", ())]
        return f"{message['role']}: {content}" + "".join(f" <{c}>" for c in calls)
    parts = []
    for part in content:
        match part["type"]:
            case "audio":
                assert part["sample_rate"] == INPUT_RATE
                parts.append(f"[{len(part['data']) / INPUT_RATE:.2f} s]")
            case "text":
                parts.append(part["text"])
            case other:
                parts.append(f"[{other}]")
    return f"{message['role']}: {' '.join(parts)}"


def say(text: str, seconds: float = 1.0, pieces: int = 5) -> list[Event]:
    """Words and sound in turn, as an engine gives them."""
    words = text.split(" ")
    texts = [(" " if i else "") + w for i, w in enumerate(words)]
    size = int(seconds * RATE / pieces)
    out: list[Event] = []
    for i in range(max(len(texts), pieces)):
        if i < len(texts):
            out.append(TextDelta((i,), texts[i]))
        if i < pieces and size:
            out.append(AudioChunk(i * size, tone(size, i)))
    return out


def tone(size: int, seed: int) -> Float:
    return np.random.default_rng(seed).uniform(-0.1, 0.1, size).astype(np.float32)


def plain(ask: Ask) -> Sequence[Event]:
    """An answer that depends on what was asked, so that memory shows."""
    if "Transcribe the" in ask.texts[0]:
        return say("what was said", 0)
    return say(f"I know {len(ask.messages)} messages so far.", 1.0)


@dataclass(slots=True, eq=False)
class ScriptedSession:
    engine: ScriptedEngine
    owner: str = ""
    client: str = ""
    closed: bool = False
    log: list[str] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)  # of the next answer
    _items: list[Item] = field(default_factory=list)
    _open: list[Float] = field(default_factory=list)
    _before: list[Float] | None = None

    @property
    def pending(self) -> int:
        return sum(map(len, self._open))

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    @property
    def dropped(self) -> tuple[str, ...]:
        return ()

    # -- sound

    async def append(self, samples: Float) -> None:
        self._check()
        assert samples.dtype == np.float32
        self._before = None
        self._open.append(samples)

    async def clear(self) -> None:
        self._check()
        self._open.clear()
        self._before = None

    async def commit(self, id: str | None = None, *, maybe: bool = False) -> Item:
        self._check()
        samples = self._sound()
        self._before = self._open[:] if maybe else None
        self._open.clear()
        self.log.append(f"commit {len(samples)}")
        return await self.add({"role": "user", "content": [audio(samples)]}, id=id)

    async def draft(self) -> Item:
        self._check()
        return await self.item({"role": "user", "content": [audio(self._sound())]})

    async def reopen(self, id: str) -> None:
        self._check()
        if self._before is None or self.pending:
            raise Invalid("there is no commit to take back, or sound has come since", "audio")
        await self.remove(id)
        self._open, self._before = self._before, None

    async def read(self) -> None:
        pass

    def _sound(self) -> Float:
        if not self.pending:
            raise Invalid("there is no sound", "audio")
        return np.concatenate(self._open)

    # -- the conversation

    def expect(self, **given: Any) -> None:
        self.expected = given

    async def add(
        self, message: Message, *, id: str | None = None, after: str | None = END
    ) -> Item:
        item = await self.item(message, id=id)
        if item.id in [i.id for i in self._items]:
            raise Invalid(f"there is an item {item.id} already", "item.id")
        place = 0 if after is None else len(self._items) if after == END else self._find(after) + 1
        self._items.insert(place, item)
        return item

    async def item(self, message: Message, *, id: str | None = None) -> Item:
        self._check()
        _check_media(message)
        return Item(id or f"own_{secrets.token_hex(6)}", message)

    async def remove(self, id: str) -> None:
        self._check()
        del self._items[self._find(id)]

    async def replace(self, id: str, message: Message) -> None:
        self._check()
        self._items[self._find(id)] = Item(id, message)

    def respond(self, **given: Any) -> AsyncGenerator[Event]:
        self._check()
        self.engine.check(given)
        items = self._items if given.get("items") is None else given["items"]
        words = given.get("instructions")
        messages = [
            *([{"role": "system", "content": words}] if words else []),
            *(i.message for i in items),
        ]
        if not messages:
            raise Invalid("there is nothing to answer: no items and no instructions", "messages")
        return self._answer(Ask(messages, given))

    async def _answer(self, ask: Ask) -> AsyncGenerator[Event]:
        engine, said, samples = self.engine, [], 0
        name = secrets.token_hex(6)
        spoken, params = engine.check(ask.given)
        engine.asks.append(ask)
        engine.ledger.open(name)
        prompt = 10 * len(ask.messages)
        try:
            if (on_prompt := ask.given.get("on_prompt")) is not None:
                on_prompt(Usage(prompt, 0, 0, 0, 0, 3, 0))
            async with aclosing(engine.play((engine.script or plain)(ask), spoken)) as events:
                async for event in events:
                    match event:
                        case AudioChunk():
                            samples += len(event.samples)
                        case TextDelta():
                            said.append(event.text)
                    yield event
            usage = Usage(prompt, len(said), samples // 1920, samples, 4, 3, 0)
            engine.ledger.finished += 1
            reason = "length" if len(said) >= params.max_text_tokens else "stop"
            seed = params.seed or 7
            yield Finished(reason, "stop" if spoken else None, usage, seed, engine.timeline)
        finally:
            engine.ledger.close(name)
            if ask.given.get("remember", True) and said and not self.closed:
                await self.add({"role": "assistant", "content": "".join(said)})

    async def close(self) -> None:
        self.closed = True
        self._items.clear()
        self._open.clear()

    def _find(self, id: str) -> int:
        for place, item in enumerate(self._items):
            if item.id == id:
                return place
        raise Invalid(f"there is no item {id}", "item_id")

    def _check(self) -> None:
        if self.closed:
            raise Gone("the session was closed")


def _check_media(message: Message) -> None:
    """Refuses what a session refuses, and says it in the same way."""
    content = message["content"]
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if part["type"] == "image_url" and not part["image_url"]["url"].startswith("data:"):
            place = f"messages[0].content[{at}].image_url.url"
            raise Invalid(f"{place}: remote files are not fetched", place)


def audio(samples: Float) -> dict[str, Any]:
    return {"type": "audio", "data": samples, "sample_rate": INPUT_RATE}

"""Words of a turn that goes on: how often the model is asked, and what is sent of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prometheus_client import Counter

from stretto.engine.events import TextDelta
from stretto.engine.session import INPUT_RATE, Item
from stretto.errors import Busy
from stretto.params import Params
from stretto.server.realtime import client_events as ce
from stretto.server.realtime import server_events as s
from stretto.server.realtime.partial_transcripts import STEP_S, STEP_SHARE, PartialTranscripts
from stretto.server.realtime.transcribe import PRIORITY, TranscriptionOptions
from tests.server.scripted_engine import ScriptedEngine

TURNS = 20  # of the event loop: after so many, all that can run has run


@dataclass(slots=True)
class Turn:
    """The engine's session while a turn is spoken; its transcripts are `texts`, one after the
    other, and the last again and again."""

    texts: list[str | Exception]
    pending: int = 0
    asked: list[float] = field(default_factory=list)  # seconds of sound
    params: list[Params] = field(default_factory=list)
    running: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def draft(self) -> Item:
        await asyncio.sleep(0)
        return Item("draft", {"role": "user", "content": [{"type": "audio"}]})

    def respond(self, *, params: Params, **_: Any) -> AsyncGenerator[TextDelta]:
        self.asked.append(self.pending / INPUT_RATE)
        self.params.append(params)
        return self._answer(self.texts.pop(0) if len(self.texts) > 1 else self.texts[0])

    async def _answer(self, text: str | Exception) -> AsyncGenerator[TextDelta]:
        self.running += 1
        try:
            await self.gate.wait()
            if isinstance(text, Exception):
                raise text
            yield TextDelta((1,), text)
        finally:
            self.running -= 1


@dataclass(slots=True)
class Listener:
    turn: Turn
    events: list[Any] = field(default_factory=list)
    partials: PartialTranscripts = field(init=False)

    def __post_init__(self) -> None:
        count = Counter("partials", "of a test", registry=None)
        self.partials = PartialTranscripts(self.turn, self, count)  # type: ignore[arg-type]

    def put(self, event: Any) -> None:
        self.events.append(event)

    def begin(self, item_id: str) -> None:
        self.partials.begin(
            item_id, TranscriptionOptions(ScriptedEngine().info, ce.Transcription())
        )

    async def hear(self, seconds: float) -> None:
        self.turn.pending += int(seconds * INPUT_RATE)
        self.partials.wake()
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @property
    def words(self) -> list[str]:
        assert all(isinstance(e, s.TranscriptionDelta) for e in self.events)
        return [e.delta for e in self.events]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_the_work_for_a_turn_grows_with_its_length_and_no_faster() -> None:
    """However often sound comes; and it waits behind answers."""

    async def main() -> None:
        turn = Turn(["nothing certain"])
        turn.gate.set()
        listener = Listener(turn)
        listener.begin("a")
        for _ in range(600):
            await listener.hear(0.1)
        await listener.partials.end()
        assert turn.asked[0] >= STEP_S
        for before, now in pairwise(turn.asked):
            assert now >= before + max(STEP_S, STEP_SHARE * before) - 0.01
        assert {p.priority for p in turn.params} == {PRIORITY}

    run(main())


def test_a_transcript_that_fails_is_made_again_with_more_of_the_turn() -> None:
    async def main() -> None:
        turn = Turn(["one", Busy("full"), RuntimeError("a bug"), "one two three"])
        turn.gate.set()
        listener = Listener(turn)
        listener.begin("a")
        for _ in range(6):
            await listener.hear(1.0)
        assert await listener.partials.end() == "one two"

    run(main())


def test_nothing_that_was_sent_is_contradicted() -> None:
    async def main() -> None:
        texts = ["one two", "one two", "won two three", "won two three", "one two three"]
        turn = Turn([f"{text} mumble" for text in texts])
        turn.gate.set()
        listener = Listener(turn)
        listener.begin("a")
        for _ in range(4):
            await listener.hear(1.0)
        assert listener.words == ["one two"]
        for _ in range(2):
            await listener.hear(1.0)
        assert listener.words == ["one two", " three"]
        assert await listener.partials.end() == "one two three"

    run(main())


def test_a_turn_ends_the_work_for_the_one_before() -> None:
    """Where the client changes how turns are found within one, nobody has said that it is over."""

    async def main() -> None:
        turn = Turn(["one"])
        listener = Listener(turn)
        listener.begin("a")
        await listener.hear(1.0)
        assert turn.running == 1
        listener.begin("b")
        await listener.hear(0.0)
        assert turn.running == 1, "that of the new turn"
        await listener.partials.end()
        assert turn.running == 0

    run(main())

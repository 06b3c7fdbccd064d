"""What the server says in a session: the conversation's response, those beside it, and one that may
be too early.

Owned by the session, which decides when to answer; on the event loop, each response in a task of
its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stretto.engine.protocol import EngineClient, Usage
from stretto.engine.session import Item as EngineItem
from stretto.engine.session import Session
from stretto.server.openai.tools import ToolParser
from stretto.server.realtime.items import Conversation, new_id
from stretto.server.realtime.options import Options
from stretto.server.realtime.outbox import Outbox
from stretto.server.realtime.response import Reason, Response, SpeechEnd, clock
from stretto.server.realtime.writer import Writer
from stretto.server.service import Service

MAX_BESIDE = 4  # responses beside the conversation, at once


@dataclass(slots=True)
class Guess:
    """An answer that was begun at a pause, before the turn has certainly ended."""

    response: Response
    item: EngineItem


@dataclass(slots=True, eq=False)
class Speaker:
    service: Service
    engine: EngineClient
    talk: Session  # the engine's
    outbox: Outbox
    sender: str
    conversation: Conversation
    options: Callable[[], Options]  # of answers that the client has not asked for itself
    on_begin: Callable[[], None]  # a response of the conversation is told to the client
    on_end: Callable[[Response], None]  # it is over, by itself
    active: Response | None = None  # of the conversation; told to the client
    spoken: bool = False  # something was heard: then the voice stays
    guess: Guess | None = None
    beside: set[Response] = field(default_factory=set)
    _answer_next: bool = False  # a turn ended while an answer was running
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _conversation_id: str = field(default_factory=lambda: new_id("conv"))

    @property
    def busy(self) -> bool:
        """Something is being said, or is about to be."""
        return self.active is not None or bool(self.beside) or self.guess is not None

    @property
    def sounded(self) -> asyncio.Event | None:
        """Of the conversation's response, if there is one: its first sound was sent, or it is
        over."""
        return self.active.sounded if self.active is not None else None

    async def close(self) -> None:
        """End all that runs; nothing of it is told any more."""
        self._answer_next = False
        guessed = [self.guess.response] if self.guess is not None else []
        running = [self.active] if self.active is not None else []
        for response in (*guessed, *running, *self.beside):
            response.over = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- responses

    def make(
        self,
        options: Options,
        *,
        beside: bool = False,
        metadata: dict[str, str] | None = None,
        items: list[EngineItem] | None = None,
    ) -> Response:
        tools = options.chat_tools()
        config = self.service.config

        def start(on_prompt: Callable[[Usage], None]) -> Any:
            return self.talk.respond(
                modalities=("text", "audio") if options.spoken else ("text",),
                voice=options.voice if options.spoken else None,
                params=options.params(config.packets, self.engine.info.defaults),
                tools=tools,
                instructions=options.instructions or None,
                items=items,
                remember=not beside,
                on_prompt=on_prompt,
            )

        conversation = None if beside else self.conversation
        writer = Writer(
            options,
            self.engine.info,
            self.outbox.put,
            conversation,
            self._conversation_id,
            metadata=metadata,
        )
        return Response(
            writer=writer,
            start=start,
            outbox=self.outbox,
            admission=self.service.admission,
            sender=self.sender,
            lead=config.realtime_lead,
            parser=ToolParser() if tools else None,
        )

    def say(self, response: Response) -> None:
        """Begin the conversation's response."""
        self._activate(response)
        self._begin(response)

    def say_beside(self, response: Response) -> None:
        self.beside.add(response)
        response.release()
        self._begin(response)

    def answer(self, speech_end: SpeechEnd | None) -> None:
        """Answer a turn that the server has found; when the answer that runs is over, if one
        does."""
        if self.active is not None:
            self._answer_next = True
            return
        response = self.make(self.options())
        response.speech_end = speech_end
        self.say(response)

    def _activate(self, response: Response) -> None:
        """This is the conversation's response now, and the client hears of it."""
        self.active = response
        self.on_begin()
        response.release()

    def _begin(self, response: Response) -> None:
        task = asyncio.create_task(self._run(response), name="response")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        response.task = task

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        finally:
            self._count(response)
            self.beside.discard(response)
            if self.active is response:
                self.active = None
                self._after(response)

    def _count(self, response: Response) -> None:
        metrics = self.service.metrics.realtime
        if response.status != "in_progress":
            metrics.responses.labels(response.status).inc()
        if (seconds := response.speech_to_audio) is not None:
            metrics.first_audio.observe(seconds)

    def _after(self, response: Response) -> None:
        """A response of the conversation is over."""
        self.spoken = self.spoken or response.playback.sent > 0
        self.on_end(response)
        if self._answer_next and not self.service.draining:
            self._answer_next = False
            self.answer(None)

    # -- interruption

    async def interrupt(self, reason: Reason) -> bool:
        """Stop what is being said, at once; whether anything was."""
        self._answer_next = False
        response = self.active
        if response is None or not response.cancel(reason):
            return False
        since = clock()
        self.active = None
        await response.ended()
        metrics = self.service.metrics.realtime
        metrics.cancel.observe(clock() - since)
        metrics.barge_in.labels("speech" if reason == "turn_detected" else "client").inc()
        self.spoken = self.spoken or response.playback.sent > 0
        await response.forget_unheard()
        return True

    async def cancel(self, id: str | None) -> bool:
        """The client wants this response (None: the conversation's) to end; whether there was
        one."""
        beside = next((r for r in self.beside if r.id == id), None)
        if beside is not None:
            beside.cancel("client_cancelled")
            await beside.ended()
            self.beside.discard(beside)
            return True
        if id is not None and (self.active is None or self.active.id != id):
            return False
        return await self.interrupt("client_cancelled")

    # -- answers begun before the turn is surely over

    async def make_guess(self, item_id: str) -> None:
        """Answer what was said so far, and tell nobody."""
        item = await self.talk.commit(item_id, maybe=True)
        response = self.make(self.options())
        response.speculative = True
        self.guess = Guess(response, item)
        self._begin(response)

    async def guessed(self) -> EngineItem | None:
        """The turn of the guess is over: its item. None if there is no guess, or it failed."""
        if self.guess is not None and self.guess.response.error is not None:
            await self.drop_guess()  # it may work now
        return self.guess.item if self.guess is not None else None

    def tell_guess(self, speech_end: SpeechEnd) -> None:
        """It is the answer: the client hears of it, and of what was held back."""
        guess = self.guess
        self.guess = None
        assert guess is not None
        self.service.metrics.realtime.speculations.labels("kept").inc()
        guess.response.speech_end = speech_end
        self._activate(guess.response)

    async def drop_guess(self) -> None:
        """The turn goes on: nobody hears of that answer, and the engine has the sound as if there
        had been none."""
        guess = self.guess
        self.guess = None
        if guess is None:
            return
        self.service.metrics.realtime.speculations.labels("dropped").inc()
        guess.response.cancel("turn_detected")
        await guess.response.ended()
        for id in self.conversation.forgotten():
            if id != guess.item.id:  # what there was of its answer
                await self.talk.remove(id)
        await self.talk.reopen(guess.item.id)

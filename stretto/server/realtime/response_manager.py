"""The responses of a session: the conversation's, out-of-band ones, and a speculative one, which
may be too early.

Owned by the session, which decides when to answer; on the event loop, each response in a task of
its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial

from stretto.engine.events import Event, Usage
from stretto.engine.protocol import EngineClient
from stretto.engine.session import Item as EngineItem
from stretto.engine.session import Session
from stretto.server.openai.grammar import LONG
from stretto.server.openai.tools import ToolParser
from stretto.server.realtime.answer_log import AnswerRecorder
from stretto.server.realtime.items import Conversation, new_id
from stretto.server.realtime.options import Options, tools_size
from stretto.server.realtime.response import Reason, ResponseTask, SpeechEnd, clock
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.writer import ResponseWriter
from stretto.server.service import Service

MAX_OUT_OF_BAND = 4  # at once


@dataclass(slots=True)
class SpeculativeResponse:
    """An answer that was begun at a pause, before the turn has certainly ended."""

    response: ResponseTask
    item: EngineItem


@dataclass(slots=True, eq=False)
class ResponseManager:
    service: Service
    engine: EngineClient
    engine_session: Session
    send_queue: SendQueue
    sender: str
    conversation: Conversation
    recorder: AnswerRecorder
    options: Callable[[], Options]  # of answers that the client has not asked for itself
    on_begin: Callable[[], None]  # a response of the conversation is told to the client
    on_end: Callable[[ResponseTask], None]  # it is over, by itself
    on_release: Callable[[], None]  # what a response held is free, and its words are stored
    active: ResponseTask | None = None  # of the conversation; told to the client
    voice_locked: bool = False  # sound was sent: then the voice stays
    speculative: SpeculativeResponse | None = None
    out_of_band: set[ResponseTask] = field(default_factory=set)
    held_bytes: int = 0  # of what responses were asked with
    _answer_next: bool = False  # a turn ended while an answer was running
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _conversation_id: str = field(default_factory=lambda: new_id("conv"))

    @property
    def busy(self) -> bool:
        """Something is being said, or is about to be."""
        return self.active is not None or bool(self.out_of_band) or self.speculative is not None

    @property
    def audio_started(self) -> asyncio.Event | None:
        """Of the conversation's response, if there is one: its first sound was sent, or it is
        over."""
        return self.active.audio_started if self.active is not None else None

    async def close(self) -> None:
        """End all that runs; nothing of it is told any more."""
        self._answer_next = False
        speculative = [self.speculative.response] if self.speculative is not None else []
        running = [self.active] if self.active is not None else []
        for response in (*speculative, *running, *self.out_of_band):
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
        out_of_band: bool = False,
        metadata: dict[str, str] | None = None,
        items: list[EngineItem] | None = None,
        items_bytes: int = 0,
    ) -> ResponseTask:
        tools = options.chat_tools()
        config = self.service.config

        async def start(on_prompt: Callable[[Usage], None]) -> AsyncGenerator[Event]:
            grammar = await self._grammar(options)
            spoken = options.has_audio and not grammar  # a call is not read aloud
            return self.engine_session.respond(
                modalities=("text", "audio") if spoken else ("text",),
                voice=options.voice if spoken else None,
                params=options.params(config.packets, self.engine.info.defaults, grammar),
                tools=tools,
                instructions=options.instructions or None,
                items=items,
                remember=not out_of_band,
                on_prompt=on_prompt,
            )

        conversation = None if out_of_band else self.conversation
        writer = ResponseWriter(
            options,
            self.engine.info,
            self.send_queue.put,
            conversation,
            self._conversation_id,
            metadata=metadata,
        )
        return ResponseTask(
            writer=writer,
            start=start,
            send_queue=self.send_queue,
            admission=self.service.admission,
            sender=self.sender,
            lead=config.realtime_lead,
            held_bytes=options.num_bytes + items_bytes,
            parser=ToolParser() if tools else None,
        )

    async def _grammar(self, options: Options) -> str:
        if not options.call_required:
            return ""
        if tools_size(options.tools) <= LONG:
            return options.grammar()
        async with self.service.thread_turns.turn(self.sender):
            return await asyncio.to_thread(options.grammar)

    def start_response(self, response: ResponseTask) -> None:
        """Begin the conversation's response."""
        self._announce(response)
        self._run_task(response)

    def start_out_of_band(self, response: ResponseTask) -> None:
        self.out_of_band.add(response)
        response.release()
        self._run_task(response)

    def answer_turn(self, speech_end: SpeechEnd | None) -> None:
        """Answer a turn that the server has found; when the answer that runs is over, if one
        does."""
        if self.active is not None:
            self._answer_next = True
            return
        response = self.make(self.options())
        response.speech_end = speech_end
        self.start_response(response)

    def _announce(self, response: ResponseTask) -> None:
        """This is the conversation's response now, and the client hears of it."""
        self.active = response
        self.on_begin()
        response.release()

    def _run_task(self, response: ResponseTask) -> None:
        task = asyncio.create_task(self._run(response), name="response")
        self._tasks.add(task)
        self.held_bytes += response.held_bytes
        # Not in `_run`: a task that is cancelled before its first step never runs.
        task.add_done_callback(partial(self._release, response))
        response.task = task

    def _release(self, response: ResponseTask, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.held_bytes -= response.held_bytes
        self.recorder.record(response.closing_log(), task)
        self.on_release()

    async def _run(self, response: ResponseTask) -> None:
        try:
            await response.run()
        finally:
            self.out_of_band.discard(response)
            if self.active is response:
                self.active = None
                self._on_response_end(response)

    def _on_response_end(self, response: ResponseTask) -> None:
        """A response of the conversation is over."""
        self.voice_locked = self.voice_locked or response.playback.sent > 0
        self.on_end(response)
        if self._answer_next and not self.service.draining:
            self._answer_next = False
            self.answer_turn(None)

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
        self.voice_locked = self.voice_locked or response.playback.sent > 0
        await response.forget_unheard()
        return True

    async def cancel(self, id: str | None) -> bool:
        """The client wants this response (None: the conversation's) to end; whether there was
        one."""
        out_of_band = next((r for r in self.out_of_band if r.id == id), None)
        if out_of_band is not None:
            out_of_band.cancel("client_cancelled")
            await out_of_band.ended()
            self.out_of_band.discard(out_of_band)
            return True
        if id is not None and (self.active is None or self.active.id != id):
            return False
        return await self.interrupt("client_cancelled")

    # -- answers begun before the turn is surely over

    async def start_speculative(self, item_id: str) -> None:
        """Answer what was said so far, and tell nobody."""
        item = await self.engine_session.commit(item_id, maybe=True)
        response = self.make(self.options())
        response.speculative = True
        self.speculative = SpeculativeResponse(response, item)
        self._run_task(response)

    async def speculative_item(self) -> EngineItem | None:
        """The turn of the guess is over: its item. None if there is no guess, or it failed."""
        if self.speculative is not None and self.speculative.response.error is not None:
            await self.cancel_speculative()  # it may work now
        return self.speculative.item if self.speculative is not None else None

    def confirm_speculative(self, speech_end: SpeechEnd) -> None:
        """It is the answer: the client hears of it, and of what was held back."""
        speculative = self.speculative
        self.speculative = None
        assert speculative is not None
        self.service.metrics.realtime.speculations.labels("kept").inc()
        speculative.response.speech_end = speech_end
        self._announce(speculative.response)

    async def cancel_speculative(self) -> None:
        """The turn goes on: nobody hears of that answer, and the engine has the sound as if there
        had been none."""
        speculative = self.speculative
        self.speculative = None
        if speculative is None:
            return
        how = "dropped" if speculative.response.error is None else "failed"
        self.service.metrics.realtime.speculations.labels(how).inc()
        speculative.response.cancel("turn_detected")
        await speculative.response.ended()
        for id in self.conversation.forgotten():
            if id != speculative.item.id:  # what there was of its answer
                await self.engine_session.remove(id)
        await self.engine_session.reopen(speculative.item.id)

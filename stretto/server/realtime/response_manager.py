"""The responses of a session: the conversation's, out-of-band ones, and a speculative one, which
may be too early.

The session owns it and decides when to answer; each response runs in a task of its own, on the
event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from stretto.engine.protocol import EngineClient
from stretto.engine.session import Item as EngineItem
from stretto.engine.session import Session
from stretto.server.realtime.answer_log import AnswerRecorder
from stretto.server.realtime.audio_input import AudioInput
from stretto.server.realtime.items import Conversation, new_id
from stretto.server.realtime.options import Options
from stretto.server.realtime.response import Reason, ResponseTask, SpeechEnd, clock
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.session_memory import SessionMemory
from stretto.server.realtime.writer import ResponseWriter
from stretto.server.service import Service

MAX_OUT_OF_BAND = 4  # at once


@dataclass(slots=True, eq=False)
class ResponseManager:
    service: Service
    engine: EngineClient
    engine_session: Session
    send_queue: SendQueue
    client: str
    conversation: Conversation
    audio_input: AudioInput
    recorder: AnswerRecorder
    memory: SessionMemory
    options: Options  # of answers that the server begins by itself
    active: ResponseTask | None = None  # the conversation's, which the client knows of
    voice_locked: bool = False  # sound was sent: the voice stays
    speculative: ResponseTask | None = None
    out_of_band: set[ResponseTask] = field(default_factory=set)
    _running: set[ResponseTask] = field(default_factory=set)
    _answer_next: bool = False  # a turn ended while an answer was running
    _conversation_id: str = field(default_factory=lambda: new_id("conv"))

    @property
    def busy(self) -> bool:
        """An answer is being made."""
        return self.active is not None or bool(self.out_of_band) or self.speculative is not None

    async def wait_for_audio(self, grace_s: float) -> None:
        """Wait until the conversation's response has sent its first sound, or is over. If none is
        running, wait `grace_s` for one to start."""
        if self.active is None:
            await asyncio.sleep(grace_s)
        if self.active is not None:
            await self.active.audio_started.wait()

    def configure(self, options: Options) -> None:
        self.options = options

    async def close(self) -> None:
        """End all that runs, without another event."""
        self._answer_next = False
        running = tuple(self._running)
        for response in running:
            response.abandon()
        await asyncio.gather(*(response.ended() for response in running))

    # -- responses

    def make(
        self,
        options: Options,
        *,
        out_of_band: bool = False,
        metadata: dict[str, str] | None = None,
        items: list[EngineItem] | None = None,
        items_bytes: int = 0,
        turn: EngineItem | None = None,
    ) -> ResponseTask:
        writer = ResponseWriter(
            options,
            self.engine.info,
            self.send_queue,
            None if out_of_band else self.conversation,
            self._conversation_id,
            metadata=metadata,
        )
        return ResponseTask(
            writer,
            self.service,
            self.engine_session,
            self.send_queue,
            self.client,
            items=items,
            num_bytes=options.num_bytes + items_bytes,
            turn=turn,
        )

    def start_response(self, response: ResponseTask, speech_end: SpeechEnd | None) -> None:
        """Begin the conversation's response."""
        self._announce(response, speech_end)
        self._start(response)

    def start_out_of_band(self, response: ResponseTask, speech_end: SpeechEnd | None) -> None:
        self.out_of_band.add(response)
        response.release(speech_end)
        self._start(response)

    def answer_turn(self, speech_end: SpeechEnd | None) -> None:
        """Answer a turn that the server has found: now, or when the running answer is over."""
        if self.active is not None:
            self._answer_next = True
        else:
            self.start_response(self.make(self.options), speech_end)

    def _announce(self, response: ResponseTask, speech_end: SpeechEnd | None) -> None:
        """This is the conversation's response now, and the client gets its events."""
        self.active = response
        self.audio_input.end_idle()
        response.release(speech_end)

    def _start(self, response: ResponseTask) -> None:
        self._running.add(response)
        self.memory.add_task(response.num_bytes)
        # Not in `_run`: a task that is cancelled before its first step never runs.
        response.start(self._run(response)).add_done_callback(partial(self._record, response))

    def _record(self, response: ResponseTask, task: asyncio.Task[None]) -> None:
        self._running.discard(response)
        self.recorder.record(response.closing_log(), task)
        self.memory.remove_task(response.num_bytes)

    async def _run(self, response: ResponseTask) -> None:
        try:
            await response.run()
        finally:
            self.out_of_band.discard(response)
            if self.active is response:
                self.active = None
                self._on_response_end(response)

    def _on_response_end(self, response: ResponseTask) -> None:
        """A response of the conversation has ended by itself."""
        self.voice_locked = self.voice_locked or response.playback.sent > 0
        self.audio_input.begin_idle(response.playback.lead)
        if self._answer_next and not self.service.draining:
            self._answer_next = False
            self.answer_turn(None)

    # -- interruption

    async def interrupt(self, reason: Reason) -> bool:
        """Stop the conversation's response at once; whether there was one."""
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
        """End this response for the client (None: the conversation's); whether there was one."""
        out_of_band = next((r for r in self.out_of_band if r.id == id), None)
        if out_of_band is not None:
            out_of_band.cancel("client_cancelled")
            await out_of_band.ended()
            self.out_of_band.discard(out_of_band)
            return True
        if id is not None and (self.active is None or self.active.id != id):
            return False
        return await self.interrupt("client_cancelled")

    # -- answers begun before the turn has certainly ended

    async def start_speculative(self, item_id: str) -> None:
        """Answer the turn as it is so far; the client gets no event of it yet."""
        turn = await self.engine_session.commit(item_id, maybe=True)
        self.speculative = self.make(self.options, turn=turn)
        self._start(self.speculative)

    async def speculative_turn(self) -> EngineItem | None:
        """The turn has ended: its item, if a speculative response to it is under way."""
        if self.speculative is not None and self.speculative.error is not None:
            await self.cancel_speculative()  # another attempt may succeed
        return self.speculative.turn if self.speculative is not None else None

    def confirm_speculative(self, speech_end: SpeechEnd) -> None:
        """The turn has ended: the speculative response is its answer, and the client gets the
        events that were held back."""
        response = self.speculative
        self.speculative = None
        assert response is not None
        self.service.metrics.realtime.speculations.labels("kept").inc()
        self._announce(response, speech_end)

    async def cancel_speculative(self) -> None:
        """The turn goes on: the client gets no event of that answer, and the engine's turn is open
        again as if there had been none."""
        response = self.speculative
        self.speculative = None
        if response is None:
            return
        assert response.turn is not None
        how = "dropped" if response.error is None else "failed"
        self.service.metrics.realtime.speculations.labels(how).inc()
        response.cancel("turn_detected")
        await response.ended()
        for id in self.conversation.forgotten():
            if id != response.turn.id:  # the part of its answer that was made
                await self.engine_session.remove(id)
        await self.engine_session.reopen(response.turn.id)

"""The engine: requests in, events out, over one or more pipelines of host processes. Asyncio; imports no torch.

It builds the prompt, chooses a pipeline, mints the one request id, announces the request to every stage that it needs
at once (text-only requests never touch talker or code2wav), and passes on what the stages report. Tensors never come
here, and neither does a chunk: text goes from thinker to talker, and frames from talker to code2wav, over their own
links. All on the event loop, but for the prompt: what came over the network is decoded and built by the prompt worker,
a process of its own; what a caller of this process gave, in a thread."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto import errors
from stretto.errors import Busy, Invalid, StageDead, StrettoError
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, OmniConfig
from stretto.orchestrator.admission import Ask, Names, announce, fitted
from stretto.orchestrator.api import (
    AudioChunk,
    CodeFrames,
    Event,
    Finished,
    Message,
    Modality,
    ModelInfo,
    Params,
    Progress,
)
from stretto.orchestrator.messages import Cancel, Codes, Ended, Failed, FromHost, Pcm, Text
from stretto.orchestrator.pipeline import Pipeline, labelled
from stretto.orchestrator.routing import Router
from stretto.orchestrator.settings import EngineConfig
from stretto.orchestrator.ticket import Ticket
from stretto.prompt.build import PromptBuilder
from stretto.prompt.jobs import BuiltPrompt, Conversation, Outlined
from stretto.prompt.packed import Packed
from stretto.prompt.pool import PromptPool
from stretto.prompt.spool import Spool
from stretto.prompt.template import TextStream
from stretto.prompt.threads import InThreads, Prompts
from stretto.types import RequestId

log = logging.getLogger(__name__)
WATCH_S = 0.25
LATE_S = WATCH_S + 0.5
PING_EVERY = 4  # looks
PATIENCE = 4  # times `stall_s` that a request may wait in line for rows that others hold


class PipelineEngine:
    """Implements `api.Engine`. Made by `open`."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        self.config = config
        self.model = OmniConfig.read(model)
        self._builder = PromptBuilder.open(model, self.model)
        self._threads = InThreads(self._builder)
        self._prompts: Prompts = PromptPool(model, config.prompts) if config.prompts else self._threads
        t = self.model.talker
        self._info = ModelInfo(
            name=model.name,
            voices=tuple(t.speakers),
            default_voice=t.default_voice,
            sample_rate=SAMPLE_RATE_OUT,
            max_positions=min(self.model.thinker.text.max_positions, config.host.max_context),
        )
        self._pipelines = [
            Pipeline(f"p{i}", str(model), config, self._message, self._loss) for i in range(config.replicas)
        ]
        self._accepted = 0  # requests, those included whose prompt is being built and that have no ticket yet
        self._tickets: dict[RequestId, Ticket] = {}
        self._router, self._names = Router(self._pipelines, config), Names()
        self._counts = {"requests": 0, "finished": 0, "failed": 0, "cancelled": 0, "refused": 0}
        self._watcher: asyncio.Task[None] | None = None
        self._draining = self._closed = False
        self._up = False
        self._error: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._pings = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, model: str | Path, config: EngineConfig | None = None) -> AsyncIterator[PipelineEngine]:
        engine = cls(Path(model), config or EngineConfig())
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    async def start(self) -> None:
        """Start all hosts and wait until they are ready."""
        try:
            await asyncio.gather(self._prompts.start(), *(p.start() for p in self._pipelines))
        except StrettoError as e:
            self._error = str(e)
            raise
        self._up = True
        self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")

    # -- what others may ask

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def progress(self) -> Progress:
        stages = {
            (stage if len(self._pipelines) == 1 else f"{p.name}.{stage}"): what
            for p in self._pipelines
            for stage, what in p.progress.items()
        }
        if self._error is not None:
            return Progress("dead", stages, self._error)
        if not self._up:
            return Progress("loading", stages)
        if self._draining:
            return Progress("draining", stages)
        if not any(p.ready(speak=False) for p in self._pipelines):
            return Progress("dead", stages, "no pipeline is up")
        return Progress("ready", stages)

    def metrics(self) -> Mapping[str, float]:
        values = {f"stretto_engine_{k}_total": float(v) for k, v in self._counts.items()}
        values["stretto_engine_running"] = self._accepted
        values |= self._prompts.metrics()
        for p in self._pipelines:
            own = p.metrics()
            values |= own if len(self._pipelines) == 1 else {labelled(k, "replica", p.name): v for k, v in own.items()}
        return values

    # -- requests

    def generate(
        self,
        messages: Sequence[Message] | Conversation,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: RequestId | None = None,
        session: str | None = None,
        owner: str = "",
        allow_paths: bool = False,
        use_audio_in_video: bool = False,
    ) -> AsyncIterator[Event]:
        speak = self._check(modalities, voice)

        async def build() -> BuiltPrompt:
            if isinstance(messages, Conversation):
                try:
                    return await self._prompts.build(messages, use_audio_in_video)
                finally:
                    messages.close()
            given = [dict(m) for m in messages], [dict(t) for t in tools] if tools else None, use_audio_in_video
            return await self._threads.build_local(*given, allow_paths=allow_paths)

        return self._run(build, Ask(speak, voice, params or Params(), request_id, session=session, owner=owner))

    def speak(
        self,
        text: str,
        *,
        voice: str | None = None,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        sender: str = "",
    ) -> AsyncIterator[Event]:
        self._check(("audio",), voice)
        if not text.strip():
            raise Invalid("there is nothing to say", "input")
        ask = Ask(True, voice, params or Params(), request_id, owner=owner)
        return self._run(lambda: self._prompts.read(text, sender), ask)

    def _check(self, modalities: Sequence[Modality], voice: str | None) -> bool:
        unknown = set(modalities) - {"text", "audio"}
        if unknown or not modalities:
            raise Invalid(f"modalities must be text and/or audio, got {sorted(modalities)}", "modalities")
        if voice is not None:
            self.model.talker.speaker_id(voice)
        if self._draining:
            raise Busy("the server is shutting down")
        return "audio" in modalities

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        return await self._prompts.outline(body, long, most, sender)

    async def _run(self, build: Callable[[], Awaitable[BuiltPrompt]], ask: Ask) -> AsyncIterator[Event]:
        with self._place():
            arrived = time.monotonic()
            prompt = await build()
            ask = replace(ask, spoken=prompt.spoken)
            ticket = self._admit(prompt.packed, ask, arrived)
            del prompt  # its features go as soon as they are sent
            try:
                await announce(ticket, ask, self.config.share_prefix_cache)
                while not ticket.over:
                    event = await ticket.events.get()
                    if isinstance(event, StrettoError):
                        raise event
                    if isinstance(event, AudioChunk):
                        ticket.take(len(event.samples), self.config.max_buffered_s)
                    if isinstance(event, Finished):
                        ticket.over = True
                    yield event
            finally:
                self._leave(ticket)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for requests, from before the prompt is built to the last event; `drain` waits for all."""
        if self._draining:  # since it was asked for
            raise Busy("the server is shutting down")
        if self._accepted >= self.config.max_requests:
            self._counts["refused"] += 1
            raise Busy(f"{self.config.max_requests} requests are running already")
        self._accepted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._accepted -= 1
            if not self._accepted:
                self._idle.set()

    def _admit(self, prompt: Packed, ask: Ask, arrived: float) -> Ticket:
        if self._closed:
            raise errors.Gone("the engine was closed")
        params = fitted(ask, len(prompt.ids), self._info.max_positions, self.model.thinker.text.vocab_size)
        pipeline = self._choose(ask.speak, ask.session)
        id = self._names.new(ask.id, self._tickets.values())
        seed = params.seed if params.seed is not None else secrets.randbits(53)  # exact in any language
        now = time.monotonic()
        words = TextStream(self._builder.tokenizer)
        ticket = Ticket(id, ask.id, pipeline, ask.stages, prompt, params, seed, words, arrived, progressed=now)
        self._tickets[id] = ticket
        self._counts["requests"] += 1
        pipeline.active += 1
        return ticket

    def _choose(self, speak: bool, session: str | None = None) -> Pipeline:
        try:
            return self._router.choose(speak, session, self._tickets.values())
        except Busy:
            self._counts["refused"] += 1
            raise

    def _leave(self, t: Ticket) -> None:
        """The iterator is over, for whatever reason."""
        if self._tickets.pop(t.id, None) is None:
            return
        t.pipeline.active -= 1
        if t.unfinished:
            t.pipeline.send(t.stages, Cancel(t.id))
        how = "finished" if t.over and not t.unfinished else "failed" if t.failed else "cancelled"
        self._counts[how] += 1
        log.debug(
            "%s %s: %d prompt tokens, %d text tokens, %d frames, %.3f s",
            t.id,
            how,
            len(t.prompt.ids),
            t.ids,
            t.frames,
            time.monotonic() - t.arrived,
        )

    # -- what the hosts say

    def _message(self, message: FromHost, blob: bytes) -> None:
        t = self._tickets.get(message.request)  # type: ignore[union-attr]
        if t is None or t.over or t.failed:
            return  # it ended here, and this was on its way
        t.progressed = time.monotonic()
        match message:
            case Text(ids=ids):
                t.add_text(ids)
            case Pcm(start=start, frames=frames):
                t.add_sound(start, frames, np.frombuffer(blob, np.float32), self.config.max_buffered_s)
            case Codes(start=start):
                codes = np.frombuffer(blob, np.int32).reshape(-1, self.model.talker.num_code_groups)
                t.events.put_nowait(CodeFrames(start, codes))
            case Ended():
                t.end(message, self.model.tokens)
            case Failed(stage=stage, kind=kind, message=text):
                t.fail(_error(kind, f"{stage}: {text}"))
            case _:
                raise errors.Bug(f"the orchestrator was sent {type(message).__name__}")

    def _loss(self, pipeline: Pipeline, stages: frozenset[str], error: StrettoError) -> None:
        for t in list(self._tickets.values()):
            if t.pipeline is pipeline and not t.over and stages & t.unfinished:
                t.fail(error)

    # -- time

    async def _watch(self) -> None:
        """Look for requests that make no progress and hosts that do not answer, and ask hosts for their numbers."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            before, late = time.monotonic(), time.monotonic() - before > LATE_S
            if late:
                continue  # we stood still ourselves: what the hosts said meanwhile has not been read yet
            for t in list(self._tickets.values()):
                self._look(t)
            self._pings += 1
            for p in self._pipelines:
                p.end_silent(self.config.stall_s)
                if self._pings % PING_EVERY == 0:
                    p.ping(self._pings)

    def _look(self, t: Ticket) -> None:
        now = time.monotonic()
        rest = now - t.progressed
        if t.over or t.failed or t.throttled or rest <= self.config.stall_s * (PATIENCE if self._in_line(t) else 1):
            return
        if t.events.empty():  # else its consumer is at rest, not the stages
            waiting = sorted(t.unfinished)
            t.fail(StageDead(f"{t.id}: no progress for {rest:.1f} s in {', '.join(waiting)}"))
        else:
            t.progressed = now

    def _in_line(self, t: Ticket) -> bool:
        """Has it not had its turn yet in the last of its stages, while others get on? Then it may wait longer."""
        if t.samples if len(t.stages) > 1 else t.ids:
            return False
        newest = max(o.progressed for o in self._tickets.values() if o.pipeline is t.pipeline)
        return time.monotonic() - newest <= self.config.stall_s

    async def drain(self, timeout: float) -> None:
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            log.warning("%d requests did not finish in %.1f s", self._accepted, timeout)

    async def close(self) -> None:
        self._draining = self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for t in list(self._tickets.values()):
            t.events.put_nowait(errors.Gone("the engine was closed"))
        await asyncio.gather(self._prompts.close(), *(p.close() for p in self._pipelines))

    @property
    def pids(self) -> list[int | None]:
        """Of all hosts, for tests and tools."""
        return [pid for p in self._pipelines for pid in p.pids]


def _error(kind: str, message: str) -> StrettoError:
    """The error that a host reported, as its own class where it is one of ours."""
    known: dict[str, type[StrettoError]] = {
        c.__name__: c for c in (errors.Invalid, errors.TooLong, errors.Busy, errors.Gone, errors.WireError, errors.Bug)
    }
    return known.get(kind, StageDead)(message)

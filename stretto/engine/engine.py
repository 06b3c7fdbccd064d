"""The engine: requests in, events out, over one or more pipelines of host processes. Asyncio;
imports no torch.

It builds the prompt, chooses a pipeline, mints the one request id, announces the request to every
stage that it needs at once (which ones, its model's family says), and passes on what the stages
report. Tensors never come here, and neither does a chunk: what one stage makes for the next goes
over their own link. All on the event loop, but for the prompt: what came over the network is
decoded and built by the prompt worker, a process of its own; what a caller of this process gave, in
a thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto import errors
from stretto._imports import load
from stretto.config.engine import EngineConfig, check_model
from stretto.config.placement import check_cards
from stretto.embedded import is_random
from stretto.engine.announce import RequestIds, announce, clamp_params
from stretto.engine.events import (
    AudioChunk,
    CodeFrames,
    Event,
    Finished,
    Message,
    Modality,
    Product,
    Progress,
)
from stretto.engine.gpu_sharing import Cards
from stretto.engine.host_handle import Launcher, StagesLost
from stretto.engine.media_data import supply
from stretto.engine.pipeline import Pipeline
from stretto.engine.request import Ticket
from stretto.engine.router import Router, slowest
from stretto.engine.session import Session
from stretto.engine.stall_watch import Watch
from stretto.engine.status import numbers_of, open_files, progress_of
from stretto.engine.tts import Reader
from stretto.errors import Busy, Invalid, StageDead, StrettoError
from stretto.family import ModelInfo
from stretto.hardware import cards
from stretto.messages.requests import (
    Cancel,
    Codes,
    Ended,
    Failed,
    FromHost,
    Made,
    MediaRequest,
    Pcm,
    Text,
    Working,
)
from stretto.observe.trace import TraceWriter
from stretto.params import DEFAULT_STYLE, Capability, Params, RequestOptions, SpeechStyle
from stretto.preprocess.build import Builder
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.pool.jobs import Conversation, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.pool import PromptPool
from stretto.preprocess.pool.threads import InThreads, Prompts
from stretto.preprocess.template import TextStream
from stretto.registry import open_model
from stretto.types import RequestId

log = logging.getLogger(__name__)


class PipelineEngine:
    """Implements `api.Engine`. Made by `open`."""

    def __init__(self, model: Path, config: EngineConfig, launcher: Launcher | None = None) -> None:
        """`launcher`: what starts its hosts, if they are not to be children of this process."""
        self.config = config
        self.model = m = open_model(model)
        check_model(config, m.pipeline.names, m.info.max_positions)
        self.builder: Builder = load(m.builder)(model)
        self.threads = InThreads(self.builder)
        self.prompts: Prompts = self.threads
        if config.prompts:
            self.prompts = PromptPool(model, m.builder, config.prompts, m.pipeline.grammars)
        self._info = replace(
            m.info,
            max_positions=min(m.info.max_positions, config.host.max_context),
            stages={s.name: s.does for s in m.pipeline.stages},
            random_weights=config.host.load_format == "dummy" or is_random(model),
        )
        self._trace = TraceWriter(Path(config.trace_dir)) if config.trace_dir is not None else None
        shared = Cards()
        self._launcher = launcher
        self._pipelines = [
            Pipeline(
                f"p{i}", str(model), m.pipeline, config.replica(i), self._trace, launcher, shared
            )
            for i in range(config.num_pipelines)
        ]
        self._readers: list[asyncio.Task[None]] = []  # of the pipelines' reports
        # requests, those included whose prompt is being built and that have no ticket yet
        self._accepted = 0
        self._tickets: dict[RequestId, Ticket] = {}
        self._router = Router(self._pipelines, config)
        self._ids = RequestIds()
        self._reader = Reader(self.run, self.prompts, self._info, self.builder.tokenizer.encode)
        self.watch = Watch(self._tickets, self._pipelines, config)
        kinds = (
            "requests",
            "finished",
            "failed",
            "cancelled",
            "refused",
            "ahead",
            "windows_changed",
        )
        self.counts = dict.fromkeys(kinds, 0)
        self._watcher: asyncio.Task[None] | None = None
        self._draining = self._closed = False
        self._up = False
        self._error: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str | Path, config: EngineConfig | None = None
    ) -> AsyncIterator[PipelineEngine]:
        engine = cls(Path(model), config or EngineConfig())
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    async def start(self) -> None:
        """Start all hosts and wait until they are ready."""
        try:
            if self._launcher is None:
                check_cards(self.config, self.model.pipeline.names, len(cards()))
            self._readers = [asyncio.create_task(self._read(p)) for p in self._pipelines]
            await asyncio.gather(self.prompts.start(), *(p.start() for p in self._pipelines))
        except StrettoError as e:
            self._error = str(e)
            raise
        self._up = True
        self._watcher = asyncio.create_task(self.watch.run(), name="engine-watcher")

    # -- what others may ask

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def progress(self) -> Progress:
        return progress_of(self._pipelines, self.prompts, self._error, self._up, self._draining)

    @property
    def pace(self) -> float:
        """How fast the slowest running speech is made, in times of real time; infinite if there is
        none."""
        return min(
            (slowest(p, self._tickets.values()) for p in self._pipelines), default=float("inf")
        )

    def metrics(self) -> Mapping[str, float]:
        values = {f"stretto_engine_{k}_total": float(v) for k, v in self.counts.items()}
        values["stretto_engine_running"] = self._accepted
        values |= self.prompts.metrics()
        return values | open_files(self.prompts) | numbers_of(self._pipelines)

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
        speaks = self.check(modalities, voice)
        options = RequestOptions(
            "speech" if speaks else "text",
            params or self._info.defaults,
            voice,
            request_id=request_id,
            session=session,
            owner=owner,
            sender=messages.sender if isinstance(messages, Conversation) else "",
        )

        async def build() -> PackedPrompt:
            if isinstance(messages, Conversation):
                try:
                    await self.prompts.check(options.params.grammar, options.sender)
                    return await self.prompts.build(messages, use_audio_in_video)
                finally:
                    messages.close()
            await self.prompts.check(options.params.grammar, options.sender)
            given = (
                [dict(m) for m in messages],
                [dict(t) for t in tools] if tools else None,
                use_audio_in_video,
            )
            return await self.threads.build_local(*given, allow_paths=allow_paths)

        return self.run(build, options)

    def speak(
        self,
        text: str | AsyncIterator[str],
        *,
        voice: str | None = None,
        manner: SpeechStyle = DEFAULT_STYLE,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        sender: str = "",
    ) -> AsyncIterator[Event]:
        self.check(("audio",), voice)
        options = RequestOptions(
            "tts",
            params or self._info.defaults,
            voice,
            style=manner,
            request_id=request_id,
            owner=owner,
        )
        return self._reader.read(text, options, sender)

    async def enrol(self, clip: Conversation, *, owner: str = "") -> bytes:
        self._check_open()
        return await self._reader.enrol(clip, owner)

    def session(self, *, owner: str = "", sender: str = "", allow_paths: bool = False) -> Session:
        """A conversation that goes on: see `session.py`."""
        self._check_open()
        return Session(self, owner=owner, sender=sender, allow_paths=allow_paths)

    def check(self, modalities: Sequence[Modality], voice: str | None) -> bool:
        """Whether there is to be speech. Raises `Invalid` for what the model cannot do, `Busy` when
        it is over."""
        unknown = set(modalities) - {"text", "audio"}
        if unknown or not modalities:
            raise Invalid(
                f"modalities must be text and/or audio, got {sorted(modalities)}", "modalities"
            )
        if voice is not None:
            self.model.check_voice(voice)
        self._check_open()
        return "audio" in modalities

    def _check_open(self) -> None:
        if self._draining:
            raise Busy("the server is shutting down")

    async def outline(
        self, body: MemFile, long: tuple[str, ...], most: int, sender: str = ""
    ) -> tuple[Outlined, MemFile]:
        return await self.prompts.outline(body, long, most, sender)

    async def cut(
        self, sound: MemFile, seconds: float, sender: str = ""
    ) -> tuple[Windows, MemFile]:
        return await self.prompts.cut(sound, seconds, sender)

    async def run(
        self,
        build: Callable[[], Awaitable[PackedPrompt]],
        options: RequestOptions,
        writes: Callable[[Ticket], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Event]:
        """A request, from its prompt to its last event. `writes` goes on beside it: it tells it
        text that is still to come."""
        with self._place():
            arrived = time.monotonic()
            prompt = await build()
            options = replace(options, tts_ids=prompt.tts_ids)
            ticket = self._admit(prompt, options, arrived)
            options = replace(options, params=ticket.params)
            del prompt  # its features go as soon as they are sent
            beside: asyncio.Task[None] | None = None
            try:
                await announce(ticket, options, self.config.share_prefix_cache)
                if writes is not None:
                    beside = asyncio.ensure_future(writes(ticket))
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
                if beside is not None:
                    beside.cancel()
                self._leave(ticket)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for requests, from before the prompt is built to the last event;
        `drain` waits for all."""
        self._check_open()  # since it was asked for
        if self._accepted >= self.config.max_requests:
            self.counts["refused"] += 1
            raise Busy(f"{self.config.max_requests} requests are running already")
        self._accepted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._accepted -= 1
            if not self._accepted:
                self._idle.set()

    def _admit(self, prompt: PackedPrompt, options: RequestOptions, arrived: float) -> Ticket:
        if self._closed:
            raise errors.Gone("the engine was closed")
        params = clamp_params(
            options, prompt.num_tokens, self._info.max_positions, self.model.vocab_size
        )
        stages = self._path(options.capability)
        pipeline = self._choose(stages, options.speaks, options.session)
        id = self._ids.mint(options.request_id, self._tickets.values())
        now = time.monotonic()
        words = TextStream(self.builder.tokenizer)
        ticket = Ticket(
            id,
            options.request_id,
            pipeline,
            self.model,
            stages,
            prompt,
            params,
            replace(options, params=params).seed,
            words,
            arrived,
            progressed=now,
        )
        ticket.prefill_only = options.prefill_only
        if prompt.features is not None:
            ticket.media = prompt.features.on_demand
        ticket.said = (
            len(options.tts_ids or ()) if self._info.live_text else 0
        )  # else it is in the prompt
        self._tickets[id] = ticket
        self.counts["ahead" if options.prefill_only else "requests"] += 1
        pipeline.active += 1
        return ticket

    def _path(self, capability: Capability) -> tuple[str, ...]:
        try:
            return self.model.pipeline.paths[capability]
        except KeyError:
            raise Invalid(f"this model does not offer {capability}", "modalities") from None

    def _choose(self, stages: tuple[str, ...], speak: bool, session: str | None = None) -> Pipeline:
        try:
            return self._router.choose(stages, speak, session, self._tickets.values())
        except Busy:
            self.counts["refused"] += 1
            raise

    def _leave(self, t: Ticket) -> None:
        """The iterator is over, for whatever reason."""
        if self._tickets.pop(t.id, None) is None:
            return
        t.pipeline.active -= 1
        if t.supplying is not None:
            t.supplying.cancel()  # before the stages are told that it is over
        if t.unfinished:
            t.pipeline.send(t.stages, Cancel(t.id))
        how = "finished" if t.over and not t.unfinished else "failed" if t.failed else "cancelled"
        if not t.prefill_only:
            self.counts[how] += 1
        log.debug(
            "%s %s: %d prompt tokens, %d text tokens, %d frames, %.3f s",
            t.id,
            how,
            t.prompt.num_tokens,
            t.ids,
            t.frames,
            time.monotonic() - t.arrived,
        )

    # -- what the hosts report

    async def _read(self, pipeline: Pipeline) -> None:
        """Apply what the hosts of a pipeline report to the requests there. The one place at which
        it reaches them."""
        async for report in pipeline.reports():
            if isinstance(report, StagesLost):
                self._fail(pipeline, report)
                continue
            try:
                self._apply(report.message, report.blob)
            except Exception as e:  # noqa: BLE001  a bad message ends its host, not the reader
                report.host.reject(e)

    def _apply(self, message: FromHost, blob: bytes) -> None:
        t = self._tickets.get(message.request)  # type: ignore[union-attr]
        if t is None or t.over or t.failed:
            return  # it ended here, and this was on its way
        t.progressed = time.monotonic()
        match message:
            case Text(ids=ids, logprobs=scored):
                t.add_text(ids, scored)
            case Pcm(start=start, frames=frames):
                t.add_sound(
                    start, frames, np.frombuffer(blob, np.float32), self.config.max_buffered_s
                )
            case Codes(start=start, width=width):
                codes = np.frombuffer(blob, np.int32).reshape(-1, width)
                t.events.put_nowait(CodeFrames(start, codes))
            case Made():
                t.events.put_nowait(Product(blob))
            case Ended():
                t.end(message)
            case Working():
                pass  # that is all it says
            case MediaRequest():
                t.supplying = asyncio.create_task(supply(t, message, t.supplying))
            case Failed():
                t.fail(_error(message))
            case _:
                raise errors.Bug(f"the engine was sent {type(message).__name__}")

    def _fail(self, pipeline: Pipeline, lost: StagesLost) -> None:
        for t in list(self._tickets.values()):
            if t.pipeline is pipeline and not t.over and lost.stages & t.unfinished:
                t.fail(lost.error)

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
        await asyncio.gather(self.prompts.close(), *(p.close() for p in self._pipelines))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if self._trace is not None:
            self._trace.close()

    @property
    def pids(self) -> list[int | None]:
        """Of all hosts, for tests and tools."""
        return [pid for p in self._pipelines for pid in p.pids]


def _error(failed: Failed) -> StrettoError:
    """The error that a host reported, as its own class where it is one of ours."""
    text = f"{failed.stage}: {failed.message}"
    for faulty in (errors.Invalid, errors.TooLong):
        if faulty.__name__ == failed.kind:
            return faulty(text, failed.param)
    known = {c.__name__: c for c in (errors.Busy, errors.Gone, errors.WireError, errors.Bug)}
    return known.get(failed.kind, StageDead)(text)

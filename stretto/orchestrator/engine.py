"""The engine: requests in, events out, over one or more pipelines of host processes. Asyncio; imports no torch.

It mints the one request id, builds the prompt, announces the request to every stage that it needs at once (text-only
requests never touch talker or code2wav), and passes on what the stages report. Tensors never come here, and neither
does a chunk: text goes from thinker to talker, and frames from talker to code2wav, over their own links."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from stretto import errors
from stretto.errors import Busy, Invalid, StageDead, StrettoError
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, OmniConfig
from stretto.orchestrator.api import (
    AudioChunk,
    CodeFrames,
    Event,
    Finished,
    FinishReason,
    Message,
    Modality,
    ModelInfo,
    Params,
    Progress,
    TextDelta,
    Usage,
)
from stretto.orchestrator.messages import (
    Admit,
    Cancel,
    Codes,
    Ended,
    Failed,
    FromHost,
    Pcm,
    Sampling,
    Stats,
    StopText,
    Text,
    Throttle,
    media_digest,
    pack_prompt,
)
from stretto.orchestrator.pipeline import Pipeline
from stretto.orchestrator.settings import STAGES, EngineConfig
from stretto.orchestrator.timeline import timeline
from stretto.prompt.build import PromptBuilder
from stretto.prompt.prompt import Prompt
from stretto.prompt.template import TextStream
from stretto.types import CODE0, RESIDUAL, RequestId, SamplingParams, stage_seed

log = logging.getLogger(__name__)
WATCH_S = 0.25
MAX_SESSIONS = 4096  # whose last pipeline is remembered
LATE_S = WATCH_S + 0.5
PING_EVERY = 4  # looks
PATIENCE = 4  # times `stall_s` that a request may wait in line for rows that others hold
MOST_USED = 16384  # ids remembered: more than a stage's fences are


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from admission to its last event."""

    id: RequestId
    given: RequestId | None  # by the caller
    pipeline: Pipeline
    stages: tuple[str, ...]
    prompt: Prompt
    params: Params
    seed: int
    words: TextStream
    arrived: float
    events: asyncio.Queue[Event | StrettoError] = field(default_factory=asyncio.Queue)
    ended: dict[str, Ended] = field(default_factory=dict)
    text: str = ""  # decoded so far, stop strings not looked for
    shown: int = 0  # characters of it that were passed on
    ids: int = 0
    stopped: bool = False  # a stop string was found: later text is not passed on
    frames: int = 0
    samples: int = 0
    taken: int = 0  # samples that the consumer has taken
    first_pcm: float | None = None
    packets: list[float] = field(default_factory=list)
    progressed: float = 0.0
    throttled: bool = False
    failed: bool = False
    over: bool = False


class PipelineEngine:
    """Implements `api.Engine`. Made by `open`."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        self.config = config
        self.model = OmniConfig.read(model)
        self._builder = PromptBuilder.open(model, self.model)
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
        self._tickets: dict[RequestId, Ticket] = {}
        self._sessions: OrderedDict[str, Pipeline] = OrderedDict()
        self._used: dict[RequestId, int] = {}  # how often an id was given, the oldest first
        self._stats: dict[str, float] = {}
        self._counts = {"requests": 0, "finished": 0, "failed": 0, "cancelled": 0, "refused": 0}
        self._watcher: asyncio.Task[None] | None = None
        self._draining = False
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
            await asyncio.gather(*(p.start() for p in self._pipelines))
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
        values["stretto_engine_running"] = len(self._tickets)
        for stage in STAGES:
            planned = sum(p.memory.get(stage, 0) for p in self._pipelines)
            values[f'stretto_stage_memory_bytes{{stage="{stage}"}}'] = planned
        return {**values, **self._stats}

    # -- requests

    def generate(
        self,
        messages: Sequence[Message],
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: RequestId | None = None,
        session: str | None = None,
        allow_paths: bool = False,
        use_audio_in_video: bool = False,
    ) -> AsyncIterator[Event]:
        speak = self._check(modalities, voice)

        def build() -> Prompt:
            given = [dict(m) for m in messages]
            declared = [dict(t) for t in tools] if tools else None
            return self._builder.build(given, declared, use_audio_in_video, allow_paths=allow_paths)

        return self._run(build, speak, voice, params or Params(), request_id, None, session)

    def speak(
        self,
        text: str,
        *,
        voice: str | None = None,
        params: Params | None = None,
        request_id: RequestId | None = None,
    ) -> AsyncIterator[Event]:
        self._check(("audio",), voice)
        if not text.strip():
            raise Invalid("there is nothing to say", "input")
        spoken = tuple(self._builder.tokenizer.encode(text))
        params = params or Params()

        def build() -> Prompt:
            return self._builder.build([{"role": "user", "content": text}])

        return self._run(build, True, voice, params, request_id, spoken)

    def _check(self, modalities: Sequence[Modality], voice: str | None) -> bool:
        unknown = set(modalities) - {"text", "audio"}
        if unknown or not modalities:
            raise Invalid(f"modalities must be text and/or audio, got {sorted(modalities)}", "modalities")
        if voice is not None:
            self.model.talker.speaker_id(voice)
        if self._draining:
            raise Busy("the server is shutting down")
        return "audio" in modalities

    async def _run(
        self,
        build: Any,
        speak: bool,
        voice: str | None,
        params: Params,
        request_id: RequestId | None,
        spoken: tuple[int, ...] | None,
        session: str | None = None,
    ) -> AsyncIterator[Event]:
        arrived = time.monotonic()
        prompt = await asyncio.to_thread(build)
        ticket = self._admit(prompt, speak, voice, params, request_id, spoken, arrived, session)
        try:
            while not ticket.over:
                event = await ticket.events.get()
                if isinstance(event, StrettoError):
                    raise event
                if isinstance(event, AudioChunk):
                    self._take(ticket, len(event.samples))
                if isinstance(event, Finished):
                    ticket.over = True
                yield event
        finally:
            self._leave(ticket)

    def _admit(
        self,
        prompt: Prompt,
        speak: bool,
        voice: str | None,
        params: Params,
        request_id: RequestId | None,
        spoken: tuple[int, ...] | None,
        arrived: float,
        session: str | None = None,
    ) -> Ticket:
        limit = self._info.max_positions
        if spoken is None and len(prompt.ids) + params.max_text_tokens > limit:
            room = limit - len(prompt.ids)
            if room < 1:
                raise errors.TooLong(f"the prompt has {len(prompt.ids)} tokens; the limit is {limit - 1}", "messages")
            params = replace(params, max_text_tokens=room, min_text_tokens=min(params.min_text_tokens, room))
        longest = max(1, limit - len(prompt.ids) - 16)
        params = replace(params, max_frames=min(params.max_frames, longest), min_frames=min(params.min_frames, longest))
        vocab = self.model.thinker.text.vocab_size
        if unknown := [i for i in params.logit_bias if not 0 <= i < vocab]:
            raise Invalid(f"logit_bias names token {unknown[0]}; the vocabulary has {vocab}", "logit_bias")
        pipeline = self._choose(speak, session)
        id = self._name(request_id)
        stages = STAGES if speak and spoken is None else STAGES[1:] if speak else STAGES[:1]
        seed = params.seed if params.seed is not None else secrets.randbits(53)  # exact in any language
        now = time.monotonic()
        words = TextStream(self._builder.tokenizer)
        ticket = Ticket(id, request_id, pipeline, stages, prompt, params, seed, words, arrived, progressed=now)
        self._tickets[id] = ticket
        self._idle.clear()
        self._counts["requests"] += 1
        pipeline.active += 1
        self._announce(ticket, speak, voice, spoken)
        return ticket

    def _name(self, given: RequestId | None) -> RequestId:
        """The id that all stages know the request by. An id that was used before gets a number: stages remember the
        ids of requests that are over, and ignore what comes for them."""
        if given is None:
            return RequestId(f"r-{secrets.token_hex(8)}")
        if any(t.given == given for t in self._tickets.values()):
            raise Invalid(f"request {given} is running already", "request_id")
        times = self._used.pop(given, 0)
        self._used[given] = times + 1  # last in order now
        if len(self._used) > MOST_USED:
            del self._used[next(iter(self._used))]
        return RequestId(f"{given}.{times}") if times else given

    def _choose(self, speak: bool, session: str | None = None) -> Pipeline:
        """Where the session was last, since its prompts are cached there; else the least loaded pipeline that is up
        and keeps pace."""
        if len(self._tickets) >= self.config.max_requests:
            self._counts["refused"] += 1
            raise Busy(f"{self.config.max_requests} requests are running already")
        up = [p for p in self._pipelines if p.ready(speak)]
        if not up:
            raise StageDead("no pipeline is up; it is being restarted")
        if speak and self.config.min_pace > 0:
            up = [p for p in up if self._pace(p) >= self.config.min_pace]
            if not up:
                self._counts["refused"] += 1
                raise Busy("the running streams take all there is")
        known = self._sessions.get(session) if session is not None else None
        chosen = known if known in up else min(up, key=lambda p: p.active)
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _pace(self, pipeline: Pipeline) -> float:
        """How fast the slowest stream of a pipeline is made, in times of real time."""
        now, slowest = time.monotonic(), float("inf")
        for t in self._tickets.values():
            if t.pipeline is pipeline and t.first_pcm is not None and not t.throttled and now - t.first_pcm > 0.5:
                slowest = min(slowest, t.samples / SAMPLE_RATE_OUT / (now - t.first_pcm))
        return slowest

    def _announce(self, t: Ticket, speak: bool, voice: str | None, spoken: tuple[int, ...] | None) -> None:
        p = t.params
        text = SamplingParams(p.temperature, p.top_k, p.top_p, p.repetition_penalty, stage_seed(t.seed, "thinker"))
        speech = stage_seed(t.seed, "talker")
        code0, residual = replace(CODE0, seed=speech), replace(RESIDUAL, seed=speech)
        if p.greedy_speech:
            code0, residual = replace(code0, temperature=0.0), replace(residual, temperature=0.0)
        for stages in t.pipeline.hosts_of(t.stages):
            meta, blob = pack_prompt(t.prompt, features="thinker" in stages and spoken is None)
            message = Admit(
                request=t.id,
                prompt=meta,
                speak=speak,
                voice=voice,
                text=Sampling.of(text),
                code0=Sampling.of(code0),
                residual=Sampling.of(residual),
                max_text_tokens=p.max_text_tokens,
                max_frames=p.max_frames,
                min_text_tokens=p.max_text_tokens if p.ignore_eos else p.min_text_tokens,
                min_frames=p.min_frames,
                first_frames=p.packets.first,
                each_frames=p.packets.each,
                ramp=p.packets.ramp,
                priority=p.priority,
                want_codes=p.want_codes,
                logit_bias=tuple(p.logit_bias.items()),
                spoken=spoken,
                media=media_digest(t.prompt),
            )
            t.pipeline.send(stages[:1], message, blob)

    def _take(self, t: Ticket, samples: int) -> None:
        """The consumer took sound: a throttled request goes on when half of the room is free again."""
        t.taken += samples
        left = (t.samples - t.taken) / SAMPLE_RATE_OUT
        if t.throttled and left < self.config.max_buffered_s / 2:
            t.throttled, t.progressed = False, time.monotonic()
            t.pipeline.send(t.stages, Throttle(t.id, False))

    def _leave(self, t: Ticket) -> None:
        """The iterator is over, for whatever reason."""
        if self._tickets.pop(t.id, None) is None:
            return
        t.pipeline.active -= 1
        finished = set(t.ended) >= set(t.stages)
        if not finished:
            t.pipeline.send(t.stages, Cancel(t.id))
        how = "finished" if t.over and finished else "failed" if t.failed else "cancelled"
        self._counts[how] += 1
        if not self._tickets:
            self._idle.set()
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
        if isinstance(message, Stats):
            self._stats.update(message.values)
            return
        t = self._tickets.get(message.request)  # type: ignore[union-attr]
        if t is None or t.over or t.failed:
            return  # it ended here, and this was on its way
        t.progressed = time.monotonic()
        match message:
            case Text(ids=ids):
                self._text(t, ids)
            case Pcm(start=start, frames=frames):
                self._pcm(t, start, frames, np.frombuffer(blob, np.float32))
            case Codes(start=start):
                codes = np.frombuffer(blob, np.int32).reshape(-1, self.model.talker.num_code_groups)
                t.events.put_nowait(CodeFrames(start, codes))
            case Ended(stage=stage):
                t.ended[stage] = message
                self._finish(t)
            case Failed(stage=stage, kind=kind, message=text):
                self._fail(t, _error(kind, f"{stage}: {text}"))
            case _:
                raise errors.Bug(f"the orchestrator was sent {type(message).__name__}")

    def _text(self, t: Ticket, ids: tuple[int, ...]) -> None:
        t.ids += len(ids)
        t.text += t.words.push(ids)
        shown = "" if t.stopped else self._show(t, last=False)
        t.events.put_nowait(TextDelta(ids, shown))

    def _show(self, t: Ticket, last: bool) -> str:
        """What of the text may be passed on: nothing from a stop string on, nor what may be the start of one."""
        end = len(t.text)
        for stop in t.params.stop:
            found = t.text.find(stop, max(0, t.shown - len(stop) + 1))
            if found >= 0:
                end = min(end, found)
                t.stopped = True
        if t.stopped and "thinker" not in t.ended:
            t.pipeline.send(("thinker",), StopText(t.id))
        if not t.stopped and not last:
            for stop in t.params.stop:
                for k in range(min(len(stop) - 1, end), 0, -1):
                    if t.text.endswith(stop[:k]):
                        end = min(end, len(t.text) - k)
                        break
        shown, t.shown = t.text[t.shown : end], max(t.shown, end)
        return shown

    def _pcm(self, t: Ticket, start: int, frames: int, samples: Any) -> None:
        now = time.monotonic()
        if start != t.samples:
            self._fail(t, errors.Bug(f"{t.id}: sound from sample {start} after {t.samples}"))
            return
        t.first_pcm = now if t.first_pcm is None else t.first_pcm
        t.packets.append(now)
        t.samples += len(samples)
        t.frames = frames
        t.events.put_nowait(AudioChunk(start, samples))
        if not t.throttled and (t.samples - t.taken) / SAMPLE_RATE_OUT > self.config.max_buffered_s:
            t.throttled = True
            t.pipeline.send(t.stages, Throttle(t.id, True))

    def _finish(self, t: Ticket) -> None:
        if not set(t.ended) >= set(t.stages):
            return
        if "thinker" in t.ended:
            t.text += t.words.finish()
            rest = "" if t.stopped else self._show(t, last=True)
            if rest:
                t.events.put_nowait(TextDelta((), rest))
        thinker, talker = t.ended.get("thinker"), t.ended.get("talker")
        pads = self.model.tokens
        usage = Usage(
            prompt_tokens=len(t.prompt.ids),
            text_tokens=t.ids,
            frames=t.frames,
            samples=t.samples,
            cached_tokens=thinker.cached if thinker is not None else 0,
            audio_prompt_tokens=t.prompt.ids.count(pads.audio_pad),
            image_prompt_tokens=t.prompt.ids.count(pads.image_pad) + t.prompt.ids.count(pads.video_pad),
        )
        t.events.put_nowait(
            Finished(
                text=_reason(thinker.reason) if thinker is not None else "stop",
                audio=_reason(talker.reason) if talker is not None else None,
                usage=usage,
                seed=t.seed,
                timeline=timeline(t.arrived, t.ended, t.packets),
                prompt_ids=t.prompt.ids,
            )
        )

    def _fail(self, t: Ticket, error: StrettoError) -> None:
        if t.failed:
            return  # one death may be told by several: the host's channel, its links
        t.failed = True
        t.events.put_nowait(error)
        t.pipeline.send(t.stages, Cancel(t.id))

    def _loss(self, pipeline: Pipeline, stages: frozenset[str], error: StrettoError) -> None:
        for t in list(self._tickets.values()):
            if t.pipeline is pipeline and not t.over and stages & set(t.stages) - set(t.ended):
                self._fail(t, error)

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
            waiting = sorted(set(t.stages) - set(t.ended))
            self._fail(t, StageDead(f"{t.id}: no progress for {rest:.1f} s in {', '.join(waiting)}"))
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
            log.warning("%d requests did not finish in %.1f s", len(self._tickets), timeout)

    async def close(self) -> None:
        self._draining = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for t in list(self._tickets.values()):
            t.events.put_nowait(errors.Gone("the engine was closed"))
        await asyncio.gather(*(p.close() for p in self._pipelines))

    @property
    def pids(self) -> list[int | None]:
        """Of all hosts, for tests and tools."""
        return [pid for p in self._pipelines for pid in p.pids]


def _reason(reason: str) -> FinishReason:
    return "length" if reason == "length" else "stop"


def _error(kind: str, message: str) -> StrettoError:
    """The error that a host reported, as its own class where it is one of ours."""
    known: dict[str, type[StrettoError]] = {
        c.__name__: c for c in (errors.Invalid, errors.TooLong, errors.Busy, errors.Gone, errors.WireError, errors.Bug)
    }
    return known.get(kind, StageDead)(message)


class SyncEngine:
    """The engine for callers without an event loop: a loop in a thread of its own.

    with SyncEngine(model) as engine:
        for event in engine.generate(messages): ..."""

    def __init__(self, model: str | Path, config: EngineConfig | None = None) -> None:
        self._model, self._config = Path(model), config or EngineConfig()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stretto-engine", daemon=True)
        self._engine: PipelineEngine | None = None

    def __enter__(self) -> SyncEngine:
        self._thread.start()
        self._engine = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    async def _open(self) -> PipelineEngine:
        engine = PipelineEngine(self._model, self._config)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    def __exit__(self, *exc: object) -> None:
        if self._engine is not None:
            asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def engine(self) -> PipelineEngine:
        assert self._engine is not None, "use it in a with statement"
        return self._engine

    def generate(self, messages: Sequence[Message], **kwargs: Any) -> Iterator[Event]:
        """As `PipelineEngine.generate`. Closing the iterator cancels the request."""
        return self._iterate(lambda: self.engine.generate(messages, **kwargs))

    def speak(self, text: str, **kwargs: Any) -> Iterator[Event]:
        return self._iterate(lambda: self.engine.speak(text, **kwargs))

    def _iterate(self, start: Any) -> Iterator[Event]:
        out: SimpleQueue[Event | BaseException | None] = SimpleQueue()

        async def pump() -> None:
            try:
                async for event in start():
                    out.put(event)
                out.put(None)
            except BaseException as e:
                out.put(e)
                raise

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := out.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()

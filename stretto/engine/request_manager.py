"""The running requests of an engine. `RequestManager` admits each, announces it to its stages,
applies their reports, fails it when it stalls, and removes it when its caller leaves. On the event
loop; imports no torch.

One task for each pipeline reads what its hosts report. Reports reach requests nowhere else."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Literal

import msgspec

from stretto.config.engine import EngineConfig
from stretto.engine.events import Event, Modality
from stretto.engine.host_handle import StagesLost
from stretto.engine.pipeline import PIECE, Pipeline
from stretto.engine.request import RequestState
from stretto.engine.router import Router, slowest
from stretto.errors import Bug, Busy, Gone, Invalid, TooLong
from stretto.family import Model, ModelInfo
from stretto.messages.requests import Admit
from stretto.params import Params, RequestOptions
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.template import TextStream, Tokenizer
from stretto.types import RequestId

log = logging.getLogger(__name__)

# what a link carries as a request's id, less room for a number
_CALLERS_ID = re.compile(r"[A-Za-z0-9_.:-]{1,48}")
WATCH_S = 0.25
LATE_S = WATCH_S + 0.5
PING_EVERY = 4  # rounds of the watch
PATIENCE = 4  # times `stall_s` that a request may wait in line for rows that others hold
Counter = Literal[
    "requests", "prefills", "finished", "failed", "cancelled", "refused", "windows_changed"
]
METRICS: dict[Counter, str] = {
    "requests": "stretto_engine_requests_total",
    "prefills": "stretto_engine_ahead_total",
    "finished": "stretto_engine_finished_total",
    "failed": "stretto_engine_failed_total",
    "cancelled": "stretto_engine_cancelled_total",
    "refused": "stretto_engine_refused_total",
    "windows_changed": "stretto_engine_windows_changed_total",
}


class RequestManager:
    """`info` describes the model within this engine's limits."""

    def __init__(
        self,
        model: Model,
        info: ModelInfo,
        pipelines: Sequence[Pipeline],
        config: EngineConfig,
        tokenizer: Tokenizer,
    ) -> None:
        self.model = model
        self.info = info
        self.running: dict[RequestId, RequestState] = {}
        self._pipelines = pipelines
        self._config = config
        self._tokenizer = tokenizer
        self._router = Router(pipelines, config.min_pace)
        self._numbers = count()
        self._counts: dict[Counter, int] = dict.fromkeys(METRICS, 0)
        self._readers: list[asyncio.Task[None]] = []  # of the pipelines' reports
        self._watcher: asyncio.Task[None] | None = None
        # requests, those included whose prompt is being built and that have no state yet
        self._accepted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._closed = False

    def read_reports(self) -> None:
        """Begin to read what the pipelines' hosts report; before they are started."""
        self._readers = [asyncio.create_task(self._read(p)) for p in self._pipelines]

    def watch(self) -> None:
        """Begin to look for requests that stall and hosts that do not answer, once all are up."""
        self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")

    async def drain(self, timeout: float) -> None:
        """Take no new request; wait until the running ones are over, for at most `timeout`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            log.warning("%d requests did not finish in %.1f s", self._accepted, timeout)

    async def fail_all(self) -> None:
        """The engine is closed: end all requests, before their pipelines."""
        self.draining = self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for request in list(self.running.values()):
            request.events.put_nowait(Gone("the engine was closed"))

    async def close(self) -> None:
        """After the pipelines: nothing is reported any more."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    # -- its state, for the engine and for metrics

    @property
    def pace(self) -> float:
        """How fast the slowest running speech is made, in times of real time; infinite if there is
        none."""
        return slowest(self.running.values())

    def count(self, counter: Counter, number: int = 1) -> None:
        self._counts[counter] += number

    def reset_counts(self) -> None:
        """Count from here on: what was served so far was warm-up."""
        self._counts = dict.fromkeys(self._counts, 0)

    def metrics(self) -> dict[str, float]:
        values = {METRICS[counter]: float(count) for counter, count in self._counts.items()}
        return values | {"stretto_engine_running": float(self._accepted)}

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
        self.check_open()
        return "audio" in modalities

    def check_open(self) -> None:
        if self.draining:
            raise Busy("the server is shutting down")

    # -- requests

    async def run(
        self,
        build: Callable[[], Awaitable[PackedPrompt]],
        options: RequestOptions,
        write: Callable[[RequestState], Awaitable[None]] | None = None,
        *,
        placed: bool = False,
    ) -> AsyncIterator[Event]:
        """A request, from its prompt to its last event. `write` runs beside it: it adds text that
        is still to come. `placed`: its caller has a `place` for it."""
        with nullcontext() if placed else self.place():
            arrived = time.monotonic()
            prompt = await build()
            request = self.admit(prompt, options, arrived)
            del prompt  # its features go as soon as they are sent
            writing: asyncio.Future[None] | None = None
            try:
                await announce(request, self._config.share_prefix_cache)
                if write is not None:
                    writing = asyncio.ensure_future(write(request))
                while not request.over:
                    yield await request.next_event()
            finally:
                if writing is not None:
                    writing.cancel()
                self.remove(request)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests, from before the prompt is built to the last event;
        `drain` waits for all. A text that is read in passages, a request for each, has one for all
        of them."""
        self.check_open()  # since it was asked for
        if self._accepted >= self._config.max_requests:
            self.count("refused")
            raise Busy(f"{self._config.max_requests} requests are running already")
        self._accepted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._accepted -= 1
            if not self._accepted:
                self._idle.set()

    def admit(self, prompt: PackedPrompt, options: RequestOptions, arrived: float) -> RequestState:
        """Make the request's state and choose its pipeline. Nothing is announced to its stages yet.
        `remove` ends it."""
        if self._closed:
            raise Gone("the engine was closed")
        params = clamp_params(
            options, prompt.num_tokens, self.info.max_positions, self.model.vocab_size
        )
        stages = self.model.pipeline.paths.get(options.capability)
        if stages is None:
            raise Invalid(f"this model does not offer {options.capability}", "modalities")
        try:
            pipeline = self._router.choose(stages, options, self.running.values())
        except Busy:
            self.count("refused")
            raise
        request = RequestState(
            mint_id(options.request_id, next(self._numbers), self.running.values()),
            pipeline,
            self.model,
            stages,
            prompt,
            replace(options, params=params, tts_ids=prompt.tts_ids),
            TextStream(self._tokenizer),
            arrived,
            self._config.max_buffered_s,
        )
        self.running[request.id] = request
        self.count("prefills" if options.prefill_only else "requests")
        return request

    def remove(self, request: RequestState) -> None:
        """The request's iterator is over, for whatever reason: forget it."""
        if self.running.pop(request.id, None) is None:
            return
        request.leave()
        if not request.options.prefill_only:
            self.count(request.outcome)
        log.debug(
            "%s %s: %d prompt tokens, %d text tokens, %d frames, %.3f s",
            request.id,
            request.outcome,
            request.prompt.num_tokens,
            request.text.num_tokens,
            request.frames,
            time.monotonic() - request.arrived,
        )

    # -- what the hosts report

    async def _read(self, pipeline: Pipeline) -> None:
        async for report in pipeline.reports():
            if isinstance(report, StagesLost):
                self._lose(pipeline, report)
                continue
            try:
                request = self.running.get(report.message.request)  # type: ignore[union-attr]
                if request is not None:  # else it ended here, and this was on its way
                    request.apply(report.message, report.blob)
            except Exception as e:  # noqa: BLE001  a bad message ends its host, not the reader
                report.host.reject(e)

    def _lose(self, pipeline: Pipeline, lost: StagesLost) -> None:
        for r in list(self.running.values()):
            if r.pipeline is pipeline and not r.over and lost.stages & r.unfinished:
                r.fail(lost.error)

    # -- who makes no progress

    async def _watch(self) -> None:
        before = time.monotonic()
        rounds = 0
        while True:
            await asyncio.sleep(WATCH_S)
            late = time.monotonic() - before > LATE_S
            before = time.monotonic()
            if late:
                # this event loop stood still: what the hosts sent meanwhile has not been read yet
                continue
            self.fail_stalled()
            rounds += 1
            for p in self._pipelines:
                p.kill_silent(self._config.stall_s)
                if rounds % PING_EVERY == 0:
                    p.ping(rounds)

    def fail_stalled(self) -> None:
        """Fail the requests that make no progress. One that is still queued in its last stage while
        others make progress may wait longer."""
        stall_s = self._config.stall_s
        for request in list(self.running.values()):
            patient = request.queued and self._progresses(request.pipeline)
            request.fail_if_stalled(stall_s * PATIENCE if patient else stall_s)

    def _progresses(self, pipeline: Pipeline) -> bool:
        newest = max(r.progressed_at for r in self.running.values() if r.pipeline is pipeline)
        return time.monotonic() - newest <= self._config.stall_s


def clamp_params(
    options: RequestOptions, num_prompt: int, max_positions: int, vocab: int
) -> Params:
    """The request's parameters, with limits that the model has room for beside a prompt of
    `num_prompt` tokens, and with a seed."""
    params = options.params
    room = max_positions - num_prompt
    max_text_tokens = params.max_text_tokens
    if options.capability not in ("tts", "enrolment"):  # which write no text
        if room < 1:
            raise TooLong(
                f"the prompt has {num_prompt} tokens; the limit is {max_positions - 1}", "messages"
            )
        max_text_tokens = min(max_text_tokens, room)
    if unknown := [i for i in params.logit_bias if not 0 <= i < vocab]:
        raise Invalid(
            f"logit_bias names token {unknown[0]}; the vocabulary has {vocab}", "logit_bias"
        )
    max_frames = min(params.max_frames, max(1, room - 16))
    return replace(
        params,
        max_text_tokens=max_text_tokens,
        min_text_tokens=min(params.min_text_tokens, max_text_tokens),
        max_frames=max_frames,
        min_frames=min(params.min_frames, max_frames),
        seed=seed_of(params),
    )


def seed_of(params: Params) -> int:
    return params.seed if params.seed is not None else fresh_seed()


def fresh_seed() -> int:
    """The seed of a request that names none. As many bits as are exact in any language."""
    return secrets.randbits(53)


def mint_id(
    callers_id: RequestId | None, number: int, running: Iterable[RequestState]
) -> RequestId:
    """The id that all stages know a request by. None comes twice: stages remember those of requests
    that are over, and ignore what comes for them. So a caller's own id, which need not be
    remembered, gets a `number`."""
    if callers_id is None:
        return RequestId(f"r-{secrets.token_hex(8)}")
    if not _CALLERS_ID.fullmatch(callers_id):
        raise Invalid("request_id must be 1 to 48 letters, digits, _ . : or -", "request_id")
    if any(r.options.request_id == callers_id for r in running):
        raise Invalid(f"request {callers_id} is running already", "request_id")
    return RequestId(f"{callers_id}.{number}")


async def announce(request: RequestState, shared: bool) -> None:
    """Announce a request to all its stages at once: each is ready before its first input comes.
    Features go only to hosts whose stages encode them, large ones ahead and piece by piece.
    `shared`: owners share the prefix caches."""
    options = request.options
    stage_params = {
        stage: msgspec.Raw(_encode(params))
        for stage, params in request.model.stage_params(options).items()
    }
    if set(stage_params) != set(request.stages):
        raise Bug(
            f"a request for {options.capability} has parameters for stages {sorted(stage_params)} "
            f"and needs {request.stages}"
        )
    root = b"" if shared else digest_of(options.owner, b"cache owner")
    client = digest_of(options.client, b"client")
    encoding = [
        s.name
        for s in request.model.pipeline.stages
        if s.encodes_media and s.name in request.stages
    ]
    blob = await _send_features(request, encoding)
    for host, stages in request.pipeline.stages_by_host(request.stages).items():
        encodes = any(stage in stages for stage in encoding)
        here = {stage: stage_params[stage] for stage in stages}
        prompt = request.prompt.for_host(with_features=encodes)
        elsewhere = tuple(stage for stage in request.stages if stage not in here)
        message = Admit(request.id, prompt, here, options.params.priority, root, client, elsewhere)
        host.send(message, blob if encodes else b"")
    request.release_features()


async def _send_features(request: RequestState, encoding: Sequence[str]) -> bytes:
    """Send large features before the announcement; return small ones, which go with it."""
    features = request.prompt.features
    if features is None or not encoding:
        return b""
    if len(features.data) <= PIECE:
        return bytes(features.data)
    await request.pipeline.send_features(encoding, request.id, features.data)
    return b""


_encode = msgspec.msgpack.Encoder().encode


def digest_of(name: str, use: bytes) -> bytes:
    """What hosts know an owner or a client by, in prefix caches and in queues; not its name. The
    digest of an empty name is empty."""
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16, person=use).digest() if data else b""

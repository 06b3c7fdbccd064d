"""The engine: requests in, events out, over one or more pipelines of host processes. Asyncio;
imports no torch.

Its methods make a request of what they are called with: a way to build its prompt, and
`RequestOptions`. `RequestManager` runs it. Tensors never come here, and neither does a chunk: what
one stage makes for the next goes over their own link. All on the event loop, but for the prompt:
what came over the network is decoded and built by the prompt worker, a process of its own; what a
caller of this process gave, in a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto._imports import load
from stretto.config.devices import check_cards
from stretto.config.engine import EngineConfig, check_model
from stretto.embedded import is_random
from stretto.engine.events import EngineState, Event, Message, Modality, Progress
from stretto.engine.host_handle import Launcher
from stretto.engine.pipeline import Pipeline
from stretto.engine.request_manager import RequestManager
from stretto.engine.session import Session
from stretto.engine.supervisor import GpuSharing
from stretto.engine.time_scaling import at_speed
from stretto.engine.tts import TextToSpeech
from stretto.engine.warmup import WarmUp
from stretto.errors import StrettoError
from stretto.family import Model, ModelInfo
from stretto.hardware import cards
from stretto.observe.descriptors import OPEN_FILES, open_descriptors
from stretto.observe.recorder import labelled
from stretto.observe.trace import TraceWriter
from stretto.params import DEFAULT_STYLE, Params, RequestOptions, SpeechStyle
from stretto.preprocess.build import Builder
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.pool.jobs import Conversation, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.pool import PromptPool
from stretto.preprocess.pool.threads import InThreads, Prompts
from stretto.registry import open_model
from stretto.types import RequestId


class PipelineEngine:
    """Implements `EngineClient`. Made by `open`."""

    def __init__(self, model: Path, config: EngineConfig, launcher: Launcher | None = None) -> None:
        """`launcher`: what starts its hosts, if they are not to be children of this process."""
        self.config = config
        self.model = opened = open_model(model)
        check_model(config, opened.pipeline.names, opened.info.max_positions)
        self.builder: Builder = load(opened.builder)(model)
        self._threads = InThreads(self.builder)
        self.prompts: Prompts = self._threads
        if config.prompts:
            grammars = opened.pipeline.grammars
            self.prompts = PromptPool(model, opened.builder, config.prompts, grammars)
        self.info = _info_of(opened, model, config)
        self._trace = TraceWriter(Path(config.trace_dir)) if config.trace_dir is not None else None
        self._launcher = launcher
        self.pipelines = _make_pipelines(opened, model, config, self._trace, launcher)
        tokenizer = self.builder.tokenizer
        self.requests = RequestManager(opened, self.info, self.pipelines, config, tokenizer)
        self._tts = TextToSpeech(self.requests, self.prompts, tokenizer.encode)
        self._up = False  # it was, once
        self._error: str | None = None  # why it will not come up

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
            self.requests.read_reports()
            await asyncio.gather(self.prompts.start(), *(p.start() for p in self.pipelines))
            await asyncio.gather(*map(self._warm_up, self.pipelines))
            self.requests.reset_counts()
        except StrettoError as e:
            self._error = str(e)
            raise
        self._up = True
        self.requests.watch()

    async def _warm_up(self, pipeline: Pipeline) -> None:
        tts = TextToSpeech(self.requests, self._threads, self.builder.tokenizer.encode)
        devices = (host.device for host in pipeline.supervisor.hosts)
        gpu = any(device.startswith("cuda") for device in devices)
        await WarmUp(self.model, pipeline.name, tts, gpu).run()

    async def drain(self, timeout: float) -> None:
        await self.requests.drain(timeout)

    async def close(self) -> None:
        await self.requests.fail_all()
        await asyncio.gather(self.prompts.close(), *(p.close() for p in self.pipelines))
        await self.requests.close()
        if self._trace is not None:
            self._trace.close()

    # -- what others may ask

    @property
    def progress(self) -> Progress:
        stages = {
            (stage if len(self.pipelines) == 1 else f"{p.name}.{stage}"): what
            for p in self.pipelines
            for stage, what in p.supervisor.progress.items()
        }
        if self._error is not None:
            return Progress("dead", stages, self._error)
        trouble = "; ".join(filter(None, (p.supervisor.trouble for p in self.pipelines))) or None
        if not self._up:
            return Progress("loading", stages, trouble)
        if self.requests.draining:
            return Progress("draining", stages)
        if not any(p.ready(path) for p in self.pipelines for path in p.spec.paths.values()):
            return Progress("dead", stages, trouble or "no pipeline is up")
        if self.prompts.trouble is not None:
            hopeful = self.prompts.hopeful
            state: EngineState = "loading" if hopeful else "dead"
            return Progress(state, stages, self.prompts.trouble, accepts=hopeful)
        return Progress("ready", stages, trouble)

    @property
    def pace(self) -> float:
        """How fast the slowest running speech is made, in times of real time; infinite if there is
        none."""
        return self.requests.pace

    def metrics(self) -> Mapping[str, float]:
        values = self.requests.metrics() | dict(self.prompts.metrics())
        return values | _open_files(self.prompts) | _host_metrics(self.pipelines)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of all hosts, for tests and tools."""
        return [pid for p in self.pipelines for pid in p.pids]

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
        speaks = self.requests.check(modalities, voice)
        options = RequestOptions(
            "speech" if speaks else "text",
            params or self.info.defaults,
            voice,
            request_id=request_id,
            session=session,
            owner=owner,
            client=messages.client if isinstance(messages, Conversation) else "",
        )

        async def build() -> PackedPrompt:
            if isinstance(messages, Conversation):
                with closing(messages):
                    await self.prompts.check(options.params.grammar, options.client)
                    return await self.prompts.build(messages, use_audio_in_video)
            await self.prompts.check(options.params.grammar, options.client)
            return await self._threads.build_local(
                [dict(m) for m in messages],
                [dict(t) for t in tools] if tools else None,
                use_audio_in_video,
                allow_paths=allow_paths,
            )

        events = self.requests.run(build, options)
        return at_speed(events, options.params.speed, self.info.sample_rate)

    def speak(
        self,
        text: str | AsyncIterator[str],
        *,
        voice: str | None = None,
        style: SpeechStyle = DEFAULT_STYLE,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        client: str = "",
    ) -> AsyncIterator[Event]:
        self.requests.check(("audio",), voice)
        options = RequestOptions(
            "tts",
            params or self.info.defaults,
            voice,
            style=style,
            request_id=request_id,
            owner=owner,
            client=client,
        )
        events = self._tts.speak(text, options)
        return at_speed(events, options.params.speed, self.info.sample_rate)

    async def enrol(self, clip: Conversation, *, owner: str = "") -> bytes:
        self.requests.check_open()
        return await self._tts.enrol(clip, RequestOptions("enrolment", owner=owner))

    def session(self, *, owner: str = "", client: str = "", allow_paths: bool = False) -> Session:
        """A conversation that goes on: see `session.py`."""
        self.requests.check_open()
        return Session(
            self.requests,
            self.prompts,
            self._threads,
            owner=owner,
            client=client,
            allow_paths=allow_paths,
        )

    async def outline(
        self, body: MemFile, long: tuple[str, ...], max_short_bytes: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        return await self.prompts.outline(body, long, max_short_bytes, client)

    async def cut(
        self, sound: MemFile, seconds: float | None, client: str = ""
    ) -> tuple[Windows, MemFile]:
        return await self.prompts.cut(sound, seconds, client)


def _info_of(opened: Model, model: Path, config: EngineConfig) -> ModelInfo:
    """The model's info, within this engine's limits."""
    return replace(
        opened.info,
        max_positions=min(opened.info.max_positions, config.host.max_context),
        stages={s.name: s.does for s in opened.pipeline.stages},
        random_weights=config.host.load_format == "dummy" or is_random(model),
    )


def _make_pipelines(
    opened: Model,
    model: Path,
    config: EngineConfig,
    trace: TraceWriter | None,
    launcher: Launcher | None,
) -> list[Pipeline]:
    """Their hosts are not started. Those that share a card load there one after the other."""
    sharing = GpuSharing()
    return [
        Pipeline(f"p{i}", str(model), opened.pipeline, config.replica(i), trace, launcher, sharing)
        for i in range(config.num_pipelines)
    ]


def _open_files(prompts: Prompts) -> dict[str, float]:
    """Descriptors of this process and of the one that builds prompts; hosts count their own."""
    pids = {"server": os.getpid(), "prompt worker": prompts.pid}
    counted = {name: open_descriptors(pid) for name, pid in pids.items() if pid is not None}
    return {
        labelled(OPEN_FILES, process=name): count
        for name, count in counted.items()
        if count is not None
    }


def _host_metrics(pipelines: Sequence[Pipeline]) -> dict[str, float]:
    """Metrics of all hosts; with a label for the pipeline where there are several."""
    values: dict[str, float] = {}
    for p in pipelines:
        own = p.metrics()
        values |= (
            own if len(pipelines) == 1 else {labelled(k, replica=p.name): v for k, v in own.items()}
        )
    return values

"""A host in this process, driven by hand, and the front end of its model: what tests of whole hosts
use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from stretto._imports import load
from stretto.config.engine import HostSettings
from stretto.engine.events import Event, Product
from stretto.engine.tts import TextToSpeech
from stretto.engine.warmup import WarmUp
from stretto.family import ModelInfo
from stretto.messages.hosts import Configure
from stretto.messages.requests import Admit, Codes, Ended, Failed, Pcm, ProductData, Text
from stretto.models.qwen3_tts.params import ClonedVoice
from stretto.params import Capability, Params, RequestOptions, SpeechStyle
from stretto.preprocess import build as work
from stretto.preprocess.packed_prompt import PackedPrompt, pack
from stretto.preprocess.pool.threads import InThreads
from stretto.preprocess.prompt import Prompt
from stretto.registry import open_model
from stretto.stage.host.host import Host
from stretto.types import RequestId
from tests.stage.reports import Reports

ids = count()
Question = tuple[Capability, Prompt, tuple[int, ...] | None, SpeechStyle]


def noise(seconds: float) -> dict[str, Any]:
    samples = np.random.default_rng(0).standard_normal(int(16_000 * seconds), dtype=np.float32)
    return {"type": "audio", "data": samples, "sample_rate": 16_000}


class Driven:
    """A host in this process, driven by hand, and the front end of its model."""

    def __init__(self, model: Path, stages: tuple[str, ...] = (), **settings: Any) -> None:
        self.model = open_model(model)
        self.builder: work.Builder = load(self.model.builder)(model)
        self.channel = Reports()
        self.reports: list[tuple[Any, bytes]] = self.channel.posted
        pipeline = self.model.pipeline
        links = tuple((k.sender, k.receiver) for k in pipeline.links)
        configure = Configure(str(model), pipeline.build, stages or pipeline.names, {}, links)
        self.host = Host(configure, HostSettings(trace=True, **settings), self.channel)
        self.host.load()
        for node in (
            self.host.stages.values()
        ):  # no time passes: the sizes of packets tell nothing of this machine
            if hasattr(node, "clock"):
                node.clock = lambda: 0.0
            if hasattr(node, "encoders"):
                node.encoders.clock = lambda: 0
        self.reports.clear()

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    def warm_up(self) -> int:
        """The requests that an engine sends through its pipelines before it is ready."""
        requests: Any = self
        tts = TextToSpeech(requests, InThreads(self.builder), self.builder.tokenizer.encode)
        return asyncio.run(WarmUp(self.model, "p0", tts, gpu=False).run())

    async def run(
        self,
        build: Callable[[], Awaitable[PackedPrompt]],
        options: RequestOptions,
        write: Any = None,
    ) -> AsyncIterator[Event]:
        prompt = await build()
        self._serve(prompt, replace(options, tts_ids=prompt.tts_ids), RequestId(f"run-{next(ids)}"))
        for message, blob in self.reports:
            if isinstance(message, ProductData):
                yield Product(blob)

    def ask(self, question: Question, id: str = "a") -> dict[str, Any]:
        """A request that draws from a seed; all that is said of it."""
        capability, prompt, tts_ids, style = question
        params = Params(
            temperature=1.0,
            max_text_tokens=6,
            ignore_eos=True,
            max_frames=5,
            min_frames=5,
            want_codes=True,
            seed=7,
        )
        options = RequestOptions(capability, params, style=style, tts_ids=tts_ids)
        self._serve(pack(prompt), options, RequestId(id))
        found: dict[str, Any] = {"text": [], "codes": b"", "pcm": b"", "cached": {}}
        for message, blob in self.reports:
            match message:
                case Text(ids=ids):
                    found["text"] += ids
                case Codes():
                    found["codes"] += blob
                case Pcm():
                    found["pcm"] += blob
                case Ended(stage=stage, cached=cached):
                    found["cached"][stage] = cached
        return found

    def _serve(self, packed: PackedPrompt, options: RequestOptions, id: RequestId) -> None:
        """Until all stages have ended; `reports` are then those of this request."""
        params = self.model.stage_params(options)
        raw = {stage: msgspec.Raw(msgspec.msgpack.encode(p)) for stage, p in params.items()}
        self.reports.clear()
        admit = Admit(id, packed.for_host(with_features=True), raw)
        self.host.handle(admit, packed.feature_bytes())
        while len({m.stage for m, _ in self.reports if isinstance(m, Ended)}) < len(params):
            assert not any(isinstance(m, Failed) for m, _ in self.reports), self.reports
            self.host.loop.round()

    def question(self, wants: str) -> Question:
        builder, style = self.builder, SpeechStyle()
        if wants in ("reading", "cloned"):
            if wants == "cloned":
                talker = self.model.config.talker  # type: ignore[attr-defined]
                rng = np.random.default_rng(1)
                vector = rng.standard_normal(talker.decoder.hidden_size, dtype=np.float32)
                codes = rng.integers(0, 2048, (5, talker.num_code_groups)).astype(np.int16)
                style = SpeechStyle(
                    voice=msgspec.msgpack.encode(
                        ClonedVoice(vector.tobytes(), codes.tobytes(), (5, 6, 7))
                    )
                )
            return "tts", *work.read_aloud(builder, "Good morning to all."), style
        parts: list[Any] = [{"type": "text", "text": "What is this?"}]
        match wants:
            case "sound":
                parts.append(noise(1.3))
            case "short sound":
                parts.append(noise(0.1))
            case "picture":
                parts.append({"type": "image", "data": Image.new("RGB", (64, 96))})
        return "speech", builder.build([{"role": "user", "content": parts}]), None, style

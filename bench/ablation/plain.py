"""The plain driver with a stopwatch, streamed or stage by stage: the ablation's baseline without
engine or scheduler.

Both forms run the same models in one thread and give the same answer; they differ only in when each
stage may begin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stretto.config.engine import HostSettings
from stretto.kernels.reference.paged import KVCache
from stretto.loadtest.player import Packet
from stretto.loadtest.runner import Sample
from stretto.models.qwen3_omni.bridge import TalkerPrompt
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.preprocess.prompt import Prompt
from stretto.types import SamplingParams
from tests.solo import Audio, Event, Frame, Options, Solo, TalkerVoice, TextToken, ThinkerVoice


class FixedSolo(Solo):
    """Answers run to their full length: an end token is a token like any other, an end code is
    never picked."""

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        with torch.inference_mode():
            models.talker.suppress[models.config.talker.codec.eos] = True

    def _pick_text(self, voices: list[ThinkerVoice], hidden: torch.Tensor) -> list[int]:
        tokens = super()._pick_text(voices, hidden)
        for v in voices:
            if v.finish == "stop":
                v.finish = "length" if len(v.tokens) == v.options.max_text_tokens else None
        return tokens


class StageByStage(FixedSolo):
    """The thinker to its end, then the talker to its end, then the vocoder, all at once."""

    @torch.inference_mode()
    def _run(
        self, prompts: list[Prompt], options: list[Options], plans: list[TalkerPrompt | None]
    ) -> Iterator[Event]:
        (prompt,), (option,), (plan,) = prompts, options, plans
        assert plan is not None
        talker = self.models.talker
        text_cache, text_blocks = self._pool(
            self.models.thinker, [len(prompt.ids) + option.max_text_tokens]
        )
        thinkers = [self._open_thinker(prompt, option, plan, text_blocks[0])]
        cache, blocks = self._speech_pool(plan, option)
        talkers: list[TalkerVoice | None] = [
            TalkerVoice(plan, option, blocks, torch.zeros_like(talker.suppress))
        ]
        while thinkers[0].finish is None:
            for i, token in self._think(thinkers, talkers, text_cache):
                yield TextToken(i, token)
        voice, codes = talkers[0], []
        assert voice is not None
        while voice.finish is None:
            for i, row in self._talk(thinkers, talkers, cache):
                codes.append(torch.from_numpy(row))
                yield Frame(i, row)
        yield Audio(
            0, 0, self.models.code2wav.decode(torch.stack(codes).to(talker.device)).cpu().numpy()
        )

    def _speech_pool(self, plan: TalkerPrompt, option: Options) -> tuple[KVCache, list[int]]:
        cache, blocks = self._pool(self.models.talker, [len(plan) + option.max_frames + 1])
        return cache, blocks[0]


class Plain:
    def __init__(self, models: Models, builder: PromptBuilder) -> None:
        self.models, self.builder = models, builder
        self.drivers = {True: FixedSolo(models), False: StageByStage(models)}

    @classmethod
    def open(cls, directory: Path, host: HostSettings) -> Plain:
        if host.device == "cpu":
            torch.set_num_threads(host.threads)
        dtype = getattr(torch, host.dtype) if host.dtype else None
        models = Models.open(
            Source.open(directory, host.device, dtype, host.load_format, False, host.expert_weights)
        )
        return cls(models, PromptBuilder.open(directory, models.config))

    def run(self, messages: list[dict[str, Any]], params: Params, streamed: bool) -> Sample:
        return self.timed(messages, params, streamed)[0]

    def timed(
        self, messages: list[dict[str, Any]], params: Params, streamed: bool
    ) -> tuple[Sample, list[Event]]:
        """When each piece came, and the pieces."""
        text = SamplingParams(
            params.temperature, params.top_k, params.top_p, params.repetition_penalty
        )
        options = Options(
            text=text, max_text_tokens=params.max_text_tokens, max_frames=params.max_frames
        )
        sample, events, start = Sample(0, 0.0), [], time.perf_counter()
        for e in self.drivers[streamed].run(
            self.builder.build(messages), options.seeded(params.seed or 0)
        ):
            events.append(e)
            at = time.perf_counter() - start
            if isinstance(e, TextToken):
                sample.words.append(at)
            elif isinstance(e, Audio):
                sample.packets.append(Packet(at, len(e.samples) / SAMPLE_RATE_OUT))
        sample.end = time.perf_counter() - start
        return sample, events

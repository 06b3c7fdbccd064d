"""A host of its own for tests that run a whole pipeline in one process, on a CPU and on a GPU alike.

On a GPU the tiny model goes through the fused kernels and captured steps, in float32: what is compared there is exact,
whatever was batched with what. (In bfloat16 another batch size could tip a close call.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.harness.host import OneHost, Question
from stretto.control.messages import (
    Cancel,
    Codes,
    Ended,
    Failed,
    FromHost,
    Sampling,
    Text,
)
from stretto.control.settings import HostSettings
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.nodes.code2wav import Code2WavNode
from stretto.prompt.packed import media_digest, pack_prompt
from stretto.prompt.prompt import Prompt
from stretto.types import GREEDY, RequestId
from tests.pipeline import announcement
from tests.prompts import Maker

TOKENS, FRAMES = 6, 4
SETTINGS = HostSettings(
    dtype="float32",
    block_size=8,
    blocks={"thinker": 96, "talker": 96},
    max_rows=3,
    max_context=256,
    prefill_chunk=24,
    lone_prefill_chunk=24,
    link_slots=2,
    link_slot_bytes=1 << 16,
)
"""Fewer rows and slots than requests, and prompts in several steps."""


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    text: list[int] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    cached: int = 0  # prompt rows that the thinker found
    done: bool = False
    error: str | None = None

    @property
    def output(self) -> tuple[list[int], list[list[int]]]:
        return self.text, self.codes


class Listener(OneHost):
    """A host whose answers are kept. A request that failed is cancelled, as the engine would."""

    def __init__(self, directory: Path, settings: HostSettings) -> None:
        self.answers: dict[RequestId, Answer] = defaultdict(Answer)
        self.asked = 0
        super().__init__(directory, settings)

    def _report(self, message: FromHost, blob: bytes) -> None:
        super()._report(message, blob)
        match message:
            case Text(request=id, ids=tokens):
                self.answers[id].text += tokens
            case Codes(request=id, start=first):
                answer = self.answers[id]
                assert first == len(answer.codes)
                answer.codes += np.frombuffer(blob, np.int32).reshape(-1, 16).tolist()
            case Ended(request=id, stage="thinker", cached=cached):
                self.answers[id].cached = cached
            case Ended(request=id, stage="code2wav"):
                self.answers[id].done = True
            case Failed(request=id, message=text):
                self.failed = None
                self.answers[id].error = self.answers[id].error or text
                self.host.loop.post(lambda: self.host.handle(Cancel(id), b""))

    def admit(self, prompts: Sequence[Prompt]) -> list[RequestId]:
        """No name is ever used twice."""
        ids = []
        for prompt in prompts:
            self.asked += 1
            admit, blob = question(f"q{self.asked}", prompt)
            self.host.handle(admit, blob)
            ids.append(admit.request)
        return ids

    def step(self) -> None:
        """One round; if nothing could be done, until something can."""
        if not self.host.loop.round():
            self.host.loop.sleep()

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """All of them at once, each to its end."""
        ids = self.admit(prompts)
        while not all(self.answers[id].done or self.answers[id].error for id in ids):
            self.step()
        self.settle()
        return [self.answers.pop(id) for id in ids]

    def settle(self) -> None:
        """Until steps that ran ahead are back; then nothing may be left of any request."""
        while self.host.loop.round() or any(node.stage.num_in_flight for node in self.host.nodes.values()):
            pass
        for node in self.host.nodes.values():
            assert not len(node.stage), node.name
            if not isinstance(node, Code2WavNode):
                node.stage.scheduler.check()
                assert not node.link.boxes

    def forget(self) -> None:
        """Nothing that was computed so far will be found."""
        for node in self.host.nodes.values():
            if not isinstance(node, Code2WavNode):
                node.stage.scheduler.pool.clear_cache()


def question(name: str, prompt: Prompt) -> Question:
    meta, blob = pack_prompt(prompt, features=True)
    greedy = Sampling.of(GREEDY)
    admit = announcement(
        request=RequestId(name), prompt=meta, speak=True, voice=None, text=greedy, code0=greedy, residual=greedy,
        max_text_tokens=TOKENS, max_frames=FRAMES, min_text_tokens=TOKENS, min_frames=FRAMES, first_frames=1,
        each_frames=2, ramp=None, media=media_digest(prompt), want_codes=True,
    )  # fmt: skip
    return admit, blob


def about(config: OmniConfig, sound: int, words: int) -> Prompt:
    """A sound and some words about it. The same sound is the same opening."""
    maker = Maker(config, seed=sound)
    heard = maker.audio(260)
    maker.rng = np.random.default_rng(1000 + words)
    return maker.turn("user", heard, maker.words(6)).prompt()

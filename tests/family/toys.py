"""Families of two and of four stages, in a few dozen lines each: what it takes to add one.

Their stages compute nothing but sums, so that an answer can be told from its prompt; all else is
the real engine's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from stretto.errors import Invalid
from stretto.family import LinkSpec, MediaTokens, ModelInfo, PipelineSpec, StageSpec
from stretto.messages.requests import Admit, Pcm, Text
from stretto.params import RequestOptions
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.template import Tokenizer
from stretto.stage.host.context import StageContext
from stretto.stage.payload import named, within
from stretto.stage.request import Reason
from stretto.stage.stage import Output, Stage, ToEngine, Transfer
from stretto.stage.timings import StageTimings
from stretto.types import Mark, RequestId, Span

SAMPLES = 10  # of each number
NO_MEDIA = MediaTokens()


# -- what crosses the links


@dataclass(frozen=True, slots=True)
class Numbers:
    HOST: ClassVar[frozenset[str]] = frozenset({"numbers"})
    span: Span
    numbers: torch.Tensor  # int64 [rows]

    def part(self, span: Span) -> Numbers:
        start, stop = within(self.span, span)
        return Numbers(span, self.numbers[start:stop])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"numbers": self.numbers}

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        (numbers,) = named(tensors, "numbers")
        if numbers.shape != (len(span),):
            raise ValueError(f"{numbers.shape} numbers for {span}")
        return cls(span, numbers)


# -- stages


class ToyParams(msgspec.Struct, frozen=True):
    count: int
    passes_on: bool


@dataclass(slots=True, eq=False)
class Work:
    params: ToyParams
    timings: StageTimings
    numbers: deque[int] = field(default_factory=deque)
    done: int = 0
    ended: bool = False  # no more will come


class ToyStage(Stage):
    """Takes numbers, changes each, and passes it on: as text from the first stage, as samples from
    the last."""

    params = ToyParams

    def __init__(self, name: str, link: str | None, on: str | None, change: Callable[[int], int]):
        super().__init__()
        self.name, self.change, self.on = name, change, on
        self.receives = {link: Numbers} if link else {}
        self.sends = {on: Numbers} if on else {}
        self.work: dict[RequestId, Work] = {}
        self.blocked: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self.work)

    def admit(self, a: Admit, params: ToyParams, prompt: Prompt) -> None:
        self.work[a.request] = work = Work(params, StageTimings(0.0))
        if not self.receives:
            work.numbers.extend(prompt.ids[: params.count])
            work.ended = True

    def cancel(self, id: RequestId) -> None:
        self.work.pop(id, None)
        self.blocked.discard(id)

    def finish(self, id: RequestId) -> None:
        if id in self.work:  # it may have ended meanwhile
            self.work[id].numbers.clear()

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self.work:
            self.blocked.add(id)
        else:
            self.blocked.discard(id)

    def poll(self) -> Sequence[Output]:
        return self.take_outputs()

    def launch(self) -> bool:
        did = False
        for id, work in list(self.work.items()):
            did = (id not in self.blocked and self._step(id, work)) or did
        return did

    def _step(self, id: RequestId, work: Work) -> bool:
        if work.numbers:
            self._give(id, work, self.change(work.numbers.popleft()))
        elif work.ended:
            if self.on and work.params.passes_on:
                self.outputs.append(Transfer(self.on, id, None, Mark.REQUEST_END))
            self.outputs.append(ToEngine(work.timings.ended(id, self.name, Reason.STOP)))
            del self.work[id]
        else:
            return False
        return True

    def _give(self, id: RequestId, work: Work, number: int) -> None:
        work.timings.mark(float(work.done))
        if not self.receives:
            self.outputs.append(ToEngine(Text(id, (number,))))
        if self.on and work.params.passes_on:
            self.outputs.append(
                Transfer(
                    self.on, id, Numbers(Span(work.done, work.done + 1), torch.tensor([number]))
                )
            )
        elif not self.on:
            samples = np.full(SAMPLES, number / 1e4, np.float32)
            self.outputs.append(
                ToEngine(Pcm(id, SAMPLES * work.done, work.done + 1), samples.tobytes())
            )
        work.done += 1

    def accept(self, transfer: Transfer) -> None:
        work = self.work[transfer.request]
        if transfer.payload is not None:
            work.numbers.extend(transfer.payload.numbers.tolist())
        work.ended = transfer.mark is Mark.REQUEST_END


# -- families

CHANGES: dict[str, dict[str, Callable[[int], int]]] = {
    "toy_two": {"writer": lambda n: n, "voice": lambda n: n + 1},
    "toy_four": {
        "writer": lambda n: n,
        "planner": lambda n: 2 * n,
        "singer": lambda n: n + 3,
        "horn": lambda n: 5 * n,
    },
}


def build_two(stages: Sequence[str], c: StageContext) -> dict[str, Stage]:
    return build("toy_two", stages, c)


def build_wrong(stages: Sequence[str], c: StageContext) -> dict[str, Stage]:
    """As a mistake in a family would: the last stage listens on a link that nobody has declared."""
    made = build("toy_two", stages, c)
    return made | {n: ToyStage(n, "writer>horn", None, int) for n in stages if n == "voice"}


def build_too_few(stages: Sequence[str], c: StageContext) -> dict[str, Stage]:
    return build("toy_two", stages[:-1], c)


def build_four(stages: Sequence[str], c: StageContext) -> dict[str, Stage]:
    return build("toy_four", stages, c)


def build(family: str, stages: Sequence[str], c: StageContext) -> dict[str, Stage]:
    names = list(CHANGES[family])

    def stage(name: str) -> Stage:
        c.progress(name, "loading")
        i = names.index(name)
        link = f"{names[i - 1]}>{name}" if i else None
        on = f"{name}>{names[i + 1]}" if i + 1 < len(names) else None
        return ToyStage(name, link, on, CHANGES[family][name])

    return {name: stage(name) for name in stages}


@dataclass(frozen=True, slots=True)
class ToyModel:
    pipeline: PipelineSpec
    info: ModelInfo
    vocab_size: int = 1000
    media_tokens: MediaTokens = NO_MEDIA
    builder: str = "tests.family.toys:ToyBuilder"

    def check_voice(self, voice: str) -> None:
        if voice not in self.info.voices:
            raise Invalid(f"unknown voice {voice!r}", "voice")

    def stage_params(self, options: RequestOptions) -> dict[str, msgspec.Struct]:
        path = self.pipeline.paths[options.capability]
        return {
            stage: ToyParams(options.params.max_text_tokens, stage != path[-1]) for stage in path
        }


def open_toy(directory: Path, family: str, function: str) -> ToyModel:
    names = tuple(CHANGES[family])
    first, *rest = names
    stages = (
        StageSpec(first, decides="text"),
        *(StageSpec(n) for n in rest[:-1]),
        StageSpec(rest[-1], decides="audio"),
    )
    links = tuple(LinkSpec(a, b) for a, b in pairwise(names))
    spec = PipelineSpec(
        f"tests.family.toys:{function}", stages, links, {"text": names[:1], "speech": names}
    )
    return ToyModel(spec, ModelInfo(directory.name, ("plain",), "plain", 8000, 4096))


def open_two(directory: Path) -> ToyModel:
    return open_toy(directory, "toy_two", "build_two")


def open_wrong(directory: Path) -> ToyModel:
    return open_toy(directory, "toy_two", "build_wrong")


def open_too_few(directory: Path) -> ToyModel:
    return open_toy(directory, "toy_two", "build_too_few")


def open_four(directory: Path) -> ToyModel:
    return open_toy(directory, "toy_four", "build_four")


class ToyBuilder:
    """The last message's words, and no template."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.open(directory)

    def build(self, messages: Sequence[Any], *_: Any, **__: Any) -> Prompt:
        return Prompt(tuple(self.tokenizer.encode(messages[-1]["content"])))

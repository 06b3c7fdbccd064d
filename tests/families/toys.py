"""Families of two and of four stages, in a few dozen lines each: what it takes to add one.

Their stages compute nothing but sums, so that an answer can be told from its prompt; all else is the real engine's."""

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

from stretto.control.messages import Admit, Pcm, Text
from stretto.errors import Invalid, StrettoError
from stretto.family import LinkSpec, MediaTokens, ModelInfo, PipelineSpec, StageSpec, Wanted
from stretto.prompt.prompt import Prompt
from stretto.prompt.template import Tokenizer
from stretto.stage.context import StageContext
from stretto.stage.links import Arrival, Inlet, Outlet
from stretto.stage.node import Node
from stretto.stage.payload.schema import named, within
from stretto.stage.report import Journal, failed
from stretto.stage.request import Reason
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
    journal: Journal
    numbers: deque[int] = field(default_factory=deque)
    done: int = 0
    ended: bool = False  # no more will come


class ToyNode:
    """Takes a number a turn, changes it, and passes it on: as text from the first stage, as samples from the last."""

    params, cheap, due_ns, stream = ToyParams, False, None, None

    def __init__(self, name: str, link: str | None, on: str | None, change: Callable[[int], int], c: StageContext):
        self.name, self.change, self.report = name, change, c.report
        self.inlets = (Inlet(link, Numbers, self._read, self._fail),) if link else ()
        self.outlets = (Outlet(on, Numbers),) if on else ()
        self.work: dict[RequestId, Work] = {}

    def __len__(self) -> int:
        return len(self.work)

    def admit(self, a: Admit, params: ToyParams, prompt: Prompt) -> None:
        self.work[a.request] = work = Work(params, Journal(0.0))
        for outlet in self.outlets:
            if params.passes_on:
                outlet.open(a.request)
        for inlet in self.inlets:
            inlet.open(a.request)
        if not self.inlets:
            work.numbers.extend(prompt.ids[: params.count])
            work.ended = True

    def cancel(self, id: RequestId) -> None:
        self.work.pop(id, None)
        for end in (*self.inlets, *self.outlets):
            end.close(id, purge=True)

    def finish(self, id: RequestId) -> None:
        if id in self.work:  # it may have ended meanwhile
            self.work[id].numbers.clear()

    def throttle(self, id: RequestId, on: bool) -> None:
        for outlet in self.outlets:
            outlet.throttle(id, on)

    def turn(self) -> bool:
        did = bool(self.inlets) and self.inlets[0].turn()
        for outlet in self.outlets:
            outlet.flush()
        for id, work in list(self.work.items()):
            if not any(outlet.blocked(id) for outlet in self.outlets):
                did = self._step(id, work) or did
        return did

    def _step(self, id: RequestId, work: Work) -> bool:
        if work.numbers:
            self._give(id, work, self.change(work.numbers.popleft()))
        elif work.ended:
            if self.outlets and work.params.passes_on:
                self.outlets[0].send(id, None, Mark.REQUEST_END)
            self.report(work.journal.ended(id, self.name, Reason.STOP), b"")
            del self.work[id]
        else:
            return False
        return True

    def _give(self, id: RequestId, work: Work, number: int) -> None:
        work.journal.mark(float(work.done))
        if not self.inlets:
            self.report(Text(id, (number,)), b"")
        if self.outlets and work.params.passes_on:
            self.outlets[0].send(id, Numbers(Span(work.done, work.done + 1), torch.tensor([number])))
        elif not self.outlets:
            samples = np.full(SAMPLES, number / 1e4, np.float32)
            self.report(Pcm(id, SAMPLES * work.done, work.done + 1), samples.tobytes())
        work.done += 1

    def _read(self, id: RequestId, arrival: Arrival[Numbers]) -> None:
        work = self.work[id]
        if arrival.payload is not None:
            work.numbers.extend(arrival.payload.numbers.tolist())
        work.ended = arrival.mark is Mark.REQUEST_END

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        self.cancel(id)
        self.report(failed(id, self.name, error), b"")


# -- families

CHANGES: dict[str, dict[str, Callable[[int], int]]] = {
    "toy_two": {"writer": lambda n: n, "voice": lambda n: n + 1},
    "toy_four": {"writer": lambda n: n, "planner": lambda n: 2 * n, "singer": lambda n: n + 3, "horn": lambda n: 5 * n},
}


def build_two(stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    return build("toy_two", stages, c)


def build_wrong(stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    """As a mistake in a family would: the last stage listens on a link that nobody has declared."""
    nodes = build("toy_two", stages, c)
    return nodes | {n: ToyNode(n, "writer>horn", None, int, c) for n in stages if n == "voice"}


def build_too_few(stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    return build("toy_two", stages[:-1], c)


def build_four(stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    return build("toy_four", stages, c)


def build(family: str, stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    names = list(CHANGES[family])

    def node(name: str) -> Node:
        c.progress(name, "loading")
        i = names.index(name)
        link = f"{names[i - 1]}>{name}" if i else None
        on = f"{name}>{names[i + 1]}" if i + 1 < len(names) else None
        return ToyNode(name, link, on, CHANGES[family][name], c)

    return {name: node(name) for name in stages}


@dataclass(frozen=True, slots=True)
class ToyModel:
    pipeline: PipelineSpec
    info: ModelInfo
    vocab_size: int = 1000
    media_tokens: MediaTokens = NO_MEDIA
    builder: str = "tests.families.toys:ToyBuilder"

    def check_voice(self, voice: str) -> None:
        if voice not in self.info.voices:
            raise Invalid(f"unknown voice {voice!r}", "voice")

    def stage_params(self, wanted: Wanted) -> dict[str, msgspec.Struct]:
        path = self.pipeline.paths[wanted.capability]
        return {stage: ToyParams(wanted.params.max_text_tokens, stage != path[-1]) for stage in path}


def open_toy(directory: Path, family: str, function: str) -> ToyModel:
    names = tuple(CHANGES[family])
    first, *rest = names
    stages = (
        StageSpec(first, decides="text"),
        *(StageSpec(n) for n in rest[:-1]),
        StageSpec(rest[-1], decides="audio"),
    )
    links = tuple(LinkSpec(a, b) for a, b in pairwise(names))
    spec = PipelineSpec(f"tests.families.toys:{function}", stages, links, {"text": names[:1], "speech": names})
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

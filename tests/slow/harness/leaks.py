"""What the fault matrix and the soak share: a pool of requests with their answers by the plain
driver, a check of everything that could leak, and the line through a process's memory samples that
shows whether it grows.

The answers are made in a process of their own. The process that runs the engine imports no torch,
like a server's, so its memory is that of the engine alone."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness.env import describe
from bench.harness.workload import picture, sound
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished, Modality, TextDelta
from stretto.params import Params

POLL_S = 0.02
MOST_REPORTS = 10
BLOCKS = 10  # means that a line is fitted to
LEAST_SAMPLES = 4 * BLOCKS  # of memory: half of them are looked at, two for each mean
STUDENT = {
    2: 2.306,
    3: 2.365,
}  # 97.5 % of Student's t for that many parameters, with 8 and 7 degrees of freedom


def on_tiny(work: Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    """What `work` finds, given where the tiny model is to be written."""
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(work(Path(folder) / "tiny"))


# -- questions and answers


@dataclass(slots=True)
class Answer:
    """What came out, however it was made."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    codes: list[list[int]] = field(default_factory=list)
    packets: list[npt.NDArray[np.float32]] = field(default_factory=list)
    finish: tuple[str, str | None] | None = None
    broken: str | None = None  # what was wrong with the order of the events

    def take(self, e: Event) -> None:
        match e:
            case TextDelta():
                self.ids += e.ids
                self.text += e.text
            case CodeFrames():
                if e.start != len(self.codes):
                    self.broken = f"frames from {e.start} after {len(self.codes)}"
                self.codes += e.codes.tolist()
            case AudioChunk():
                if e.start != (got := sum(map(len, self.packets))):
                    self.broken = f"samples from {e.start} after {got}"
                self.packets.append(e.samples)
            case Finished():
                if self.finish is not None:
                    self.broken = "ended twice"
                self.finish = (e.text, e.audio)

    @property
    def samples(self) -> npt.NDArray[np.float32]:
        return np.concatenate([np.zeros(0, np.float32), *self.packets])


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its one right answer."""

    name: str
    messages: list[dict[str, Any]]
    modalities: Sequence[Modality]
    params: Params
    want: Answer

    def problem(self, got: Answer) -> str | None:
        """What is wrong with an answer; None: it is exact."""
        want, heard, right = self.want, got.samples, self.want.samples
        for what, ours, theirs in (
            ("order", got.broken, None),
            ("ids", got.ids, want.ids),
            ("text", got.text, want.text),
            ("codes", got.codes, want.codes),
            ("finish", got.finish, want.finish),
            ("samples", len(heard), len(right)),
        ):
            if ours != theirs:
                return f"{self.name}: {what} {ours!r:.200}, expected {theirs!r:.200}"
        if not np.allclose(heard, right, rtol=0, atol=1e-5):
            return f"{self.name}: samples differ by {np.abs(heard - right).max():g}"
        return None


def prepared(
    model: Path, params: Params, lengths: Iterable[tuple[int, int]], silent: int
) -> tuple[list[Case], Any]:
    """Write the tiny model, and ask it: one case for each (text tokens, frames), over all kinds of
    question, the last `silent` of them text-only. And what it is measured on."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as there:
        return there.submit(_prepare, model, params, list(lengths), silent).result()


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


CHATS: dict[str, list[dict[str, Any]]] = {
    "text": user(say("Hello, what is the weather like in the city?")),
    "multi-turn": [
        {"role": "system", "content": "Answer in a few words."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A voice."},
        {"role": "user", "content": "And what can you do?"},
    ],
    "audio": user(sound(1.3, 0), say("What was that?")),
    "image": user(say("Look:"), picture((96, 64), 0)),
    "short": user(say("And now?")),
    "other sound": user(sound(0.7, 5), say("And this?")),
    "both": user(picture((96, 64), 3), sound(0.5, 4), say("Together?")),
}
"""Questions of all kinds."""


def _prepare(
    model: Path, params: Params, lengths: list[tuple[int, int]], silent: int
) -> tuple[list[Case], Any]:
    from stretto.models.qwen3_omni.config import OmniConfig
    from stretto.models.qwen3_omni.load import Models, Source
    from stretto.models.qwen3_omni.prompts import PromptBuilder
    from stretto.testing.qwen3_omni import write_tiny
    from stretto.types import SamplingParams
    from tests.solo import Audio, Done, Frame, Options, Solo, TextToken

    write_tiny(model)
    builder = PromptBuilder.open(model, OmniConfig.read(model))
    models = Models.open(Source.open(model, progress=False))

    def answered(messages: list[dict[str, Any]], p: Params, speak: bool) -> Answer:
        text = SamplingParams(p.temperature, p.top_k, p.top_p, p.repetition_penalty)
        options = Options(
            speak=speak, text=text, max_text_tokens=p.max_text_tokens, max_frames=p.max_frames
        )
        answer = Answer()
        for e in Solo(models).run(builder.build(messages), options.seeded(p.seed or 0)):
            match e:
                case TextToken():
                    answer.ids.append(e.id)
                case Frame():
                    answer.codes.append(e.codes.tolist())
                case Audio():
                    answer.packets.append(e.samples)
                case Done():
                    answer.finish = (e.text, e.audio)
        answer.text = builder.tokenizer.decode(answer.ids)
        return answer

    made = []
    for i, (tokens, frames) in enumerate(lengths):
        name, messages = list(CHATS.items())[i % len(CHATS)]
        speak = i < len(lengths) - silent
        how = replace(
            params, max_text_tokens=tokens, max_frames=frames, seed=i, temperature=[0.0, 0.8][i % 2]
        )
        modalities: Sequence[Modality] = ("text", "audio") if speak else ("text",)
        label = f"{name}, {'spoken' if speak else 'silent'}, {tokens} tokens, {frames} frames"
        made.append(Case(label, messages, modalities, how, answered(messages, how, speak)))
    return made, describe()


# -- what could leak


@dataclass(slots=True)
class Census:
    """What this process and its hosts hold, besides memory."""

    descriptors: int
    tasks: list[str]
    children: int
    shm: list[str]
    host_descriptors: list[int] = field(default_factory=list)

    @classmethod
    def take(cls, engine: PipelineEngine | None = None) -> Census:
        tasks = sorted(
            t.get_name() if "Task-" not in t.get_name() else "task" for t in asyncio.all_tasks()
        )
        hosts = [pid for pid in engine.pids if pid is not None] if engine is not None else []
        return cls(
            len(os.listdir("/proc/self/fd")),
            tasks,
            len(children()),
            sorted(
                name for name in os.listdir("/dev/shm") if not name.startswith("sem.")
            ),  # others' semaphores
            [len(os.listdir(f"/proc/{pid}/fd")) for pid in hosts],
        )

    def changes(self, later: Census) -> list[str]:
        """What differs, though the process is in the same state."""
        names = ("descriptors", "tasks", "children", "shm", "host_descriptors")
        return [
            f"{name}: {before!r:.200}, then {after!r:.200}"
            for name in names
            if (before := getattr(self, name)) != (after := getattr(later, name))
        ]


def children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def resident(pid: int | None = None) -> int:
    """Bytes of a process that are its own and in memory (files that it maps do not count)."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    return 1024 * int(
        next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]
    )


def held(values: dict[str, float]) -> list[str]:
    """What the stages of an idle engine still hold, by what they reported. Cached blocks are
    available ones."""
    found = []
    for stage in ("thinker", "talker", "code2wav"):
        label = f'{{stage="{stage}"}}'
        requests = values.get(f"stretto_stage_requests{label}")
        if requests != 0:
            found.append(f"{stage}: {requests} requests")
        for what in ("blocks", "slots"):
            if f"stretto_stage_{what}{label}" in values:
                free = values[f"stretto_stage_{what}_available{label}"]
                if free != values[f"stretto_stage_{what}{label}"]:
                    found.append(f"{stage}: {what} available {free}")
    boxes = ("stretto_stage_outboxes", "stretto_stage_inboxes", "stretto_stage_waiting")
    found += [f"{name}: {v}" for name, v in values.items() if name.startswith(boxes) and v]
    # All slots of a link are free when both its ends say so.
    credits = {v for name, v in values.items() if name.startswith("stretto_link_credits")}
    if len(credits) > 1:
        found.append(f"credits of the links: {sorted(credits)}")
    return found


async def settle(engine: PipelineEngine) -> list[str]:
    """Ask for fresh reports until they say that nothing is held; what is, if it does not come to
    that."""
    left = ["no report"]
    for number in range(MOST_REPORTS):
        [pipeline] = engine.pipelines
        for host in pipeline.supervisor.hosts:
            host.stats = None  # so that only what is said from now on counts
        pipeline.ping(number)
        while not all(host.stats is not None for host in pipeline.supervisor.hosts):
            await asyncio.sleep(POLL_S)
        left = held(pipeline.metrics())
        if not left:
            return []
        await asyncio.sleep(POLL_S * 2**number)
    return left


# -- memory that grows


@dataclass(slots=True)
class Memory:
    """Bytes by process, sampled on the way. The samples are allocated before the first is taken:
    otherwise they would show up as growth."""

    names: list[str]
    _samples: npt.NDArray[np.int64]
    _count: int = 0

    @classmethod
    def of(cls, names: Sequence[str], most: int) -> Memory:
        return cls(list(names), np.full((most, 1 + len(names)), -1, np.int64))

    def sample(self, at: int, pids: Sequence[int | None]) -> None:
        self._samples[self._count] = [at, *(resident(pid) for pid in pids)]
        self._count += 1

    @property
    def taken(self) -> npt.NDArray[np.int64]:
        return self._samples[: self._count]


@dataclass(frozen=True, slots=True)
class Trend:
    """A process's memory in MiB, and the slope of the line through the second half of its samples
    in KiB per unit, with the half-width of its 95 % interval. Samples depend on their neighbours,
    so the line goes through the means of ten runs of them, which hardly do. `beside` is the slope
    beside the one step (in MiB) that explains most: a library that keeps something for a shape that
    it meets for the first time makes a step; a leak makes a slope."""

    start: float
    middle: float
    end: float
    slope: float
    margin: float
    step: float
    beside: float
    beside_margin: float

    def flat(self, bound: float) -> bool:
        """Is no growth, or less than the bound, within what the samples say? Falling is flat
        too."""
        fits = ((self.slope, self.margin), (self.beside, self.beside_margin))
        return any(slope - margin <= 0 or slope <= bound for slope, margin in fits)


def trend(at: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Trend:
    half = len(at) // 2
    assert len(at) - half >= 2 * BLOCKS, "too few samples to tell"
    x, y = (
        np.array([b.mean() for b in np.array_split(v[half:].astype(np.float64), BLOCKS)])
        for v in (at, sizes / 1024)
    )
    [slope], margin, _ = _line(x, y)
    steps = [(np.arange(BLOCKS) >= k).astype(np.float64) for k in range(1, BLOCKS)]
    [beside, step], beside_margin, _ = min((_line(x, y, s) for s in steps), key=lambda fit: fit[2])
    start, middle, end = (round(float(sizes[i]) / 2**20, 2) for i in (0, half, -1))
    slopes = [round(float(v), 4) for v in (slope, margin, step / 1024, beside, beside_margin)]
    return Trend(start, middle, end, *slopes)


def _line(
    x: npt.NDArray[Any], y: npt.NDArray[Any], *more: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], float, float]:
    """Least squares: the slope (and the other factors), half of its 95 % interval, and the squares
    that are left."""
    design = np.stack([x - x.mean(), *more, np.ones_like(x)], axis=1)
    found = np.linalg.lstsq(design, y, rcond=None)[0]
    left = float(((y - design @ found) ** 2).sum())
    spread = np.linalg.inv(design.T @ design)[0, 0] * left / (len(x) - design.shape[1])
    return found[:-1], STUDENT[design.shape[1]] * float(np.sqrt(spread)), left

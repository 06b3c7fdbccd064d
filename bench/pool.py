"""What the fault matrix and the soak share: a pool of requests with their answers by the plain driver, and a look at
everything that could leak."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models, Source
from stretto.orchestrator.api import Modality, Params
from stretto.orchestrator.engine import PipelineEngine
from stretto.prompt.build import PromptBuilder

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.orchestrator.common import CHATS, Answer, expected, picture, say, sound

POLL_S = 0.02
MOST_REPORTS = 10

QUESTIONS: dict[str, list[dict[str, Any]]] = {
    **CHATS,
    "short": [{"role": "user", "content": "And now?"}],
    "other sound": [{"role": "user", "content": [sound(0.7, seed=5), say("And this?")]}],
    "both": [{"role": "user", "content": [picture(seed=3), sound(0.5, seed=4), say("Together?")]}],
}


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
        want = self.want
        for what, ours, theirs in (
            ("ids", got.ids, want.ids),
            ("text", got.text, want.text),
            ("codes", got.codes, want.codes),
            ("finish", got.finish, want.finish),
            ("samples", len(got.samples), len(want.samples)),
        ):
            if ours != theirs:
                return f"{self.name}: {what} {ours!r:.200}, expected {theirs!r:.200}"
        if not np.allclose(got.samples, want.samples, rtol=0, atol=1e-5):
            return f"{self.name}: samples differ by {np.abs(got.samples - want.samples).max():g}"
        return None


def cases(model: Path, params: Params, lengths: Iterable[tuple[int, int]], silent: int) -> list[Case]:
    """One case for each (text tokens, frames), over all kinds of question; the last `silent` of them text-only."""
    builder = PromptBuilder.open(model, OmniConfig.read(model))
    models = Models.open(Source.open(model, progress=False))
    lengths = list(lengths)
    made = []
    for i, (tokens, frames) in enumerate(lengths):
        name, messages = list(QUESTIONS.items())[i % len(QUESTIONS)]
        speak = i < len(lengths) - silent
        how = replace(params, max_text_tokens=tokens, max_frames=frames, seed=i, temperature=[0.0, 0.8][i % 2])
        modalities: Sequence[Modality] = ("text", "audio") if speak else ("text",)
        label = f"{name}, {'spoken' if speak else 'silent'}, {tokens} tokens, {frames} frames"
        made.append(Case(label, messages, modalities, how, expected(models, builder, messages, how, speak)))
    return made


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
        tasks = sorted(t.get_name() if "Task-" not in t.get_name() else "task" for t in asyncio.all_tasks())
        hosts = [pid for pid in engine.pids if pid is not None] if engine is not None else []
        return cls(
            len(os.listdir("/proc/self/fd")),
            tasks,
            len(children()),
            sorted(os.listdir("/dev/shm")),
            [len(os.listdir(f"/proc/{pid}/fd")) for pid in hosts],
        )


def children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def resident(pid: int | None = None) -> int:
    """Bytes of a process that are its own and in memory (files that it maps do not count)."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def held(values: dict[str, float]) -> list[str]:
    """What the stages of an idle engine still hold, by what they reported. Cached blocks are available ones."""
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
    # All slots of a ring are free when both its ends say so.
    credits = {v for name, v in values.items() if name.startswith("stretto_link_credits")}
    if len(credits) != 1:
        found.append(f"credits of the links: {sorted(credits)}")
    return found


async def settle(engine: PipelineEngine) -> list[str]:
    """Wait for fresh reports that say that nothing is held; what is, if it does not come to that."""
    left = ["no report"]
    for _ in range(MOST_REPORTS):
        [pipeline] = engine._pipelines
        for host in pipeline._hosts:
            host.stats = {}  # so that only what is said from now on counts
        while not all(host.stats for host in pipeline._hosts):
            await asyncio.sleep(POLL_S)
        left = held(pipeline.metrics())
        if not left:
            return []
    return left

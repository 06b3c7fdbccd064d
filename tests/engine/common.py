"""Questions with their expected answers, and a way to run async tests without a plugin."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import soundfile
from PIL import Image

from stretto.config.engine import HostSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished, TextDelta
from stretto.engine.host_handle import HostHandle
from stretto.messages.requests import Admit, Ended, Failed
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.stage.host.host import Host
from stretto.types import SECRET_BYTES, SamplingParams
from tests.pipeline import STAGES, configure
from tests.solo import CODE0, Audio, Done, Frame, Options, Solo, TextToken
from tests.stage.reports import Reports

T = TypeVar("T")
SECRET = bytes(SECRET_BYTES)
# in which what was left is free; unless it is cancelled, it goes on for thousands
FREED_STEPS = 1000


def run(work: Coroutine[Any, Any, T]) -> T:
    """On an event loop of its own. What hangs is ended by pytest (`timeout` in pyproject.toml): how
    long a test may take depends on the machine, and on what else it does."""
    return asyncio.run(work)


def sound(seconds: float = 1.3, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    wave = (
        0.3
        * np.sin(np.cumsum(rng.uniform(0.02, 0.2, int(16000 * seconds))))
        * rng.uniform(0.2, 1, int(16000 * seconds))
    )
    out = io.BytesIO()
    soundfile.write(out, wave.astype(np.float32), 16000, format="WAV", subtype="FLOAT")
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"},
    }


def picture(size: tuple[int, int] = (96, 64), seed: int = 0) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()},
    }


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CHATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "Hello, what is the weather like in the city?"}],
    "multi-turn": [
        {"role": "system", "content": "Answer in a few words."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A voice."},
        {"role": "user", "content": "And what can you do?"},
    ],
    "audio": [{"role": "user", "content": [sound(), say("What was that?")]}],
    "image": [{"role": "user", "content": [say("Look:"), picture()]}],
}


@dataclass(slots=True)
class Answer:
    """What came out, however it was made."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    codes: list[list[int]] = field(default_factory=list)
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    finish: tuple[str, str | None] | None = None
    order: list[str] = field(default_factory=list)
    packets: list[int] = field(default_factory=list)
    end: Finished | None = None

    def take(self, e: Event) -> None:
        self.order.append(type(e).__name__)
        match e:
            case TextDelta():
                self.ids += e.ids
                self.text += e.text
            case CodeFrames():
                assert e.start == len(self.codes), "frames must tile"
                self.codes += e.codes.tolist()
            case AudioChunk():
                assert e.start == len(self.samples), "samples must tile"
                self.samples = np.concatenate([self.samples, e.samples])
                self.packets.append(len(e.samples))
            case Finished():
                assert self.end is None
                self.end, self.finish = e, (e.text, e.audio)


async def collect(events: AsyncIterator[Event]) -> Answer:
    answer = Answer()
    async for e in events:
        answer.take(e)
    assert answer.end is not None
    return answer


def expected(
    models: Models,
    builder: PromptBuilder,
    messages: list[dict[str, Any]],
    params: Params,
    speak: bool = True,
) -> Answer:
    """The same request by the plain driver."""
    text = SamplingParams(params.temperature, params.top_k, params.top_p, params.repetition_penalty)
    options = Options(
        speak=speak, text=text, code0=CODE0, residual=RESIDUAL,
        max_text_tokens=params.max_text_tokens,
        max_frames=params.max_frames,
    ).seeded(params.seed or 0)  # fmt: skip
    if params.greedy_speech:
        options = Options(
            speak=speak, text=options.text, code0=options.greedy().code0,
            residual=options.greedy().residual,
            max_text_tokens=params.max_text_tokens, max_frames=params.max_frames,
        )  # fmt: skip
    answer = Answer()
    parts = [answer.samples]
    for e in Solo(models).run(builder.build(messages), options):
        match e:
            case TextToken():
                answer.ids.append(e.id)
            case Frame():
                answer.codes.append(e.codes.tolist())
            case Audio():
                parts.append(e.samples)
            case Done():
                answer.finish = (e.text, e.audio)
    answer.samples = np.concatenate(parts)
    answer.text = builder.tokenizer.decode(answer.ids)
    return answer


def same(got: Answer, want: Answer, codes: bool = True) -> None:
    assert got.ids == want.ids
    assert got.text == want.text
    if codes:
        assert got.codes == want.codes
    assert got.finish == want.finish
    assert len(got.samples) == len(want.samples)
    np.testing.assert_allclose(got.samples, want.samples, atol=1e-5)


MINE = count(1 << 32)
"""Numbers of pings that the engine does not use itself."""
LOOKS = 1000
"""At a host's last answer, before it is pinged again."""


async def stats(engine: PipelineEngine, hosts: Sequence[int] | None = None) -> dict[str, float]:
    """What the hosts (all of them, or these) say of themselves, asked now. A host reads its
    messages in order: it has taken in whatever it was sent before."""
    pipeline = engine.pipelines[0]
    asked = (
        pipeline.supervisor.hosts
        if hosts is None
        else [pipeline.supervisor.hosts[i] for i in hosts]
    )
    await asyncio.gather(*(_asked(host) for host in asked))
    return pipeline.metrics()


async def _asked(host: HostHandle) -> None:
    """Pings again when the answer is not seen: the answer to one of the engine's own pings may
    replace it before this task runs."""
    while True:
        number = next(MINE)
        host.ping(number)
        for _ in range(LOOKS):
            if host.stats is not None and host.stats.number == number:
                return
            await asyncio.sleep(0.001)


def held(values: dict[str, float], slots: int) -> dict[str, float]:
    """Of a pipeline's numbers, those that say that something is held: requests in a stage or before
    it, boxes of its links, blocks of its cache, slots of the vocoder and of the links' rings."""
    counts = ("_requests{", "_waiting{", "_outboxes{", "_inboxes{")
    left = {k: v for k, v in values.items() if v and any(c in k for c in counts)}
    left |= {
        k: v
        for k, v in values.items()
        if "_available{" in k and v != values[k.replace("_available", "")]
    }
    return left | {k: v for k, v in values.items() if "_credits{" in k and v != slots}


def num_steps(values: dict[str, float]) -> float:
    """Of all stages, since their hosts came up."""
    return sum(v for k, v in values.items() if k.startswith("stretto_stage_steps_total"))


async def come_to(
    engine: PipelineEngine,
    fulfilled: Callable[[dict[str, float]], bool],
    hosts: Sequence[int] | None = None,
) -> dict[str, float]:
    """Until it is so, told by the hosts' numbers."""
    while not fulfilled(values := await stats(engine, hosts)):
        pass
    return values


async def freed(engine: PipelineEngine) -> None:
    """All that requests held is free after a few steps: a request that would go on for thousands
    does not free it by itself. The links' threads may take theirs: they need not get the processor
    before the loops that answer."""
    values = await stats(engine)
    before = num_steps(values)
    while left := held(values, engine.config.host.link_slots):
        assert num_steps(values) - before < FREED_STEPS, left
        values = await stats(engine)
    assert not engine.requests.running
    assert engine.metrics()["stretto_engine_running"] == 0


class HandDriven:
    """A host in this process, driven by hand, that notes which rows each stage launches."""

    def __init__(self, model: Path, settings: HostSettings) -> None:
        self.channel = Reports()
        self.reports = self.channel.posted
        self.launched: list[
            tuple[str, int, int]
        ] = []  # stage, rows [start, stop) of the request's sequence
        told = configure(str(model), STAGES, settings.as_dict())
        self.host = Host(told, settings, self.channel)
        self.host.load()
        self.host.stages["thinker"].encoders.clock = lambda: (
            0
        )  # no time passes: encoders never rest for others
        for name in ("thinker", "talker"):
            self._watch(name, self.host.stages[name].core.runner)

    def _watch(self, name: str, runner: Any) -> None:
        launch = runner.launch

        def watched(batch: Any) -> Any:
            self.launched += [(name, s.start, s.stop) for s in batch.spans]
            return launch(batch)

        runner.launch = watched

    def answer(self, admit: Admit, blob: bytes) -> None:
        self.host.handle(admit, blob)
        while sum(isinstance(m, Ended) for m, _ in self.reports) < len(STAGES):
            assert not any(isinstance(m, Failed) for m, _ in self.reports), self.reports
            assert self.host.loop.round(), "nothing to do, but the answer is not complete"

"""A conversation that is spoken in pieces, to an engine's session and over `/v1/realtime`, and the
answers of the plain driver to it: for tests of engines whose stages are elsewhere."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import Event
from stretto.engine.host_handle import Launcher
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params, RequestOptions
from stretto.server.realtime.audio_formats import AudioDecoder
from tests.engine.common import Answer, collect, expected, same
from tests.engine.test_sessions import heard, speak, voice
from tests.server.conftest import Running
from tests.server.realtime.client import talk
from tests.server.realtime.sounds import pcm, speech

PARAMS = Params(max_text_tokens=6, max_frames=7, seed=5, want_codes=True)
SAID = {"max_output_tokens": 6, "max_audio_frames": 7, "seed": 5}
"""`PARAMS`, as a client says them."""
TURNS = (9.3, 2.1)  # seconds: the first has a window that is read ahead
PIECE = 4801  # bytes: pieces may end in the middle of a sample
STEP = 1 / 32767


@dataclass(frozen=True, slots=True)
class Plain:
    """The plain driver."""

    models: Models
    builder: PromptBuilder

    def check(self, answers: list[Answer], sounds: list[Any]) -> None:
        """Each is the answer to all that was said up to there."""
        history: list[dict[str, Any]] = []
        for got, samples in zip(answers, sounds, strict=True):
            history.append(heard(samples))
            same(got, expected(self.models, self.builder, history, PARAMS))
            history.append({"role": "assistant", "content": got.text})


async def check_session(engine: PipelineEngine, plain: Plain) -> None:
    """Turns that are appended in pieces; what is complete is read ahead by the stages, wherever
    they are."""
    sounds, answers = [voice(seconds, 60 + i) for i, seconds in enumerate(TURNS)], []
    async with engine.session() as s:
        for turn, samples in enumerate(sounds):
            await speak(s, samples, random.Random(turn))
            await s.commit()
            answers.append(await collect(s.respond(params=PARAMS)))
    first = answers[0].end
    assert first is not None
    assert first.usage.cached_tokens > 0, "a window was read ahead"
    await asyncio.to_thread(plain.check, answers, sounds)


class Recorder(PipelineEngine):
    """Keeps all answers, and asks for their codes, which clients are not sent."""

    def __init__(self, model: Path, config: EngineConfig, launcher: Launcher | None = None) -> None:
        super().__init__(model, config, launcher)
        self.answers: list[Answer] = []
        self._run = self.requests.run
        self.requests.run = self._record  # type: ignore[method-assign]

    async def _record(
        self, build: Any, options: RequestOptions, write: Any = None
    ) -> AsyncIterator[Event]:
        answer = Answer()
        if not options.prefill_only:
            self.answers.append(answer)
            options = replace(options, params=replace(options.params, want_codes=True))
        async for event in self._run(build, options, write):
            answer.take(event)
            yield event


def check_realtime(running: Running, engine: Recorder, plain: Plain) -> None:
    """The same over a WebSocket, where turns end when the client says so."""
    sounds, engine.answers = [], []
    with talk(running) as c:
        c.manual(**SAID)
        for i, seconds in enumerate(TURNS):
            data = pcm(speech(seconds, seed=i))
            c.append(data, PIECE)
            c.send("input_audio_buffer.commit")
            c.until("conversation.item.done")
            c.send("response.create")
            events = c.collect("response.done")
            assert events[-1]["response"]["status"] in ("completed", "incomplete")
            out = b"".join(
                base64.b64decode(e["delta"])
                for e in events
                if e["type"] == "response.output_audio.delta"
            )
            got = np.frombuffer(out, "<i2").astype(np.float32) * STEP
            np.testing.assert_allclose(got, engine.answers[i].samples, atol=2 * STEP)
            convert = AudioDecoder("audio/pcm")
            parts = [convert.feed(data[at : at + PIECE]) for at in range(0, len(data), PIECE)]
            sounds.append(np.concatenate([*parts, convert.flush()]))
    plain.check(engine.answers, sounds)

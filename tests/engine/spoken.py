"""A conversation that is spoken in pieces, to an engine's session and over `/v1/realtime`, and the
answers of the plain driver to it: for tests of engines whose stages are elsewhere."""

from __future__ import annotations

import asyncio
import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.engine.engine import PipelineEngine
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.server.realtime.audio_formats import AudioDecoder
from tests.engine.answer_recorder import AnswerRecorder
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


def check_realtime(running: Running, engine: AnswerRecorder, plain: Plain) -> None:
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

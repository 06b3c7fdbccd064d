"""The real tiny model behind the engine's protocol, run by `Solo`: for tests of the server, and to
try things out.

Keeps the promises of `stretto.engine.protocol`; counts the iterators it gave out and saw closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from stretto.engine.events import (
    AudioChunk,
    CodeFrames,
    EngineState,
    Event,
    Finished,
    Message,
    Modality,
    Progress,
    TextDelta,
    TimelineSpan,
    Usage,
)
from stretto.errors import Busy, Invalid, TooLong
from stretto.family import ModelInfo
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import DEFAULT_STYLE, Params, SpeechStyle
from stretto.preprocess import build as work
from stretto.preprocess.media import MediaLimits
from stretto.preprocess.pool.jobs import Conversation, Outlined
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.threads import InThreads
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.response_items import Translation, chat_tools
from stretto.preprocess.template import TextStream
from stretto.types import RequestId


@dataclass(slots=True)
class Ledger:
    """Iterators given out, and what became of them."""

    opened: int = 0
    closed: int = 0
    finished: int = 0
    most: int = 0  # at once
    running: set[str] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, name: str) -> None:
        assert name not in self.running, "an id was used twice"
        self.opened += 1
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        self.idle.clear()

    def close(self, name: str) -> None:
        self.closed += 1
        self.running.discard(name)
        if not self.running:
            self.idle.set()


def model_info(config: OmniConfig, name: str = "tiny") -> ModelInfo:
    voices = tuple(config.talker.speakers)
    return ModelInfo(
        name, voices, config.talker.default_voice, SAMPLE_RATE_OUT,
        config.thinker.text.max_positions
    )  # fmt: skip


def usage_of(prompt: Prompt, config: OmniConfig, tokens: int, frames: int, samples: int) -> Usage:
    t = config.tokens
    return Usage(
        prompt_tokens=len(prompt.ids),
        text_tokens=tokens,
        frames=frames,
        samples=samples,
        audio_prompt_tokens=prompt.ids.count(t.audio_pad),
        image_prompt_tokens=prompt.ids.count(t.image_pad) + prompt.ids.count(t.video_pad),
    )


def decoded(messages: Any, tools: Any = None) -> tuple[Any, Any]:
    """Messages and tools as plain data, however the server passed them on."""
    if not isinstance(messages, Conversation):
        return messages, list(tools) if tools else None
    given, declared, instructions = messages.parts()
    tools = work.decode(declared, "tools") if declared is not None else None
    plain = work.read_messages(given, messages.form, instructions, messages.recalled)
    if isinstance(plain, Translation):
        return plain.messages, chat_tools(tools)
    return work.recall(plain, messages.recalled), tools


class SoloEngine:
    """The real tiny model. Requests take turns on one worker thread, an event at a time."""

    def __init__(
        self, directory: Path, *, max_running: int = 64, limits: MediaLimits | None = None
    ) -> None:
        from stretto.models.qwen3_omni.load import Models, Source

        self.config = OmniConfig.read(directory)
        self.models = Models.open(Source.open(directory, "cpu", None, progress=False))
        self.builder = PromptBuilder.open(directory, self.config, limits or MediaLimits())
        self.pool = ThreadPoolExecutor(1, "solo")
        self.max_running = max_running
        self.ledger = Ledger()
        self.state: EngineState = "ready"

    @property
    def info(self) -> ModelInfo:
        return model_info(self.config)

    @property
    def progress(self) -> Progress:
        return Progress(self.state, dict.fromkeys(("thinker", "talker", "code2wav"), self.state))

    def metrics(self) -> Mapping[str, float]:
        return {'stretto_stage_running{stage="solo"}': len(self.ledger.running)}

    async def drain(self, timeout: float) -> None:
        self.state = "draining"
        if self.ledger.running:
            try:
                async with asyncio.timeout(timeout):
                    await self.ledger.idle.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        """Leaves the model loaded: tests serve it again (`reopen`)."""
        self.state = "dead"

    def reopen(self) -> None:
        self.state, self.ledger = "ready", Ledger()

    def generate(
        self,
        messages: Sequence[Message] | Conversation,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: RequestId | None = None,
        session: str | None = None,
        owner: str = "",
    ) -> AsyncIterator[Event]:
        from tests.solo import Solo

        params = self._check(params)

        def start() -> tuple[Prompt, Iterator[Any]]:
            given, declared = decoded(messages, tools)
            prompt = self.builder.build(given, declared)
            solo = Solo(held(self.models, params))
            return prompt, solo.run(prompt, self._options(params, voice, "audio" in modalities))

        return self._events(start, params, str(request_id))

    async def outline(
        self, body: MemFile, long: tuple[str, ...], most: int, sender: str = ""
    ) -> tuple[Outlined, MemFile]:
        return await InThreads(self.builder).outline(body, long, most)

    async def enrol(self, clip: Conversation, *, owner: str = "") -> bytes:
        raise Invalid("this model has no voices but its own", "voice")

    def speak(
        self,
        text: str | AsyncIterator[str],
        *,
        voice: str | None = None,
        manner: SpeechStyle = DEFAULT_STYLE,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        sender: str = "",
    ) -> AsyncIterator[Event]:
        params = self._check(params)
        assert isinstance(text, str)

        def start() -> tuple[Prompt, Iterator[Any]]:
            prompt = self.builder.build([{"role": "user", "content": text}])
            words = self.builder.tokenizer.encode(text)
            if not words:
                raise Invalid("input has nothing to read", "input")
            options = self._options(params, voice, True, len(words) + 1)
            return prompt, read_aloud(held(self.models, params), words).run(prompt, options)

        return self._events(start, params, str(request_id), silent=True)

    def _check(self, params: Params | None) -> Params:
        params = params or Params()
        if len(self.ledger.running) >= self.max_running:
            raise Busy("too many requests are running")
        if any(i >= self.config.thinker.text.vocab_size for i in params.logit_bias):
            raise Invalid("logit_bias names a token that the model does not have", "logit_bias")
        if params.max_frames > 65536:
            raise TooLong("so many frames do not fit the talker", "max_audio_frames")
        return params

    def _options(
        self, params: Params, voice: str | None, speak: bool, tokens: int | None = None
    ) -> Any:
        from stretto.types import SamplingParams
        from tests.solo import Options

        text = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
        )  # fmt: skip
        options = Options(
            voice=voice, speak=speak, text=text, max_text_tokens=tokens or params.max_text_tokens,
            max_frames=params.max_frames,
        ).seeded(params.seed or 0)  # fmt: skip
        if params.greedy_speech:
            options = replace(
                options, code0=options.greedy().code0, residual=options.greedy().residual
            )
        return options

    async def _events(
        self,
        start: Callable[[], tuple[Prompt, Iterator[Any]]],
        params: Params,
        name: str,
        silent: bool = False,
    ) -> AsyncIterator[Event]:
        from tests.solo import Audio, Done, Frame, TextToken

        loop, steps = asyncio.get_running_loop(), None
        words, text, cut = TextStream(self.builder.tokenizer), StopText(params.stop), False
        tokens = frames = samples = 0
        self.ledger.open(name)
        try:
            prompt, steps = await self._step(loop, start)
            while not cut:
                event = await self._step(loop, lambda: next(steps))
                match event:
                    case TextToken(id=token):
                        tokens += 1
                        piece, cut = text.feed(words.push([token]))
                        if not silent:
                            yield TextDelta((token,), piece)
                    case Frame(codes=row):
                        frames += 1
                        if params.want_codes:
                            yield CodeFrames(frames - 1, row.astype(np.int32)[None])
                    case Audio(start=at, samples=part):
                        samples += len(part)
                        yield AudioChunk(at, part)
                    case Done(text=why, audio=heard):
                        if rest := text.finish(words.finish()):
                            yield TextDelta((), rest)
                        break
            usage = usage_of(prompt, self.config, tokens, frames, samples)
            reasons = ("stop", "stop") if cut else (why, heard)
            spans = (
                TimelineSpan("thinker", "step", 0.0, 0.001),
                TimelineSpan("talker", "frame", 0.001, 0.002),
            )
            self.ledger.finished += 1
            yield Finished(*reasons, usage, params.seed or 0, spans, prompt.ids)
        finally:
            if steps is not None:
                steps.close()
            self.ledger.close(name)

    async def _step(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> Any:
        step = loop.run_in_executor(self.pool, work)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step])  # a generator cannot be closed while it runs
            raise


class Instead:
    """Another object, but for some of its methods."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self.inner, self.methods = inner, methods

    def __getattr__(self, name: str) -> Any:
        return self.methods[name] if name in self.methods else getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def held(models: Any, params: Params) -> Any:
    """The models for one request, with its biases, and with the ends kept away until it may end."""
    least = params.max_text_tokens if params.ignore_eos else params.min_text_tokens
    config, thinker, talker = models.config, models.thinker, models.talker
    tokens, frames = count(), count()

    def logits(hidden: Any) -> Any:
        out = thinker.logits(hidden)
        for token, bias in params.logit_bias.items():
            out[:, token] += bias
        if next(tokens) < least:
            out[:, config.tokens.im_end] = float("-inf")
        return out

    def hold(scores: Any) -> None:
        if next(frames) < params.min_frames:
            scores[:, config.talker.codec.eos] = float("-inf")

    def frame(*args: Any) -> Any:
        return talker.frame(*args, hold=hold)

    return replace(
        models, thinker=Instead(thinker, logits=logits), talker=Instead(talker, frame=frame)
    )


def read_aloud(models: Any, words: list[int]) -> Any:
    """Solo with the thinker's choice taken away: the tokens are these."""
    from tests.solo import Solo

    class Reader(Solo):
        def _pick_text(self, voices: Any, hidden: Any) -> list[int]:
            [v] = voices
            token = (
                words[len(v.tokens)] if len(v.tokens) < len(words) else self.config.tokens.im_end
            )
            v.tokens.append(token)
            if token == self.config.tokens.im_end:
                v.finish = "stop"
            return [token]

    return Reader(models)


class StopText:
    """Text up to the first of some strings; what may be the beginning of one waits."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.held = stop, ""

    def feed(self, text: str) -> tuple[str, bool]:
        self.held += text
        at = min((i for s in self.stop if (i := self.held.find(s)) >= 0), default=-1)
        if at >= 0:
            return self.held[:at], True
        wait = max(
            (n for s in self.stop for n in range(len(s)) if self.held.endswith(s[:n])), default=0
        )
        out, self.held = self.held[: len(self.held) - wait], self.held[len(self.held) - wait :]
        return out, False

    def finish(self, text: str) -> str:
        return self.held + text

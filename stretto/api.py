"""The engine for Python programs: `Engine`, and `AsyncEngine` for those with an event loop. Import
them from `stretto`.

    from stretto import Engine

    with Engine() as engine:
        engine.chat("Hello!").save("hello.wav")

The stages run in processes of their own, so neither class needs torch here. Requests from several
threads or tasks are answered side by side. An error is a `StrettoError`: `Invalid` for what cannot
be asked, `Busy` for too much at once, `StageDead` when a stage died with the request."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from stretto.config.engine import EngineConfig
from stretto.config.placement import parse_devices
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import (
    AudioChunk,
    CodeFrames,
    Event,
    Finished,
    Message,
    Modality,
    TextDelta,
    TokenLogprob,
)
from stretto.engine.session import Session
from stretto.engine.sync import LoopThread
from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.hardware import find_device
from stretto.hub import find_model
from stretto.params import DEFAULT_STYLE, Params, SpeechStyle
from stretto.preprocess.pool.jobs import Conversation

BOTH: tuple[Modality, ...] = ("text", "audio")
Question = str | Sequence[Message]
"""A question, or a conversation in OpenAI's chat format. A part of a message may hold its medium as
an object in memory (an array of samples, a PIL image, frames) or name a file by `path`."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer, complete."""

    text: str
    audio: npt.NDArray[np.float32]  # mono, from -1 to 1; empty if none was asked for
    sample_rate: int
    finished: Finished  # why it ended, what it used, its seed and timeline
    text_ids: tuple[int, ...]
    # of each token of the text, where `logprobs` was asked for
    logprobs: tuple[TokenLogprob, ...]
    # codec frames [frames, codes], where `want_codes` asked for them
    codes: npt.NDArray[np.int32]
    # seconds from the question to the first text, the first sound and the end
    first_text_s: float | None
    first_audio_s: float | None
    total_s: float

    @classmethod
    async def of(cls, events: AsyncIterator[Event], sample_rate: int) -> Answer:
        """All events of a request."""
        start = time.perf_counter()
        texts: list[TextDelta] = []
        audio = [np.zeros(0, np.float32)]
        codes: list[npt.NDArray[np.int32]] = []
        first: dict[type[Event], float] = {}
        async for event in events:
            total_s = time.perf_counter() - start
            first.setdefault(type(event), total_s)
            match event:
                case TextDelta():
                    texts.append(event)
                case AudioChunk(samples=samples):
                    audio.append(samples)
                case CodeFrames(codes=frames):
                    codes.append(frames)
                case Finished() as finished:
                    pass
        return cls(
            text="".join(e.text for e in texts),
            audio=np.concatenate(audio),
            sample_rate=sample_rate,
            finished=finished,
            text_ids=tuple(i for e in texts for i in e.ids),
            logprobs=tuple(t for e in texts for t in e.logprobs),
            codes=np.concatenate(codes) if codes else np.zeros((0, 0), np.int32),
            first_text_s=first.get(TextDelta),
            first_audio_s=first.get(AudioChunk),
            total_s=total_s,
        )

    @property
    def seconds(self) -> float:
        """How long the speech lasts."""
        return len(self.audio) / self.sample_rate

    @property
    def cut(self) -> bool:
        """Whether text or speech met a limit before its end."""
        return "length" in (self.finished.text, self.finished.audio)

    def save(self, path: str | Path) -> None:
        """Write the speech to a file, in the format that its name ends with (.wav, .flac, .ogg,
        .mp3)."""
        import soundfile

        if not len(self.audio):
            raise Invalid("there is no speech in this answer", "modalities")
        try:
            soundfile.write(Path(path), self.audio, self.sample_rate)
        except (TypeError, RuntimeError, OSError) as e:  # no such format; no such directory
            raise Invalid(f"{path}: cannot be written ({e})", "path") from None


class AsyncEngine:
    """Answers with text and speech, for programs with an event loop.

    async with AsyncEngine("checkpoint directory") as engine:
        answer = await engine.chat("Hello!")
        # TextDelta, AudioChunk, at last Finished
        async for event in engine.stream("Tell me more."): ..."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """`model`: a checkpoint directory, its name on the hub, or nano, the embedded model, which
        is the default. `device`: cpu, cuda, cuda:1, ... (a GPU if there is one). `config` for all
        else; it then names the device."""
        self._model = model
        self._config = _config(device, config)
        self._engine: PipelineEngine | None = None

    async def __aenter__(self) -> AsyncEngine:
        engine = PipelineEngine(find_model(self._model), self._config)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        self._engine = engine
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._engine is not None
        await self._engine.close()

    @property
    def info(self) -> ModelInfo:
        """The model's name, voices, sample rate and limits."""
        return self._running.info

    def metrics(self) -> Mapping[str, float]:
        """Counters and gauges by their Prometheus names."""
        return self._running.metrics()

    async def chat(
        self,
        /,
        messages: Question,
        *,
        modalities: Sequence[Modality] = BOTH,
        voice: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        params: Params | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question or a conversation. `options` are fields of `Params`, such as
        `temperature` or `seed`."""
        events = self.stream(
            messages, modalities=modalities, voice=voice, tools=tools, params=params, **options
        )
        return await Answer.of(events, self.info.sample_rate)

    def stream(
        self,
        /,
        messages: Question,
        *,
        modalities: Sequence[Modality] = BOTH,
        voice: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        params: Params | None = None,
        **options: Any,
    ) -> AsyncIterator[Event]:
        """The same as events, as they come. Closing the iterator cancels the request."""
        return self._running.generate(
            _messages(messages),
            modalities=modalities,
            voice=voice,
            tools=tools,
            params=_params(params, options, self.info.defaults),
            allow_paths=True,
        )

    async def read_aloud(
        self,
        /,
        text: str,
        *,
        voice: str | None = None,
        style: SpeechStyle = DEFAULT_STYLE,
        params: Params | None = None,
        **options: Any,
    ) -> Answer:
        """Speech for a text. `style`: instructions, a language, a voice made by `make_voice`; not
        all models take all of it."""
        events = self.stream_aloud(text, voice=voice, style=style, params=params, **options)
        return replace(await Answer.of(events, self.info.sample_rate), text=text)

    def stream_aloud(
        self,
        /,
        text: str | AsyncIterator[str],
        *,
        voice: str | None = None,
        style: SpeechStyle = DEFAULT_STYLE,
        params: Params | None = None,
        **options: Any,
    ) -> AsyncIterator[Event]:
        """The same as events, as they come; of a text that is still being written too, if the model
        can. Closing the iterator cancels the request."""
        return self._running.speak(
            text, voice=voice, style=style, params=_params(params, options, self.info.defaults)
        )

    async def make_voice(self, path: str | Path, text: str = "") -> bytes:
        """A voice of a sound file, for `SpeechStyle.voice`; with its transcript `text`, a closer
        likeness."""
        return await self._running.enrol(clip(path, text))

    def session(self) -> Session:
        """A conversation that goes on, with sound that is heard while it is spoken; `async with`
        closes it."""
        return self._running.session(allow_paths=True)

    @property
    def _running(self) -> PipelineEngine:
        if self._engine is None:
            raise Invalid("an engine is started by `with` or `async with`")
        return self._engine


P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Engine, P], T]:
    """The same method for callers without an event loop: it waits."""

    @wraps(method)
    def call(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._running.run(method(self._engine, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncEngine, P], AsyncIterator[Event]],
) -> Callable[Concatenate[Engine, P], Iterator[Event]]:
    """The same method for callers without an event loop: its iterator waits."""

    @wraps(method)
    def call(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Event]:
        return self._running.iterate(lambda: method(self._engine, *args, **kwargs))

    return call


class Engine:
    """Answers with text and speech. Any thread may call. The methods are those of `AsyncEngine`.

    with Engine("checkpoint directory") as engine:
        answer = engine.chat("Hello!")
        # TextDelta, AudioChunk, at last Finished
        for event in engine.stream("Tell me more."): ..."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """As `AsyncEngine`."""
        self._engine = AsyncEngine(model, device=device, config=config)
        self._thread: LoopThread | None = None

    def __enter__(self) -> Engine:
        thread = LoopThread()
        try:
            thread.run(self._engine.__aenter__())
        except BaseException:
            thread.close()
            raise
        self._thread = thread
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close(self._engine.__aexit__())

    chat = _blocking(AsyncEngine.chat)
    stream = _iterating(AsyncEngine.stream)
    read_aloud = _blocking(AsyncEngine.read_aloud)
    stream_aloud = _iterating(AsyncEngine.stream_aloud)
    make_voice = _blocking(AsyncEngine.make_voice)

    @property
    def info(self) -> ModelInfo:
        """The model's name, voices, sample rate and limits."""
        return self._engine.info

    def metrics(self) -> Mapping[str, float]:
        """Counters and gauges by their Prometheus names."""
        return self._engine.metrics()

    @property
    def _running(self) -> LoopThread:
        if self._thread is None:
            raise Invalid("an engine is started by `with` or `async with`")
        return self._thread


def _config(device: str | None, config: EngineConfig | None) -> EngineConfig:
    if config is not None:
        if device is not None:
            raise Invalid("name the device in the config, or alone", "device")
        return config
    devices = parse_devices(device) if device is not None else (find_device(),)
    if len(devices) != 1:
        raise Invalid(f"device must be one device, got {device!r}; more are for config", "device")
    plain = EngineConfig()
    return replace(plain, host=replace(plain.host, device=devices[0]))


def _messages(question: Question) -> Sequence[Message]:
    return [{"role": "user", "content": question}] if isinstance(question, str) else question


def clip(path: str | Path, text: str = "") -> Conversation:
    """A sound file and its transcript, as a message that a voice is made of."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise Invalid(f"{path}: cannot be read ({e.strerror})", "clip") from None
    # the decoder finds the format by the first bytes, whatever this says
    sound = {"data": base64.b64encode(data).decode(), "format": "wav"}
    content: list[dict[str, Any]] = [{"type": "input_audio", "input_audio": sound}]
    if text.strip():
        content.append({"type": "text", "text": text})
    return Conversation.of(json.dumps([{"role": "user", "content": content}]).encode())


def _params(params: Params | None, options: Mapping[str, Any], defaults: Params) -> Params:
    if params is not None and not isinstance(params, Params):
        raise Invalid(
            "params must be of class Params; single fields are options, such as temperature=1.0",
            "params",
        )
    try:
        return replace(params or defaults, **options)
    except TypeError as e:
        raise Invalid(f"there is no such option: {e}", next(iter(options), None)) from None

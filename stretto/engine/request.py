"""One running request as the engine keeps it, from admission to its last event. Imports no torch.

What its stages report goes in (`apply`); what the caller is to see comes out (`next_event`): text
up to a stop string, sound that tiles, one end. Made and called by `RequestManager`, on the event
loop. What it sends goes to its stages by way of its pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from stretto import errors
from stretto.engine.answer_text import AnswerText
from stretto.engine.events import (
    AudioChunk,
    CodeFrames,
    Event,
    Finished,
    FinishReason,
    Product,
    TextDelta,
    TokenLogprob,
    Usage,
)
from stretto.engine.pipeline import PIECE, Pipeline
from stretto.engine.timeline import Timeline
from stretto.errors import Bug, Gone, StageDead, StrettoError
from stretto.family import MediaTokens, Model
from stretto.messages.requests import (
    Cancel,
    Codes,
    Ended,
    Failed,
    Finish,
    FromHost,
    MediaData,
    MediaRequest,
    Pcm,
    ProductData,
    StepInputs,
    Text,
    Throttle,
    Working,
)
from stretto.params import RequestOptions
from stretto.preprocess.packed_prompt import PackedPiece, PackedPrompt
from stretto.preprocess.prompt import Piece
from stretto.preprocess.template import TextStream
from stretto.types import RequestId

Scored = tuple[float, tuple[tuple[int, float], ...]]
"""As hosts report it: a token's log probability, and the likeliest ids with theirs."""
PACE_AFTER_S = 1.0
"""A stream's pace means nothing before: the first packets are small, and wait for one another."""


@dataclass(slots=True, eq=False)
class RequestState:
    """`options` are those of the admitted request: their limits fit the prompt, and they have a
    seed. A consumer that leaves more than `max_buffered_s` of sound waiting throttles it."""

    id: RequestId
    pipeline: Pipeline
    model: Model
    stages: tuple[str, ...]
    prompt: PackedPrompt
    options: RequestOptions
    decoder: TextStream
    arrived: float
    max_buffered_s: float
    events: asyncio.Queue[Event | StrettoError] = field(default_factory=asyncio.Queue)
    ended: dict[str, Ended] = field(default_factory=dict)
    text: AnswerText = field(init=False)
    tts_tokens: int = 0  # of a text that is read aloud and stands beside the prompt
    frames: int = 0
    samples: int = 0
    consumed: int = 0  # samples that the consumer has taken
    # from when on its pace counts, and how many samples there were then
    pace_start: tuple[float, int] | None = None
    packets: list[float] = field(default_factory=list)
    progressed_at: float = field(default_factory=lambda: time.monotonic())
    throttled: bool = False
    # the text that it reads aloud is still being written: it may rest as long as its writer does
    text_unfinished: bool = False
    failed: bool = False
    over: bool = False
    # features that stages may ask for, by digest
    _media: Mapping[bytes, Piece] = field(default_factory=dict)
    _sending_media: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        params = self.options.params
        self.text = AnswerText(self.decoder, params.stop, params.min_text_tokens)
        if self.prompt.features is not None:
            self._media = self.prompt.features.on_demand
        if self.model.info.live_text:  # else that text is in the prompt
            self.tts_tokens = len(self.options.tts_ids or ())

    @property
    def unfinished(self) -> set[str]:
        """Stages that it still needs."""
        return set(self.stages) - set(self.ended)

    @property
    def buffered_s(self) -> float:
        """Sound that waits for its consumer."""
        return (self.samples - self.consumed) / self.model.info.sample_rate

    def pace(self, now: float) -> float:
        """How fast its sound is made, in times of real time. Infinite where that means
        nothing: at its start, while its listener has enough, while its text is still being
        written, and when all is made, though the listener may take a while to fetch it."""
        if self.pace_start is None or self.throttled or self.text_unfinished or not self.unfinished:
            return float("inf")
        since, before = self.pace_start
        if now - since <= PACE_AFTER_S:
            return float("inf")
        return (self.samples - before) / self.model.info.sample_rate / (now - since)

    @property
    def queued(self) -> bool:
        """Its last stage has made nothing yet."""
        return not (self.samples if len(self.stages) > 1 else self.text.num_tokens)

    @property
    def outcome(self) -> Literal["finished", "failed", "cancelled"]:
        """How it ended, once nobody reads its events any more."""
        if self.over and not self.unfinished:
            return "finished"
        return "failed" if self.failed else "cancelled"

    def release_features(self) -> None:
        """Its stages were sent all features of the prompt."""
        self.prompt = self.prompt.for_host(with_features=False)

    # -- its caller

    async def next_event(self) -> Event:
        """Called until it is `over`. Raises the error that the request failed with."""
        event = await self.events.get()
        if isinstance(event, StrettoError):
            raise event
        if isinstance(event, AudioChunk):
            self._consume(len(event.samples))
        elif isinstance(event, Finished):
            self.over = True
        return event

    def leave(self) -> None:
        """Its caller reads no more: stages that still work at it are sent a cancel."""
        if self._sending_media is not None:
            self._sending_media.cancel()
        if self.unfinished:
            self.pipeline.send(self.stages, Cancel(self.id))

    # -- its stages' reports

    def apply(self, message: FromHost, blob: bytes) -> None:
        """A stage has reported it. What comes after its end was on its way, and is dropped."""
        if self.over or self.failed:
            return
        self.progressed_at = time.monotonic()
        match message:
            case Text(ids=ids, logprobs=scored):
                self.add_text(ids, scored)
            case Pcm(start=start, frames=frames):
                self.add_sound(start, frames, np.frombuffer(blob, np.float32))
            case Codes(start=start, width=width):
                codes = np.frombuffer(blob, np.int32).reshape(-1, width)
                self.events.put_nowait(CodeFrames(start, codes))
            case ProductData():
                self.events.put_nowait(Product(blob))
            case Ended():
                self.end(message)
            case Working():
                pass  # it only shows progress
            case MediaRequest():
                self._sending_media = asyncio.create_task(
                    self._send_media(message, self._sending_media)
                )
            case Failed():
                self.fail(_error(message))
            case _:
                raise Bug(f"the engine was sent {type(message).__name__}")

    def fail_if_stalled(self, limit_s: float) -> None:
        """Fail it if its stages have reported nothing for `limit_s`, unless it waits for somebody
        else: a slow consumer, or the writer of its text."""
        rest = time.monotonic() - self.progressed_at
        if self.over or self.failed or self.throttled or self.text_unfinished or rest <= limit_s:
            return
        if self.events.empty():
            waiting = ", ".join(sorted(self.unfinished))
            self.fail(StageDead(f"{self.id}: no progress for {rest:.1f} s in {waiting}"))
        else:  # its consumer is at rest, not the stages
            self.progressed_at = time.monotonic()

    # -- a text that is read aloud while it is written

    def begin_writing(self) -> None:
        self.text_unfinished = True

    def add_tts_text(self, tokens: Sequence[int], *, last: bool = False) -> None:
        """More of its text, for the stage that speaks it."""
        stage = self.model.pipeline.deciding("audio")
        assert stage is not None
        if last:
            self.progressed_at = time.monotonic()
        self.tts_tokens += len(tokens)
        self.pipeline.send((stage,), StepInputs(self.id, stage, tuple(tokens), last))

    def end_writing(self) -> None:
        """Its text is all there. Its pace counts from now on: before, it went as fast as its
        writer."""
        self.text_unfinished = False
        if self.pace_start is not None:
            self.pace_start = (time.monotonic(), self.samples)

    # -- media

    async def _send_media(self, ask: MediaRequest, before: asyncio.Task[None] | None) -> None:
        """Send a stage the features that it asks for (their rows were thought to be in its caches),
        behind those that it asked for `before`: their pieces must not be mixed."""
        if before is not None:
            await before
        metas: list[PackedPiece] = []
        parts: list[bytes] = []
        size = 0
        for digest in ask.digests:
            piece = self._media.get(digest)
            if piece is None or piece.values is None:
                self.fail(
                    Gone(f"{self.id}: {ask.stage} asks for media that are not there any more")
                )
                return
            metas.append(PackedPiece(piece.shape, digest, size))
            parts.append(np.ascontiguousarray(piece.values).tobytes())
            size += len(parts[-1])
        blob = b"".join(parts)
        if len(blob) > PIECE:
            await self.pipeline.send_features((ask.stage,), self.id, blob)
            blob = b""
        self.pipeline.send((ask.stage,), MediaData(self.id, ask.stage, tuple(metas)), blob)

    # -- text

    def add_text(self, ids: tuple[int, ...], scored: Sequence[Scored] = ()) -> None:
        """Tokens, as many as came together. At a stop string, the stage that writes is ended."""
        before = self.text.num_tokens
        text = self.text.push(ids)
        count = self.text.num_tokens - before
        if not count:
            return
        scores = tuple(self._logprob(i, *s) for i, s in zip(ids[:count], scored, strict=False))
        self.events.put_nowait(TextDelta(ids[:count], text, scores))
        writer = self.model.pipeline.deciding("text") if self.text.stopped else None
        if writer is not None and writer not in self.ended:
            self.pipeline.send((writer,), Finish(self.id, writer))

    def _logprob(self, id: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        best = tuple(TokenLogprob(i, *self.decoder.describe(i), value) for i, value in top)
        return TokenLogprob(id, *self.decoder.describe(id), logprob, best)

    # -- sound

    def add_sound(self, start: int, frames: int, samples: npt.NDArray[np.float32]) -> None:
        """A packet. The request is throttled while too much waits for its consumer."""
        now = time.monotonic()
        if start != self.samples:
            self.fail(Bug(f"{self.id}: sound from sample {start} after {self.samples}"))
            return
        self.pace_start = (now, 0) if self.pace_start is None else self.pace_start
        self.packets.append(now)
        self.samples += len(samples)
        self.frames = frames
        self.events.put_nowait(AudioChunk(start, samples))
        if not self.throttled and self.buffered_s > self.max_buffered_s:
            self.throttled = True
            self.pipeline.send(self.stages, Throttle(self.id, True))

    def _consume(self, samples: int) -> None:
        """The consumer took sound: a throttled request goes on when half of the room is free
        again."""
        self.consumed += samples
        if self.throttled and self.buffered_s < self.max_buffered_s / 2:
            self.throttled = False
            self.progressed_at = time.monotonic()
            self.pace_start = (self.progressed_at, self.samples)
            self.pipeline.send(self.stages, Throttle(self.id, False))

    # -- the end

    def end(self, how: Ended) -> None:
        """A stage is done with it. When the last one is, so is the request."""
        self.ended[how.stage] = how
        if not self.unfinished:
            self._finish()

    def _finish(self) -> None:
        spec = self.model.pipeline
        text = self.ended.get(spec.deciding("text") or "")
        audio = self.ended.get(spec.deciding("audio") or "")
        rest = self.text.finish() if text is not None else ""
        if rest:
            self.events.put_nowait(TextDelta((), rest))
        prompt_ids = self.prompt.ids
        self.events.put_nowait(
            Finished(
                text=_reason(text.reason) if text is not None and not self.text.stopped else "stop",
                audio=_reason(audio.reason) if audio is not None else None,
                usage=self._usage(prompt_ids, text),
                seed=self.options.seed,
                timeline=Timeline(spec, self.arrived, self.ended, self.packets),
                prompt_ids=prompt_ids,
                arrived=self.arrived,
            )
        )

    def _usage(self, prompt_ids: Sequence[int], text: Ended | None) -> Usage:
        prompt = prompt_usage(prompt_ids, self.model.media_tokens)
        return replace(
            prompt,
            prompt_tokens=prompt.prompt_tokens + self.tts_tokens,
            text_tokens=self.text.num_tokens,
            frames=self.frames,
            samples=self.samples,
            cached_tokens=text.cached if text is not None else 0,
            encoded_pieces=sum(e.encoded for e in self.ended.values()),
        )

    def fail(self, error: StrettoError) -> None:
        if self.failed:
            return  # several report one death: the host's channel, its links
        self.failed = True
        self.events.put_nowait(error)
        self.pipeline.send(self.stages, Cancel(self.id))


def prompt_usage(ids: Sequence[int], media: MediaTokens) -> Usage:
    """The usage of a prompt that has no answer yet."""
    return Usage(
        prompt_tokens=len(ids),
        text_tokens=0,
        frames=0,
        samples=0,
        audio_prompt_tokens=sum(ids.count(i) for i in media.audio),
        image_prompt_tokens=sum(ids.count(i) for i in media.image),
    )


def _reason(reason: str) -> FinishReason:
    return "length" if reason == "length" else "stop"


def _error(failed: Failed) -> StrettoError:
    """The error that a host reported, as its own class where it is one of ours."""
    text = f"{failed.stage}: {failed.message}"
    for faulty in (errors.Invalid, errors.TooLong):
        if faulty.__name__ == failed.kind:
            return faulty(text, failed.param)
    known = {c.__name__: c for c in (errors.Busy, errors.Gone, errors.WireError, errors.Bug)}
    return known.get(failed.kind, StageDead)(text)

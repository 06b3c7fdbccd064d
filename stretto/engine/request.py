"""One request as the engine keeps it, from admission to its last event. Imports no torch.

What its stages report goes in (`add_text`, `add_sound`, `end`, `fail`); what the caller is to see
comes out of `events`: text up to a stop string, sound that tiles, one end. Made and called by the
engine, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from stretto.engine.events import (
    AudioChunk,
    Event,
    Finished,
    FinishReason,
    TextDelta,
    TokenLogprob,
    Usage,
)
from stretto.engine.pipeline import Pipeline
from stretto.engine.timeline import Timeline
from stretto.errors import Bug, StrettoError
from stretto.family import MediaTokens, Model, OutputKind
from stretto.messages.requests import Cancel, Ended, Finish, Throttle
from stretto.params import Params
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.prompt import Piece
from stretto.preprocess.template import TextStream
from stretto.types import RequestId

OUTPUTS: tuple[OutputKind, OutputKind] = ("text", "audio")
Scored = tuple[float, tuple[tuple[int, float], ...]]
"""As hosts tell it: a token's log probability, and the likeliest ids with theirs."""
# of a stream, before its pace says anything: the first packets are small, and wait for one another
SETTLED_S = 1.0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from admission to its last event."""

    id: RequestId
    callers_id: RequestId | None
    pipeline: Pipeline
    model: Model
    stages: tuple[str, ...]
    prompt: PackedPrompt
    params: Params
    seed: int
    words: TextStream
    arrived: float
    prefill_only: bool = False  # nothing will be heard of it
    media: Mapping[bytes, Piece] = field(default_factory=dict)  # that stages may ask for, by digest
    supplying: asyncio.Task[None] | None = None  # them
    events: asyncio.Queue[Event | StrettoError] = field(default_factory=asyncio.Queue)
    ended: dict[str, Ended] = field(default_factory=dict)
    text: str = ""  # decoded so far, stop strings not looked for
    shown: int = 0  # characters of it that were passed on
    ids: int = 0
    # characters of the text that stop strings must end behind: those of the first `min_text_tokens`
    least: int = 0
    # a stop string was found: what was made beyond it is not passed on, nor counted
    stopped: bool = False
    said: int = 0  # tokens of a text that is read aloud and stands beside the prompt
    frames: int = 0
    samples: int = 0
    taken: int = 0  # samples that the consumer has taken
    # when its pace began to count, and how many samples there were
    paced: tuple[float, int] | None = None
    packets: list[float] = field(default_factory=list)
    progressed: float = 0.0
    throttled: bool = False
    # its text is still being written: it may rest for as long as its writer does
    written: bool = False
    failed: bool = False
    over: bool = False

    @property
    def unfinished(self) -> set[str]:
        """Stages that it still needs."""
        return set(self.stages) - set(self.ended)

    @property
    def buffered_s(self) -> float:
        """Sound that waits for its consumer."""
        return (self.samples - self.taken) / self.model.info.sample_rate

    def pace(self, now: float) -> float:
        """How fast its sound is made, in times of real time. Infinite where that does not say
        anything: at its start, while its listener has enough, while its text is still being
        written, and when all is made, though the listener may take a while to fetch it."""
        if self.paced is None or self.throttled or self.written or not self.unfinished:
            return float("inf")
        since, before = self.paced
        if now - since <= SETTLED_S:
            return float("inf")
        return (self.samples - before) / self.model.info.sample_rate / (now - since)

    def end_writing(self) -> None:
        """Its text is all there. Its pace counts from now on: before, it went as fast as its
        writer."""
        self.written = False
        if self.paced is not None:
            self.paced = (time.monotonic(), self.samples)

    # -- text

    def add_text(self, ids: tuple[int, ...], scored: Sequence[Scored] = ()) -> None:
        """Tokens, as many as came together. Where a stop string may be among them, each is looked
        at alone, so that the answer ends with the one that completes it, however they came."""
        before, shown = self.ids, ""
        for some in [(i,) for i in ids] if self.params.stop else [ids]:
            if self.stopped:
                break
            self.ids += len(some)
            self._grow(self.words.push(some))
            shown += self._show(last=False)
        if self.ids > before:
            count = self.ids - before
            told = tuple(self._logprob(i, *s) for i, s in zip(ids[:count], scored, strict=False))
            self.events.put_nowait(TextDelta(ids[:count], shown, told))

    def _logprob(self, id: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        best = tuple(TokenLogprob(i, *self.words.told(i), value) for i, value in top)
        return TokenLogprob(id, *self.words.told(id), logprob, best)

    def _grow(self, text: str) -> None:
        self.text += text
        if self.ids <= self.params.min_text_tokens:
            self.least = len(self.text)

    def _show(self, last: bool) -> str:
        """What of the text may be passed on: nothing from a stop string on, nor what may be the
        start of one. The stop string that is complete first counts (of those, the longest), so it
        does not matter how the text was cut."""
        found = [(at + len(stop), at) for stop in self.params.stop if (at := self._find(stop)) >= 0]
        end = len(self.text)
        if found:
            self.stopped, (_, end) = True, min(found)
            writer = self.model.pipeline.deciding("text")
            if writer is not None and writer not in self.ended:
                self.pipeline.send((writer,), Finish(self.id, writer))
        elif not last:
            end -= max((self._begun(stop) for stop in self.params.stop), default=0)
        shown = self.text[self.shown : end]
        self.shown = end
        return shown

    def _find(self, stop: str) -> int:
        return self.text.find(stop, max(self.shown, self.least + 1 - len(stop)))

    def _begun(self, stop: str) -> int:
        """How many characters at the end of the text may be the start of `stop`."""
        longest = min(len(stop) - 1, len(self.text))
        return next((k for k in range(longest, 0, -1) if self.text.endswith(stop[:k])), 0)

    # -- sound

    def add_sound(
        self, start: int, frames: int, samples: npt.NDArray[np.float32], max_buffered_s: float
    ) -> None:
        """A packet. A request whose consumer has left more than `max_buffered_s` waiting is
        throttled."""
        now = time.monotonic()
        if start != self.samples:
            self.fail(Bug(f"{self.id}: sound from sample {start} after {self.samples}"))
            return
        self.paced = (now, 0) if self.paced is None else self.paced
        self.packets.append(now)
        self.samples += len(samples)
        self.frames = frames
        self.events.put_nowait(AudioChunk(start, samples))
        if not self.throttled and self.buffered_s > max_buffered_s:
            self.throttled = True
            self.pipeline.send(self.stages, Throttle(self.id, True))

    def take(self, samples: int, max_buffered_s: float) -> None:
        """The consumer took sound: a throttled request goes on when half of the room is free
        again."""
        self.taken += samples
        if self.throttled and self.buffered_s < max_buffered_s / 2:
            self.throttled = False
            self.progressed = time.monotonic()
            self.paced = (self.progressed, self.samples)
            self.pipeline.send(self.stages, Throttle(self.id, False))

    # -- the end

    def end(self, how: Ended) -> None:
        """A stage is done with it. When the last one is, so is the request."""
        self.ended[how.stage] = how
        if not self.unfinished:
            self._finish()

    def _finish(self) -> None:
        spec = self.model.pipeline
        text, audio = (self.ended.get(spec.deciding(output) or "") for output in OUTPUTS)
        if text is not None:
            self._grow(self.words.finish())
            rest = "" if self.stopped else self._show(last=True)
            if rest:
                self.events.put_nowait(TextDelta((), rest))
        self.events.put_nowait(
            Finished(
                text=_reason(text.reason) if text is not None and not self.stopped else "stop",
                audio=_reason(audio.reason) if audio is not None else None,
                usage=self._usage(text),
                seed=self.seed,
                timeline=Timeline(spec, self.arrived, self.ended, self.packets),
                prompt_ids=self.prompt.ids,
            )
        )

    def _usage(self, text: Ended | None) -> Usage:
        asked = prompt_usage(self.prompt.ids, self.model.media_tokens)
        return replace(
            asked,
            prompt_tokens=asked.prompt_tokens + self.said,
            text_tokens=self.ids,
            frames=self.frames,
            samples=self.samples,
            cached_tokens=text.cached if text is not None else 0,
            encoded_pieces=sum(e.encoded for e in self.ended.values()),
        )

    def fail(self, error: StrettoError) -> None:
        if self.failed:
            return  # one death may be told by several: the host's channel, its links
        self.failed = True
        self.events.put_nowait(error)
        self.pipeline.send(self.stages, Cancel(self.id))


def prompt_usage(ids: Sequence[int], media: MediaTokens) -> Usage:
    """Of a prompt that was asked, before there is an answer."""
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

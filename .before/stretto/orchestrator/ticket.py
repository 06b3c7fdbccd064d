"""One request as the engine keeps it, from admission to its last event. Imports no torch.

What its stages report goes in (`add_text`, `add_sound`, `end`, `fail`); what the caller is to see comes out of
`events`: text up to a stop string, sound that tiles, one end. Made and called by the engine, on the event loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stretto.errors import Bug, StrettoError
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, TokenIds
from stretto.orchestrator.api import AudioChunk, Event, Finished, FinishReason, Params, TextDelta, Usage
from stretto.orchestrator.messages import Cancel, Ended, StopText, Throttle
from stretto.orchestrator.pipeline import Pipeline
from stretto.orchestrator.timeline import timeline
from stretto.prompt.packed import Packed
from stretto.prompt.template import TextStream
from stretto.types import RequestId

SETTLED_S = 0.5  # of a stream, before its pace says anything


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from admission to its last event."""

    id: RequestId
    given: RequestId | None  # by the caller
    pipeline: Pipeline
    stages: tuple[str, ...]
    prompt: Packed
    params: Params
    seed: int
    words: TextStream
    arrived: float
    events: asyncio.Queue[Event | StrettoError] = field(default_factory=asyncio.Queue)
    ended: dict[str, Ended] = field(default_factory=dict)
    text: str = ""  # decoded so far, stop strings not looked for
    shown: int = 0  # characters of it that were passed on
    ids: int = 0
    least: int = 0  # characters of the text that stop strings must end behind: those of the first `min_text_tokens`
    stopped: bool = False  # a stop string was found: what was made beyond it is not passed on, nor counted
    frames: int = 0
    samples: int = 0
    taken: int = 0  # samples that the consumer has taken
    first_pcm: float | None = None
    packets: list[float] = field(default_factory=list)
    progressed: float = 0.0
    throttled: bool = False
    failed: bool = False
    over: bool = False

    @property
    def unfinished(self) -> set[str]:
        """Stages that it still needs."""
        return set(self.stages) - set(self.ended)

    @property
    def buffered_s(self) -> float:
        """Sound that waits for its consumer."""
        return (self.samples - self.taken) / SAMPLE_RATE_OUT

    def pace(self, now: float) -> float:
        """How fast its sound is made, in times of real time; infinite where that does not say anything."""
        if self.first_pcm is None or self.throttled or now - self.first_pcm <= SETTLED_S:
            return float("inf")
        return self.samples / SAMPLE_RATE_OUT / (now - self.first_pcm)

    # -- text

    def add_text(self, ids: tuple[int, ...]) -> None:
        """Tokens, as many as came together. Where a stop string may be among them, each is looked at alone, so that the
        answer ends with the one that completes it, however they came."""
        before, shown = self.ids, ""
        for some in [(i,) for i in ids] if self.params.stop else [ids]:
            if self.stopped:
                break
            self.ids += len(some)
            self._grow(self.words.push(some))
            shown += self._show(last=False)
        if self.ids > before:
            self.events.put_nowait(TextDelta(ids[: self.ids - before], shown))

    def _grow(self, text: str) -> None:
        self.text += text
        if self.ids <= self.params.min_text_tokens:
            self.least = len(self.text)

    def _show(self, last: bool) -> str:
        """What of the text may be passed on: nothing from a stop string on, nor what may be the start of one. The stop
        string that is complete first counts (of those, the longest), so it does not matter how the text was cut."""
        found = [(at + len(stop), at) for stop in self.params.stop if (at := self._find(stop)) >= 0]
        end = len(self.text)
        if found:
            self.stopped, (_, end) = True, min(found)
            if "thinker" not in self.ended:
                self.pipeline.send(("thinker",), StopText(self.id))
        elif not last:
            end -= max((self._begun(stop) for stop in self.params.stop), default=0)
        shown, self.shown = self.text[self.shown : end], end
        return shown

    def _find(self, stop: str) -> int:
        return self.text.find(stop, max(self.shown, self.least + 1 - len(stop)))

    def _begun(self, stop: str) -> int:
        """How many characters at the end of the text may be the start of `stop`."""
        longest = min(len(stop) - 1, len(self.text))
        return next((k for k in range(longest, 0, -1) if self.text.endswith(stop[:k])), 0)

    # -- sound

    def add_sound(self, start: int, frames: int, samples: npt.NDArray[np.float32], max_buffered_s: float) -> None:
        """A packet. A request whose consumer has left more than `max_buffered_s` waiting is throttled."""
        now = time.monotonic()
        if start != self.samples:
            self.fail(Bug(f"{self.id}: sound from sample {start} after {self.samples}"))
            return
        self.first_pcm = now if self.first_pcm is None else self.first_pcm
        self.packets.append(now)
        self.samples += len(samples)
        self.frames = frames
        self.events.put_nowait(AudioChunk(start, samples))
        if not self.throttled and self.buffered_s > max_buffered_s:
            self.throttled = True
            self.pipeline.send(self.stages, Throttle(self.id, True))

    def take(self, samples: int, max_buffered_s: float) -> None:
        """The consumer took sound: a throttled request goes on when half of the room is free again."""
        self.taken += samples
        if self.throttled and self.buffered_s < max_buffered_s / 2:
            self.throttled, self.progressed = False, time.monotonic()
            self.pipeline.send(self.stages, Throttle(self.id, False))

    # -- the end

    def end(self, how: Ended, tokens: TokenIds) -> None:
        """A stage is done with it. When the last one is, so is the request."""
        self.ended[how.stage] = how
        if not self.unfinished:
            self._finish(tokens)

    def _finish(self, tokens: TokenIds) -> None:
        thinker, talker = self.ended.get("thinker"), self.ended.get("talker")
        if thinker is not None:
            self._grow(self.words.finish())
            rest = "" if self.stopped else self._show(last=True)
            if rest:
                self.events.put_nowait(TextDelta((), rest))
        self.events.put_nowait(
            Finished(
                text=_reason(thinker.reason) if thinker is not None and not self.stopped else "stop",
                audio=_reason(talker.reason) if talker is not None else None,
                usage=self._usage(tokens),
                seed=self.seed,
                timeline=timeline(self.arrived, self.ended, self.packets),
                prompt_ids=self.prompt.ids,
            )
        )

    def _usage(self, tokens: TokenIds) -> Usage:
        thinker, ids = self.ended.get("thinker"), self.prompt.ids
        return Usage(
            prompt_tokens=len(ids),
            text_tokens=self.ids,
            frames=self.frames,
            samples=self.samples,
            cached_tokens=thinker.cached if thinker is not None else 0,
            audio_prompt_tokens=ids.count(tokens.audio_pad),
            image_prompt_tokens=ids.count(tokens.image_pad) + ids.count(tokens.video_pad),
        )

    def fail(self, error: StrettoError) -> None:
        if self.failed:
            return  # one death may be told by several: the host's channel, its links
        self.failed = True
        self.events.put_nowait(error)
        self.pipeline.send(self.stages, Cancel(self.id))


def _reason(reason: str) -> FinishReason:
    return "length" if reason == "length" else "stop"

"""One card, replayed: the real scheduler of each stage, the real pace of packets, and a device that takes table time.

Steps of the stages run beside each other, each slower than alone. A stage makes its next step when the one before ends,
as `stage/ahead.py` has it; behind a step with prompts, or when prompts have come, it is made at once. The server's one
thread works on all that arrive by turns, and sends packets and text one after the other. Time is simulated: a minute of
a busy card takes seconds. Called by the planner; deterministic; imports no torch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Literal

from stretto.planner.table import StageTimes, Table, at, power_at, share_at, vocoder_ms
from stretto.stage.pace import LOOK_S, Pace, Rhythm, leaving
from stretto.stage.request import RequestSpec
from stretto.stage.scheduler.batch import Batch, Outcome, StepResult
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.types import RequestId

Lane = Literal["text", "frames", "vocoder"]
OPENING = 8  # rows of a frames prompt behind those of the text; the last one comes with the first token of text
FIRST, EACH, RAMP = 1, 8, 2  # frames of packets
JITTER = 0.3
TEXT_GROUP, TEXT_WAIT_S = 4, 0.025  # tokens that are told together, at most, and how long one waits for that


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load."""

    prompt: int
    text: int
    frames: int


@dataclass(slots=True)
class Heard:
    """What its listener got. Times in seconds; packets are (when, seconds of sound)."""

    arrived: float
    asked: Asked
    first_text: float | None = None
    packets: list[tuple[float, float]] = field(default_factory=list)
    end: float | None = None

    @property
    def first_audio(self) -> float | None:
        return self.packets[0][0] - self.arrived if self.packets else None

    @property
    def rtf(self) -> float:
        assert self.end is not None
        return (self.end - self.arrived) / sum(s for _, s in self.packets)

    @property
    def waited(self) -> float:
        """Seconds that a player who starts at once had nothing to play."""
        total, until = 0.0, self.packets[0][0]
        for when, seconds in self.packets:
            total += max(0.0, when - until)
            until = max(until, when) + seconds
        return total


@dataclass(slots=True)
class _Step:
    batch: Batch
    left_ms: float


@dataclass(slots=True)
class _Stage:
    times: StageTimes
    scheduler: Scheduler
    running: deque[_Step] = field(default_factory=deque)
    known: dict[int, float] = field(default_factory=dict)  # what decodes take, by rows
    most_held: int = 0  # blocks of its KV cache that requests had at once

    def launch(self) -> None:
        """The next step when the one before has ended; behind one that holds prompts, or for prompts that have come,
        the one after it too: with those that are there by then."""
        while not self.running or (len(self.running) < 2 and not self._held()):
            batch = self.scheduler.schedule()
            if batch is None:
                return
            self.running.append(_Step(batch, self._takes(batch)))
            pool = self.scheduler.pool
            self.most_held = max(self.most_held, pool.num_blocks - pool.num_available)

    def _held(self) -> bool:
        return self.running[-1].batch.decode_only and self.scheduler.only_decodes_wait

    def _takes(self, batch: Batch) -> float:
        decodes = self._decodes(batch.num_decodes) if batch.num_decodes else 0.0
        if batch.decode_only:
            return decodes
        prompts = at(self.times.prompt, batch.num_tokens)
        return max(decodes, prompts) + self.times.mixed * min(decodes, prompts)

    def _decodes(self, rows: int) -> float:
        if rows not in self.known:
            one, more = self.times.decode[0][1], power_at(self.times.decode, rows)
            self.known[rows] = one * (more / one) ** self.times.alike
        return self.known[rows]

    def retire(self) -> list[Outcome]:
        step = self.running.popleft()
        return self.scheduler.retire(step.batch, StepResult([7] * len(step.batch.spans)))


@dataclass(slots=True)
class _Voice:
    """A request's frames on their way to the vocoder."""

    pace: Pace
    waiting: int = 0
    made: int = 0
    sent: int = 0
    told: int = 0  # tokens of text
    untold: int = 0
    told_at: float = 0.0


@dataclass(slots=True)
class _Arriving:
    arrived: float
    asked: Asked
    left_ms: float


@dataclass(slots=True)
class _Call:
    streams: list[tuple[RequestId, int]]
    left_ms: float


class Card:
    """`arrive` brings requests, `advance` lets time pass."""

    def __init__(self, table: Table, max_rows: int | None = None, seed: int = 0) -> None:
        self.table, self.now = table, 0.0
        self.heard: dict[RequestId, Heard] = {}
        rows = max_rows or table.max_rows

        def stage(times: StageTimes, mixed: bool) -> _Stage:
            config = SchedulerConfig(
                num_blocks=max(1, times.tokens // 16), max_rows=rows, max_waiting=1 << 20, lone_prefill_chunk=2560,
                max_step_tokens=4096, prefix_cache=False, mixed=mixed,
            )  # fmt: skip
            return _Stage(times, Scheduler(config))

        self._text, self._frames = stage(table.text, True), stage(table.frames, False)
        self._rhythm = Rhythm(table.frame_s, table.opening_s)
        self._voices: dict[RequestId, _Voice] = {}
        self._call: _Call | None = None
        self._number = self._seen = 0
        self._free = 0.0  # when the server has sent all that it has
        self._ending: deque[RequestId] = deque()  # whose last packet is on its way
        self._arriving: list[_Arriving] = []  # that the server works on
        self._coming: list[tuple[float, int, _Arriving]] = []  # on their way to the stages: a heap, by when they come
        self._random = Random(seed)
        # Outcomes that the host has not passed on yet, by stage.
        self._told: dict[Lane, deque[tuple[float, list[Outcome]]]] = {"text": deque(), "frames": deque()}
        self.ended: Callable[[Heard], None] = lambda heard: None

    @property
    def running(self) -> int:
        """Requests that are not answered yet."""
        return len(self._arriving) + len(self._coming) + len(self._voices)

    @property
    def cache(self) -> float:
        """The largest part of a stage's KV cache that was ever in use."""
        return max(s.most_held / s.scheduler.pool.num_blocks for s in (self._text, self._frames))

    def arrive(self, asked: Asked) -> None:
        """A request reaches the server now. The server does a little of each of those that are there by turns,
        `serial_ms` of its time for each; the rest of the way to the stages takes `overhead_ms`, more or less."""
        self._arriving.append(_Arriving(self.now, asked, self.table.serial_ms))

    def _announce(self, a: _Arriving) -> None:
        """All rows of a prompt are known to the frames stage at once, but for the last one."""
        id, asked = RequestId(f"r{self._number}"), a.asked
        self._number += 1
        self.heard[id] = Heard(a.arrived, asked)
        self._voices[id] = _Voice(Pace(FIRST, EACH, RAMP, self._rhythm))
        spec = RequestSpec(id, asked.frames, paced=True, last_on_device=True, cache_output=False)
        self._frames.scheduler.submit(spec, asked.prompt + OPENING, closed=False)
        self._text.scheduler.submit(RequestSpec(id, asked.text), asked.prompt)

    # -- time

    def advance(self, until: float) -> None:
        """Let the device run to `until`, or to the next thing that ends there, whichever is sooner."""
        self._launch()
        rates = self._rates()
        ends = [(step.left_ms / 1e3 / rate, lane) for lane, (step, rate) in rates.items()]
        idle = self._call is None and any(v.waiting for v in self._voices.values())
        look = self.now + LOOK_S if idle else until
        told = [waiting[0][0] for waiting in self._told.values() if waiting]
        told += [c[0] for c in self._coming[:1]]
        told += [self.heard[id].end or 0.0 for id in list(self._ending)[:1]]
        if self._arriving:
            told.append(self.now + min(a.left_ms for a in self._arriving) / 1e3 * len(self._arriving))
        then = max(self.now, min([self.now + s for s, _ in ends] + [until, look, *told]))
        passed = then - self.now
        self.now = then
        self._admit(passed)
        self._end()
        for step, rate in rates.values():
            step.left_ms -= 1e3 * passed * rate
        for lane, (step, _) in rates.items():
            if step.left_ms <= 1e-6:
                self._finish(lane)
        for lane, waiting in self._told.items():
            while waiting and waiting[0][0] <= self.now:
                for outcome in waiting.popleft()[1]:
                    (self._wrote if lane == "text" else self._spoke)(outcome)

    def _admit(self, passed: float) -> None:
        share = 1e3 * passed / max(1, len(self._arriving))
        for a in self._arriving:
            a.left_ms -= share
        for a in [a for a in self._arriving if a.left_ms <= 1e-6]:
            self._arriving.remove(a)
            self._seen += 1
            then = self.now + self.table.overhead_ms / 1e3 * self._random.uniform(1 - JITTER, 1 + JITTER)
            heapq.heappush(self._coming, (then, self._seen, a))
        while self._coming and self._coming[0][0] <= self.now:
            self._announce(heapq.heappop(self._coming)[2])

    def _rates(self) -> dict[Lane, tuple[_Step | _Call, float]]:
        """What runs, and how fast."""
        t, text, frames = self.table.together, self._text.running, self._frames.running
        slowed = t.beside_vocoder if self._call else 1.0
        found: dict[Lane, tuple[_Step | _Call, float]] = {}
        if text:
            batch, beside = text[0].batch, 1.0
            if frames:
                beside = share_at(t.text, len(batch.spans)) if batch.decode_only else t.prompt
            found["text"] = (text[0], beside * slowed)
        if frames:
            beside = 1.0
            if text:
                rows = len(frames[0].batch.spans)
                beside = share_at(t.frames, rows) if text[0].batch.decode_only else t.frames_prompt
            found["frames"] = (frames[0], beside * slowed)
        if self._call:
            found["vocoder"] = (self._call, t.vocoder if found else 1.0)
        return found

    def _finish(self, lane: Lane) -> None:
        if lane == "vocoder":
            self._sounded()
            return
        outcomes = (self._text if lane == "text" else self._frames).retire()
        # The next step is on the device already, while the host passes on what this one gave, row by row.
        self._told[lane].append((self.now + (len(outcomes) + 1) / 2 * self.table.host_us / 1e6, outcomes))

    # -- stages

    def _launch(self) -> None:
        self._text.launch()
        self._frames.launch()
        if self._call is None:
            self._vocode()

    def _wrote(self, o: Outcome) -> None:
        id, frames = o.request.id, self._frames.scheduler
        heard = self.heard[id]
        if o.token is None:
            return
        self._tell(id, o.reason is not None)
        if heard.first_text is None:
            heard.first_text = self._free - heard.arrived
            frames.append_rows(id, 1, last=True)
        else:
            frames.append_text(id)
        if o.reason is not None:
            frames.end_text(id)

    def _spoke(self, o: Outcome) -> None:
        if o.token is not None:
            voice = self._voices[o.request.id]
            voice.waiting += 1
            voice.made += 1
            voice.pace.came(self.now)

    def _vocode(self) -> None:
        there = [(id, v) for id, v in self._voices.items() if v.waiting]
        if not there:
            return
        told = [(v.pace, v.waiting, v.made == self.heard[id].asked.frames) for id, v in there]
        going = [
            (id, v) for (id, v), goes, (_, _, last) in zip(there, leaving(told, self.now), told, strict=True)
            if goes or last
        ]  # fmt: skip
        if not going:
            return
        first = [(id, v) for id, v in going if v.pace.begun is None]
        chosen = first or going
        streams = [(id, min(v.waiting, EACH)) for id, v in chosen]
        for (_, v), (_, n) in zip(chosen, streams, strict=True):
            v.waiting -= n
            v.pace.left(n, self.now)
        self._call = _Call(streams, vocoder_ms(self.table, len(streams), max(n for _, n in streams)))

    def _sounded(self) -> None:
        assert self._call is not None
        for id, n in self._call.streams:
            heard, voice = self.heard[id], self._voices[id]
            seconds = n * self.table.frame_s - (0.0 if heard.packets else self.table.opening_s)
            heard.packets.append((self._delivered(), seconds))
            voice.sent += n
            if voice.sent == heard.asked.frames:
                heard.end = self._free
                self._ending.append(id)
        self._call = None

    # -- the way back

    def _delivered(self) -> float:
        """When something that the stages have made now is with its listener: the server sends one after the other."""
        self._free = max(self.now, self._free) + self.table.server_us / 1e6
        return self._free

    def _tell(self, id: RequestId, last: bool) -> None:
        """A token was written; the stage tells several at a time."""
        voice = self._voices[id]
        voice.untold += 1
        if last or voice.untold >= min(TEXT_GROUP, 1 + voice.told // 2) or self.now - voice.told_at >= TEXT_WAIT_S:
            voice.told, voice.untold, voice.told_at = voice.told + voice.untold, 0, self.now
            self._delivered()

    def _end(self) -> None:
        while self._ending and (self.heard[self._ending[0]].end or 0.0) <= self.now:
            id = self._ending.popleft()
            del self._voices[id]
            self.ended(self.heard[id])


def replay(card: Card, arrivals: Iterator[tuple[float, Asked]], until: float) -> list[Heard]:
    """An open load: requests come when they come. Those that arrived until then, all of them answered."""
    for when, asked in takewhile(lambda a: a[0] < until, arrivals):
        while card.now < when:
            card.advance(when)
        card.arrive(asked)
    while card.running:
        card.advance(card.now + 1.0)
    return list(card.heard.values())

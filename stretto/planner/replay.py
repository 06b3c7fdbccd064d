"""One card, replayed: requests come, the stages' steps take table time, and listeners hear what comes of them.

The scheduler, the launching ahead and the pace of packets are the real ones. Steps of the stages run beside each other,
each slower than alone. What a step gives is passed on by the host a little later, row by row. The server's one thread
works on all that arrive and on all that leaves, by turns. Time is simulated: a minute of a busy card takes seconds.
Called by the planner; deterministic; imports no torch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from random import Random
from typing import Literal

from stretto.planner.heard import Asked, Heard
from stretto.planner.lanes import Call, Stage, Step, Thread, Vocoder, Voice
from stretto.planner.table import Table, share_at
from stretto.stage.pace import LOOK_S, Pace, Rhythm, leaving
from stretto.stage.request import RequestSpec
from stretto.stage.scheduler.batch import Outcome
from stretto.types import RequestId

Lane = Literal["text", "frames", "vocoder"]
OPENING = 8  # rows of a frames prompt behind those of the text; the last one comes with the first token of text
FIRST, EACH, RAMP = 1, 8, 2  # frames of packets
JITTER = 0.3
TEXT_GROUP, TEXT_WAIT_S = 4, 0.025  # tokens that are told together, at most, and how long one waits for that


class Card:
    """`arrive` brings requests, `advance` lets time pass."""

    def __init__(self, table: Table, max_rows: int | None = None, seed: int = 0) -> None:
        self.table, self.now = table, 0.0
        self.heard: dict[RequestId, Heard] = {}
        self.ended: Callable[[Heard], None] = lambda heard: None
        rows = max_rows or table.max_rows
        self.text = Stage(table.text, rows, True, self._clock)
        self.frames = Stage(table.frames, rows, False, self._clock)
        self.vocoder = Vocoder(table)
        self._rhythm = Rhythm(table.frame_s, table.opening_s)
        self._voices: dict[RequestId, Voice] = {}
        self._came, self._looked = False, 0.0  # frames, since the pace of packets was looked at
        self._server, self._host = Thread(), 0.0  # until when the host's thread is busy
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # what the host does soon: a heap, by when
        self._random = Random(seed)
        self._arrived = self._number = 0
        self.running = 0  # requests that are not answered yet

    def _clock(self) -> int:
        return int(1e9 * self.now)

    @property
    def cache(self) -> float:
        """The largest part of a stage's KV cache that was ever in use."""
        return max(s.most_held / s.scheduler.pool.num_blocks for s in (self.text, self.frames))

    def arrive(self, asked: Asked) -> None:
        """A request reaches the server now: `serial_ms` of its thread's time, and the rest of the way to the stages
        takes `overhead_ms`, more or less."""
        heard = Heard(self.now, asked)
        self.running += 1
        way_s = self.table.overhead_ms / 1e3 * self._random.uniform(1 - JITTER, 1 + JITTER)
        self._server.add(self.table.serial_ms, lambda: self._later_at(self.now + way_s, lambda: self._announce(heard)))

    def _announce(self, heard: Heard) -> None:
        """All rows of a prompt are known to the frames stage at once, but for the last one."""
        id, asked = RequestId(f"r{self._arrived}"), heard.asked
        self._arrived += 1
        self.heard[id] = heard
        # The pick that ends a request is not a frame.
        spec = RequestSpec(id, asked.frames + 1, paced=True, last_on_device=True, cache_output=False)
        request = self.frames.scheduler.submit(spec, asked.prompt + OPENING, closed=False)
        self._voices[id] = Voice(self._arrived, Pace(FIRST, EACH, RAMP, self._rhythm), request, heard)
        self.text.scheduler.submit(RequestSpec(id, asked.text), asked.prompt)

    # -- time

    def advance(self, until: float) -> None:
        """Let the device run to `until`, or to the next thing that happens, whichever is sooner."""
        self._launch()
        rates = self._rates()
        times = [self.now + step.left_ms / 1e3 / rate for step, rate in rates.values()]
        queues = (self.text.running, self.frames.running, self.vocoder.calls)
        times += [q[0].starts for q in queues if q and q[0].starts > self.now]
        times += [max(due, self._host) for due in (self.text.due, self.frames.due) if due is not None]
        times += [] if self._server.next is None else [self._server.next]
        times += [t for t, _, _ in self._later[:1]]
        if self._host > self.now:
            times.append(self._host)
        if any(v.waiting for v in self._voices.values()):
            times.append(max(self._host, self._looked + LOOK_S + 1e-6))
        then = max(self.now, min([until, *times]))
        passed, self.now = then - self.now, then
        for step, rate in rates.values():
            step.left_ms -= 1e3 * passed * rate
        for lane, (step, _) in rates.items():
            if step.left_ms <= 1e-6:
                self._finish(lane)
        self._server.advance(self.now)
        while self._later and self._later[0][0] <= self.now:
            heapq.heappop(self._later)[2]()

    def _later_at(self, when: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._later, (when, self._number, then))

    def _rates(self) -> dict[Lane, tuple[Step | Call, float]]:
        """What runs, and how fast."""
        t = self.table.together
        text, frames, call = self._at_work(self.text.running), self._at_work(self.frames.running), self._call()
        slowed = t.beside_vocoder if call else 1.0
        found: dict[Lane, tuple[Step | Call, float]] = {}
        if text:
            prompts = not text.batch.decode_only
            beside = share_at(t.prompt, text.batch.num_tokens) if prompts else share_at(t.text, len(text.batch.spans))
            found["text"] = (text, slowed * (beside if frames else 1.0))
        if frames:
            beside = share_at(t.frames, len(frames.batch.spans))
            if text and not text.batch.decode_only:
                beside = share_at(t.frames_prompt, text.batch.num_tokens)
            found["frames"] = (frames, slowed * (beside if text else 1.0))
        if call:
            found["vocoder"] = (call, t.vocoder if found else 1.0)
        return found

    def _at_work(self, steps: deque[Step]) -> Step | None:
        return steps[0] if steps and steps[0].starts <= self.now else None

    def _call(self) -> Call | None:
        calls = self.vocoder.calls
        return calls[0] if calls and calls[0].starts <= self.now else None

    def _busy(self, ms: float) -> float:
        """The host's thread does something as soon as it can. When that is done."""
        self._host = max(self.now, self._host) + ms / 1e3
        return self._host

    def _finish(self, lane: Lane) -> None:
        """The next step is on the device already, while the host passes on what this one gave, row by row."""
        self._host = max(self._host, self.now + self.table.hop_us / 1e6)
        if lane == "vocoder":
            sounded = self.vocoder.retire()
            self._later_at(self._busy(len(sounded) * self.table.host_us / 1e3), lambda: self._sounded(sounded))
            return
        stage, take = (self.text, self._wrote) if lane == "text" else (self.frames, self._spoke)
        outcomes = stage.retire()
        self._later_at(self._busy(len(outcomes) * self.table.host_us / 1e3), lambda: take(outcomes))

    # -- stages

    def _launch(self) -> None:
        """Whatever the host can do now: a round of its loop, the last stage first."""
        if self.now < self._host:
            return
        self.vocoder.launch(self.now, self._busy)
        self.frames.launch(self._busy)
        if self._came or self.now - self._looked > LOOK_S:
            self._send_due()
            self.vocoder.launch(self.now, self._busy)
        self.text.launch(self._busy)

    def _wrote(self, outcomes: list[Outcome]) -> None:
        """Several tokens are told at a time, to the frames stage and to the listener."""
        frames = self.frames.scheduler
        for o in outcomes:
            if o.token is None:
                continue
            id, last = o.request.id, o.reason is not None
            voice = self._voices[id]
            voice.untold += 1
            least = min(TEXT_GROUP, 1 + voice.told // 2)
            if not last and voice.untold < least and self.now - voice.told_at < TEXT_WAIT_S:
                continue
            if not voice.told:
                frames.append_rows(id, 1, last=True)
            else:
                frames.append_text(id, voice.untold)
            if last:
                frames.end_text(id)
            voice.told, voice.untold, voice.told_at = voice.told + voice.untold, 0, self.now
            self._deliver(partial(self._read, voice.heard))

    def _spoke(self, outcomes: list[Outcome]) -> None:
        for o in outcomes:
            if o.token is None:
                continue
            voice = self._voices[o.request.id]
            if o.reason is not None:
                voice.last = True
                self._send(voice)
            else:
                voice.waiting += 1
                voice.pace.came(self.now)
                self._came = True

    def _send_due(self) -> None:
        self._came, self._looked = False, self.now
        there = [v for v in self._voices.values() if v.waiting]
        for voice, goes in zip(there, leaving([(v.pace, v.waiting, v.stalled) for v in there], self.now), strict=True):
            if goes:
                self._send(voice)

    def _send(self, voice: Voice) -> None:
        if voice.waiting:
            self.vocoder.push(voice, voice.waiting)
            voice.pace.left(voice.waiting, self.now)
            voice.waiting = 0
        elif self.vocoder.close(voice):  # all of it is sounded already
            self._later_at(self.now + self.table.hop_us / 1e6, lambda: self._sounded([(voice, 0, True)]))

    def _sounded(self, sounded: list[tuple[Voice, int, bool]]) -> None:
        """Packets leave; the server sends them."""
        for voice, frames, last in sounded:
            seconds = frames * self.table.frame_s - (0.0 if voice.begun else self.table.opening_s)
            voice.begun = voice.begun or self.now
            voice.sounded_s += seconds
            voice.deadline = voice.begun + voice.sounded_s
            self._deliver(partial(self._heard, voice, seconds, last))

    # -- the way back

    def _deliver(self, then: Callable[[], None]) -> None:
        self._server.add(self.table.server_us / 1e3, then)

    def _read(self, heard: Heard) -> None:
        if heard.first_text is None:
            heard.first_text = self.now - heard.arrived

    def _heard(self, voice: Voice, seconds: float, last: bool) -> None:
        heard = voice.heard
        if seconds:
            heard.packets.append((self.now, seconds))
        if last:
            heard.end = self.now
            del self._voices[voice.request.id]
            self.running -= 1
            self.ended(heard)


def replay(card: Card, arrivals: Iterator[tuple[float, Asked]], until: float) -> list[Heard]:
    """An open load: requests come when they come. Those that arrived until then, all of them answered."""
    for when, asked in takewhile(lambda a: a[0] < until, arrivals):
        while card.now < when:
            card.advance(when)
        card.arrive(asked)
    while card.running:
        card.advance(card.now + 1.0)
    return list(card.heard.values())

"""One card, replayed: requests come, the stages' steps take table time, and listeners hear what comes of them.

The scheduler, the launching ahead and the pace of packets are the real ones. Steps of the stages run beside each other,
each slower than alone. The host's one thread gives the stages turns, in the real order; what it is told while it
launches it hears of afterwards. The server's one thread does one thing after the other: requests that come, packets,
ends. Time is simulated: a minute of a busy card takes seconds. Called by the planner; deterministic; imports no
torch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from random import Random
from typing import Literal

from stretto.planner.heard import Asked, Heard
from stretto.planner.lanes import Call, Stage, Step, Vocoder, Voice
from stretto.planner.loop import HostLoop
from stretto.planner.table import BINS, Table, at
from stretto.stage.pace import LOOK_S, Pace, Rhythm, leaving
from stretto.stage.prefill_priority import DecodeHold
from stretto.stage.request import RequestSpec
from stretto.stage.scheduler.batch import Outcome
from stretto.types import RequestId

Lane = Literal["text", "frames", "vocoder"]
OPENING = 5  # rows of a frames prompt beyond those of the text; one more comes with the first token of text
FIRST, EACH, RAMP = 1, 8, 2  # frames of packets
PROMPT = len(BINS)  # size of a step that holds prompts
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
        self._lanes: dict[Lane, Stage | Vocoder] = {"text": self.text, "frames": self.frames, "vocoder": self.vocoder}
        self._rhythm = Rhythm(table.frame_s, table.opening_s)
        self._voices: dict[RequestId, Voice] = {}
        self.frames.gives_way = DecodeHold(
            self.text, self._voices.values(), self._rhythm, lambda: self.now, self._clock
        )
        self._came, self._looked = False, 0.0  # frames, since the pace of packets was looked at
        self._server = 0.0  # until when the server's thread is busy
        self._messages: deque[Heard] = deque()  # requests that the host was told of
        self._fresh = False  # some of them were admitted in this round
        self._reports: list[Callable[[], None]] = []  # of the host, which leave together
        self._packets = 0  # among them
        self._host = HostLoop(
            (
                self._admit, self._turn_vocoder, self._push, self._turn_fresh, self._turn_frames, self._turn_vocoder,
                self._push, self._turn_text, self._push,
            ), self._due,
        )  # fmt: skip
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # what happens soon: a heap, by when
        self._random = Random(seed)
        self._arrived = self._number = 0
        self.running = 0  # requests that are not answered yet

    def _clock(self) -> int:
        return int(1e9 * self.now)

    @property
    def cache(self) -> float:
        """The largest part of a stage's KV cache that was ever in use."""
        return max(s.most_held / s.scheduler.pool.num_blocks for s in (self.text, self.frames))

    def arrive(self, asked: Asked) -> Heard:
        """A request reaches the server now: it has `serial_ms` of its thread's time, then there is the rest of the way,
        which takes `overhead_ms`, more or less, and behind that `build_ms` of the thread's time again."""
        heard = Heard(self.now, asked)
        self.running += 1
        way_s = max(0.0, self._random.gauss(self.table.overhead_ms, self.table.jitter_ms)) / 1e3

        def built() -> None:
            self._serve(self.table.build_ms, lambda: self._announce(heard))

        self._serve(self.table.serial_ms, lambda: self._later_at(self.now + way_s, built))
        return heard

    def _announce(self, heard: Heard) -> None:
        self._messages.append(heard)
        self._ring()

    # -- time

    def advance(self, until: float) -> None:
        """Let the device run to `until`, or to the next thing that happens, whichever is sooner."""
        self._host.run(self.now)
        rates = self._rates()
        times = [self.now + step.left_ms / 1e3 / rate for step, rate in rates.values()]
        queues = (self.text.running, self.frames.running, self.vocoder.calls)
        times += [q[0].starts for q in queues if q and q[0].starts > self.now]
        times += [] if self._host.next is None else [self._host.next]
        times += [t for t, _, _ in self._later[:1]]
        then = max(self.now, min([until, *times]))
        passed, self.now = then - self.now, then
        for step, rate in rates.values():
            step.left_ms -= 1e3 * passed * rate
        for lane, (step, _) in rates.items():
            if step.left_ms <= 1e-6:
                self._lanes[lane].end()
                self._ring()
        while self._later and self._later[0][0] <= self.now:
            heapq.heappop(self._later)[2]()

    def _later_at(self, when: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._later, (when, self._number, then))

    def _rates(self) -> dict[Lane, tuple[Step | Call, float]]:
        """What runs, and how fast."""
        t = self.table.together
        text, frames, call = self._at_work(self.text.running), self._at_work(self.frames.running), self._call()
        found: dict[Lane, tuple[Step | Call, float]] = {}
        if text:
            prompt = t.small_prompt if text.small else t.large_prompt
            beside = 1.0 if frames is None else (prompt if text.size == PROMPT else t.text[text.size])[frames.size]
            found["text"] = (text, beside if call is None else beside * call.shape.text_share)
        if frames:
            own = frames.size
            beside = 1.0 if text is None else t.frames_prompt if own == PROMPT else t.frames[own][text.size]
            found["frames"] = (frames, beside if call is None else beside * call.shape.frames_share)
        if call:
            found["vocoder"] = (call, call.shape.ms / call.shape.beside_ms if found else 1.0)
        return found

    def _at_work(self, steps: deque[Step]) -> Step | None:
        return steps[0] if steps and steps[0].starts <= self.now else None

    def _call(self) -> Call | None:
        calls = self.vocoder.calls
        return calls[0] if calls and calls[0].starts <= self.now else None

    # -- the host's turns

    def _busy(self, ms: float, prompts: bool = False) -> float:
        """Have the host's thread work for about so long. When it is done."""
        varies = self.table.varies_prompts if prompts else self.table.varies
        return self._host.busy(self.now, ms * self._random.choice(varies))

    def _ring(self) -> None:
        self._later_at(self.now + self.table.hop_us / 1e6, self._host.ring)

    def _due(self) -> float | None:
        return min((s.due for s in (self.text, self.frames) if s.due is not None), default=None)

    def _admit(self) -> bool:
        """All rows of a prompt are known to the frames stage at once, but for the last one."""
        self._fresh = bool(self._messages)
        for i in range(len(self._messages)):
            heard = self._messages.popleft()
            id, asked = RequestId(f"r{self._arrived}"), heard.asked
            self._arrived += 1
            self.heard[id] = heard
            # The pick that ends a request is not a frame.
            spec = RequestSpec(id, asked.frames + 1, paced=True, last_on_device=True, cache_output=False)
            request = self.frames.scheduler.submit(spec, asked.prompt + OPENING, closed=False)
            self._voices[id] = Voice(self._arrived, Pace(FIRST, EACH, RAMP, self._rhythm), request, heard)
            self.text.scheduler.submit(RequestSpec(id, asked.text), asked.prompt)
            self._busy(self.table.admit_next_ms if i else self.table.admit_ms)
        return self._fresh

    def _turn_fresh(self) -> bool:
        """New prompts go to the first stage before the others have their turns."""
        return self._fresh and self._turn_text()

    def _turn_text(self) -> bool:
        did = bool(self.text.done)
        while self.text.done:
            self._wrote(self.text.retire(self._busy))
        return self.text.launch(self._busy) or did

    def _turn_frames(self) -> bool:
        did = bool(self.frames.done)
        while self.frames.done:
            self._spoke(self.frames.retire(self._busy))
        did = self.frames.launch(self._busy) or did
        there = [v for v in self._voices.values() if v.waiting]
        if there and (self._came or self.now - self._looked > LOOK_S):
            did = self._send_due(there) or did
        return did

    def _turn_vocoder(self) -> bool:
        did = bool(self.vocoder.done)
        while self.vocoder.done:
            self._sounded(self.vocoder.retire(self._busy))
        return self.vocoder.launch(self.now, self._busy) or did

    def _push(self) -> bool:
        if self._packets:
            self._busy(at(self.table.push, self._packets))
        for report in self._reports:
            report()
        self._reports.clear()
        self._packets = 0
        return False

    # -- what comes of steps

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
            back_ms = self.table.back_ms if voice.told else self.table.opening_ms
            voice.told, voice.untold, voice.told_at = voice.told + voice.untold, 0, self.now
            self._reports.append(partial(self._deliver, self.table.text_us, back_ms, partial(self._read, voice.heard)))

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

    def _send_due(self, there: list[Voice]) -> bool:
        self._came, self._looked = False, self.now
        which = leaving([(v.pace, v.waiting, v.stalled) for v in there], self.now)
        for voice, goes in zip(there, which, strict=True):
            if goes:
                self._send(voice)
        if any(which):
            self._busy(at(self.table.send, sum(which)))
        return any(which)

    def _send(self, voice: Voice) -> None:
        if voice.waiting:
            self.vocoder.push(voice, voice.waiting)
            voice.pace.left(voice.waiting, self.now)
            voice.waiting = 0
        elif self.vocoder.close(voice):  # all of it is sounded already
            self._sounded([(voice, 0, True)])

    def _sounded(self, sounded: list[tuple[Voice, int, bool]]) -> None:
        """Packets leave, and ends."""
        for voice, frames, last in sounded:
            if frames:
                seconds = frames * self.table.frame_s - (0.0 if voice.begun else self.table.opening_s)
                voice.begun = voice.begun or self.now
                voice.sounded_s += seconds
                voice.deadline = voice.begun + voice.sounded_s
                self._packets += 1
                us = self.table.packet_us + self.table.packet_frame_us * frames
                heard = partial(self._hear, voice.heard, seconds)
                self._reports.append(partial(self._deliver, us, self.table.back_ms, heard))
            if last:
                self._reports.append(partial(self._close, voice))

    # -- the server

    def _serve(self, ms: float, then: Callable[[], None]) -> None:
        """Its thread does this when all is done that came before."""
        self._server = max(self.now, self._server) + ms / 1e3
        self._later_at(self._server, then)

    def _deliver(self, us: float, back_ms: float, then: Callable[[], None]) -> None:
        self._serve(us / 1e3, lambda: self._later_at(self.now + back_ms / 1e3, then))

    def _read(self, heard: Heard) -> None:
        if heard.first_text is None:
            heard.first_text = self.now - heard.arrived

    def _hear(self, heard: Heard, seconds: float) -> None:
        heard.packets.append((self.now, seconds))

    def _close(self, voice: Voice) -> None:
        """The end of an answer is told with all that is known of it: when each of its steps was, for one."""
        del self._voices[voice.request.id]
        ms = self.table.end_ms + voice.heard.asked.frames * self.table.end_frame_us / 1e3
        self._serve(ms, lambda: self._later_at(self.now + self.table.back_ms / 1e3, lambda: self._end(voice.heard)))

    def _end(self, heard: Heard) -> None:
        heard.end = self.now
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

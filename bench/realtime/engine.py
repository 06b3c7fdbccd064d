"""The parts that are measured at the engine's sessions, without a server: first, append, barge,
live."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from bench.harness.results import quantile
from bench.harness.serving import GpuWatch
from bench.realtime.numbers import Found, Gate, by_length, delta, fitting, listened, ms, show
from bench.realtime.sounds import BEEP_S, Clips, Samples
from bench.realtime.turns import (
    LARGE_PIECE_S,
    answer,
    ask_whole,
    clock,
    finish,
    listen,
    played,
    speak,
    without_packets,
)
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk
from stretto.engine.session import INPUT_RATE

TAIL_S = 2.0  # of each turn, spoken in real time where several sessions are measured
PRELOADERS = 16  # sessions that are given the sound before it at once
DEVICE = "stretto_stage_device_seconds_sum"
BUSY = "stretto_host_busy_seconds_total"


@dataclass(slots=True)
class Stand:
    """What the parts share."""

    args: argparse.Namespace
    engine: PipelineEngine
    gpu: GpuWatch
    clips: Clips = field(default_factory=Clips)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    until: float = 0.0  # no cell begins after that

    @property
    def late(self) -> bool:
        return clock() > self.until

    # ---- first

    async def first(self) -> AsyncIterator[Found]:
        """Commit → first audio, of turns spoken to sessions and of the same turns sent whole."""
        args = self.args
        await self.one_by_one("warm", args.lengths[:1], 2)
        if 1 in args.sessions:
            yield await self.one_by_one("session", args.lengths, args.turns)
            yield await self.one_by_one("whole", args.lengths, max(2, args.turns // 2))
            yield await self.encode_alone()
        for count in sorted((n for n in args.sessions if n > 1), key=lambda n: (n != 32, -n)):
            if self.late:
                yield {"kind": "session", "sessions": count, "skipped": "no time was left"}
                continue
            yield await self.crowd("session", count)
            if count == 32 and not self.late:
                yield await self.crowd("whole", count)

    async def one_by_one(self, kind: str, lengths: Sequence[float], turns: int) -> Found:
        """One session at a time, a new one for each turn; lengths take turns, so that drift hits
        all of them alike."""
        samples: list[Found] = []
        for _ in range(turns):
            for seconds in lengths:
                if self.late and samples:
                    break
                samples.append({"seconds": seconds, **await self.one(kind, seconds)})
        return self.told(kind, 1, samples)

    async def one(self, kind: str, seconds: float) -> Found:
        clip, params = self.clips.clip(seconds), answer(self.args.frames, next(self.numbers))
        if kind == "whole":
            return without_packets(await ask_whole(self.engine, clip, params))
        async with self.engine.session() as s:
            await speak(s, clip, self.args.pace)
            if not self.args.pace:
                await s.read()  # in real time it would have been long since
            return without_packets(await finish(s, params))

    async def crowd(self, kind: str, count: int) -> Found:
        """So many sessions, lengths mixed. All have spoken all but the last of their turn when the
        first commits; they end one by one within `--spread` seconds, in real time, while others
        speak or are answered."""
        args, lengths = self.args, fitting(self.args.lengths, count, self.args.most_sound)
        preload, gate = asyncio.Semaphore(PRELOADERS), Gate(count)
        tail = round(TAIL_S * INPUT_RATE)
        start = 0.0

        async def one(place: int) -> Found:
            seconds = lengths[place % len(lengths)]
            clip, params = self.clips.clip(seconds), answer(args.answer_frames, next(self.numbers))
            due = args.spread * (place + self.random.random()) / count
            async with self.engine.session() as s:
                if kind == "session":
                    async with preload:
                        await speak(s, clip[:-tail], 0.0)
                        await s.read()
                await gate.wait()
                await asyncio.sleep(max(0.0, start + due - clock()))
                if kind == "session":
                    await speak(s, clip[-tail:], 1.0)
                    at, found = clock() - start, await finish(s, params)
                else:
                    await asyncio.sleep(TAIL_S)
                    at, found = clock() - start, await ask_whole(self.engine, clip, params)
            return {"seconds": seconds, "at": at, **found}

        came = clock()
        tasks = [asyncio.create_task(one(i)) for i in range(count)]
        await gate.all_there()
        start = clock()
        gate.open()
        samples = await asyncio.gather(*tasks)
        more = {"spread_s": args.spread, "gpu": self._gpu(start), "ready_s": start - came}
        return self.told(kind, count, samples) | more

    async def encode_alone(self) -> Found:
        """What encoding takes of the time to the first token: an answer to a turn of 5 s behind
        some instructions, and then behind others of the same length. The second reads as many rows,
        but the window is encoded already."""
        pairs = []
        for _ in range(self.args.turns):
            async with self.engine.session() as s:
                await speak(s, self.clips.clip(5.0), 0.0)
                item = await s.commit()
                both = []
                for word in ("One.", "Two."):
                    params = answer(self.args.frames, next(self.numbers))
                    events = s.respond(
                        params=params, instructions=word, items=[item], remember=False
                    )
                    both.append(without_packets(await listen(events, clock(), 0.0)))
                pairs.append(both)
        split = [[a["phases"][2], b["phases"][2]] for a, b in pairs if a["phases"] and b["phases"]]
        took = statistics.median(a - b for a, b in split) if split else None
        print(f"  encoding the open window (5 s) takes {ms(took)} of the prompt's time", flush=True)
        return {"kind": "encode", "encode_s": took, "prompt_s": split, "samples": pairs}

    # ---- append

    async def append(self) -> AsyncIterator[Found]:
        """What 2 s of sound cost while they are spoken, by how much was said before; every fourth
        ends a window."""
        for context in (0.0, *self.args.lengths):
            if self.late:
                return
            yield await self.appends(context)
        for context in (0.0, 60.0):
            if not self.late:
                yield await self.saturated(context)

    async def appends(self, context: float) -> Found:
        """One session; each append is read to its end before the next comes, so that its time is
        its cost."""
        samples = []
        async with self.engine.session() as s:
            await speak(s, self.clips.clip(context), 0.0)
            await s.read()
            before, start = await self.stage_numbers(), clock()
            for piece in pieces(
                self.clips.clip(self.args.appends * LARGE_PIECE_S, beep=not context)
            ):
                begun = clock()
                await s.append(piece)
                called = clock() - begun
                await s.read()
                samples.append([called, clock() - begun])
            took = clock() - start
            work = delta(before, await self.stage_numbers())
        count = len(samples)
        device = sum(v for k, v in work.items() if k.startswith(DEVICE))
        print(
            f"  append of 2 s behind {context:g} s: call p50 "
            f"{ms(quantile([a for a, _ in samples], 0.5))}, all of it "
            f"on average {ms(took / count)}, of which steps on the device {ms(device / count)} "
            f"(encoder not counted)",
            flush=True,
        )
        return {
            "kind": "append", "context_s": context, "wall_s_each": took / count,
            "steps_device_s_each": device / count,
            "work": work, "samples": samples,
        }  # fmt: skip

    async def saturated(self, context: float, sessions: int = 16) -> Found:
        """Many sessions that append as fast as it goes: the device always has work, so an append
        takes at most the time that passes for each."""
        count, stop, gate = 0, 0.0, Gate(sessions)

        async def one() -> None:
            nonlocal count
            said = self.clips.clip(4 * LARGE_PIECE_S, beep=False)
            async with self.engine.session() as s:
                await speak(s, self.clips.clip(max(context, BEEP_S)), 0.0)
                await s.read()
                await gate.wait()
                while clock() < stop:
                    for piece in pieces(said):
                        await s.append(piece)
                        count += 1
                    await s.read()
                    said = np.roll(said, 7919)  # other windows, at no cost

        tasks = [asyncio.create_task(one()) for _ in range(sessions)]
        await gate.all_there()
        before, start = await self.stage_numbers(), clock()
        stop = start + self.args.saturate
        gate.open()
        await asyncio.gather(*tasks)
        took = clock() - start
        work, gpu = delta(before, await self.stage_numbers()), self._gpu(start)
        busy = gpu.get("busy_percent")
        each = took / count * (busy / 100 if busy is not None else 1.0)
        print(
            f"  {sessions} sessions append 2 s behind {context:g} s, {count / took:.0f} a second: "
            f"at most {ms(each)} "
            f"of GPU time each (busy {busy if busy is not None else 100:.0f} %)",
            flush=True,
        )
        return {
            "kind": "saturated", "context_s": context, "sessions": sessions, "appends": count,
            "seconds": took,
            "gpu": gpu, "gpu_s_each": each, "work": work,
        }  # fmt: skip

    async def stage_numbers(self) -> dict[str, float]:
        """What the hosts say now (they are asked once a second else)."""

        def busy(values: dict[str, float]) -> list[float]:
            return [v for k, v in values.items() if k.startswith(BUSY)]

        before, start = busy(dict(self.engine.metrics())), clock()
        for p in self.engine.pipelines:
            p.ping((1 << 40) + next(self.numbers))
        while clock() - start < 3.0:
            await asyncio.sleep(0.002)
            values = dict(self.engine.metrics())
            if all(a != b for a, b in itertools.zip_longest(busy(values), before)):
                return values
        return dict(self.engine.metrics())

    # ---- barge

    async def barge(self) -> AsyncIterator[Found]:
        """Cancel → nothing more comes; → the stages have released everything; → the next turn's
        first audio."""
        for others in (0, self.args.others):
            if self.late:
                return
            yield await self.interruptions(others)

    async def interruptions(self, others: int) -> Found:
        """Answers of 40 s that are closed at a random packet, while so many others are being
        said."""
        samples: list[Found] = []
        background = [asyncio.create_task(self._say_on()) for _ in range(others)]
        try:
            for _ in range(self.args.turns * 2):
                if self.late and samples:
                    break
                samples.append(await self._interrupt(alone=not others))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        closed, after = (
            [s[k] for s in samples if s[k] is not None] for k in ("closed", "next_first_audio")
        )
        shown = (
            f"closed p50 {ms(quantile(closed, 0.5))} max {ms(max(closed))}; next first audio p50 "
        )
        print(
            f"  barge-in beside {others} others: "
            f"{shown}{ms(quantile(after, 0.5) if after else None)}",
            flush=True,
        )
        return {"kind": "barge", "others": others, "samples": samples}

    async def _interrupt(self, alone: bool) -> Found:
        at = self.random.randrange(1, 6)
        async with self.engine.session() as s:
            await speak(s, self.clips.clip(5.0), 0.0)
            await s.commit()
            packets = 0
            events = s.respond(params=answer(500, next(self.numbers)))
            async with aclosing(events):
                async for event in events:
                    packets += isinstance(event, AudioChunk)
                    if packets == at:
                        break
                cancelled = clock()
            closed = clock() - cancelled
            freed = await self._freed(cancelled) if alone else None
            await speak(s, self.clips.clip(5.0), 0.0)
            found = await finish(s, answer(self.args.frames, next(self.numbers)))
        return {
            "packet": at, "closed": closed, "freed": freed,
            "next_first_audio": found.get("first_audio"),
            "error": found["error"],
        }  # fmt: skip

    async def _freed(self, since: float) -> float | None:
        """When no stage has a request any more, as they say themselves."""
        while clock() - since < 5.0:
            values = await self.stage_numbers()
            if not any(v for k, v in values.items() if k.startswith("stretto_stage_requests")):
                return clock() - since
        return None

    async def _say_on(self) -> None:
        """Speaks all the time."""
        while True:
            async with self.engine.session() as s:
                await speak(s, self.clips.clip(5.0), 0.0)
                await finish(s, answer(125, next(self.numbers)))

    # ---- live

    async def live(self) -> AsyncIterator[Found]:
        """Sessions that speak 5 s in real time, hear an answer of 5 s, and so on; begun at random
        moments."""
        for count in self.args.live:
            yield await self.conversations(count)

    async def conversations(self, count: int) -> Found:
        args, samples, late = self.args, [], []
        start = clock()
        stop = start + args.live_seconds
        clips = [self.clips.clip(args.live_turn) for _ in range(count)]

        async def one(place: int) -> None:
            await asyncio.sleep(2 * args.live_turn * place / count)
            async with self.engine.session() as s:
                while clock() < stop:
                    took = await speak(s, clips[place], 1.0)
                    at = clock() - start
                    found = await finish(s, answer(args.live_frames, next(self.numbers)))
                    heard = played(found)
                    more = (
                        {"underruns": heard.underruns, "wait": heard.wait}
                        if heard is not None
                        else {}
                    )
                    samples.append(
                        {"session": place, "seconds": args.live_turn, "at": at, **found, **more}
                    )
                    late.append(max(took))
                    clips[place] = await asyncio.to_thread(self.clips.clip, args.live_turn)
                    if heard is not None:
                        await asyncio.sleep(max(0.0, start + at + heard.stop - clock()))

        await asyncio.gather(*(one(i) for i in range(count)))
        return self.told("live", count, samples) | listened(samples) | {
            "slowest_append_s": max(late), "gpu": self._gpu(start),
        }  # fmt: skip

    # ---- numbers

    def _gpu(self, start: float) -> Found:
        return self.gpu.between(start, clock())  # both clocks are CLOCK_MONOTONIC

    def told(self, kind: str, count: int, samples: Sequence[Found]) -> Found:
        found = {
            "kind": kind,
            "sessions": count,
            "by_length": by_length(samples),
            "samples": list(samples),
        }
        # since the engine was opened
        found["windows_changed"] = self.engine.metrics()["stretto_engine_windows_changed_total"]
        if kind != "warm":
            show(found)
        return found


def pieces(samples: Samples) -> Iterator[Samples]:
    size = round(LARGE_PIECE_S * INPUT_RATE)
    return (samples[at : at + size] for at in range(0, len(samples), size))

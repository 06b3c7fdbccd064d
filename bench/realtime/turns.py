"""One turn, spoken to an engine's session or sent to it whole, and when each piece of the answer
came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from bench.realtime.sounds import Samples
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event, Finished, TextDelta
from stretto.engine.session import INPUT_RATE, Session
from stretto.errors import StrettoError
from stretto.loadtest.player import Packet, Playback, play
from stretto.params import Params

clock = time.perf_counter
PIECE_S = 0.1  # in real time
LARGE_PIECE_S = 2.0  # as fast as it goes
PHASES = ("commit", "admission", "encode and prefill", "talker", "vocoder", "to the engine")
"""Of commit → first audio, one after the other. Encoding alone is measured by itself:
`engine.encode_alone`."""


def answer(frames: int, number: int, text_tokens: int = 0) -> Params:
    """An answer of exactly this length on any weights, with the model's usual sampling."""
    text = text_tokens or max(2, frames // 2)
    return Params(
        temperature=0.7, top_k=20, top_p=0.8, seed=number, max_text_tokens=text, ignore_eos=True,
        min_frames=frames,
        max_frames=frames,
    )  # fmt: skip


async def speak(s: Session, samples: Samples, pace: float) -> list[float]:
    """Append it at `pace` times real time, or (0) as fast as it goes. How long each append took."""
    size = round((PIECE_S if pace else LARGE_PIECE_S) * INPUT_RATE)
    start, took = clock(), []
    for at in range(0, len(samples), size):
        piece = samples[at : at + size]
        if pace:
            await asyncio.sleep(max(0.0, start + (at + len(piece)) / INPUT_RATE / pace - clock()))
        begun = clock()
        await s.append(piece)
        took.append(clock() - begun)
    return took


async def finish(s: Session, params: Params, **more: Any) -> dict[str, Any]:
    """The speaker stops: commit, answer. Times run from the commit."""
    start = clock()
    try:
        await s.commit()
        committed = clock() - start
        return await listen(s.respond(params=params, **more), start, committed)
    except StrettoError as e:
        return {"error": f"{type(e).__name__}: {e}"}


async def ask_whole(engine: PipelineEngine, samples: Samples, params: Params) -> dict[str, Any]:
    """The same turn as one chat request with all of its sound, sent when the speaker stops."""
    start = clock()
    content = [{"type": "audio", "data": samples, "sample_rate": INPUT_RATE}]
    try:
        return await listen(
            engine.generate([{"role": "user", "content": content}], params=params), start, 0.0
        )
    except StrettoError as e:
        return {"error": f"{type(e).__name__}: {e}"}


async def listen(events: AsyncIterator[Event], start: float, committed: float) -> dict[str, Any]:
    """To the end of the answer."""
    first_text: float | None = None
    packets: list[Packet] = []
    end: Finished | None = None
    async with aclosing(cast(AsyncGenerator[Event], events)) as given:
        async for event in given:
            now = clock() - start
            if isinstance(event, AudioChunk):
                packets.append(Packet(now, len(event.samples) / 24_000))
            elif isinstance(event, TextDelta):
                first_text = now if first_text is None else first_text
            elif isinstance(event, Finished):
                end = event
    assert end is not None
    u = end.usage
    return {
        "error": None if packets else "no audio",
        "commit": committed,
        "first_text": first_text,
        "first_audio": packets[0].at if packets else None,
        "phases": phases(end, committed, packets),
        "prompt_tokens": u.prompt_tokens,
        "new_tokens": u.prompt_tokens - u.cached_tokens,
        "encoded": u.encoded_pieces,
        "rtf": real_time_factor(packets),
        "packets": [[p.at, p.seconds] for p in packets],
    }


def real_time_factor(packets: Sequence[Packet]) -> float | None:
    """Of an answer: the time from the commit to its last packet, over the length of its speech."""
    spoken = sum(p.seconds for p in packets)
    return packets[-1].at / spoken if spoken else None


def phases(end: Finished, committed: float, packets: list[Packet]) -> list[float] | None:
    """As `PHASES` has them. The engine's timeline runs from the moment at which it was asked."""

    def times(lane: str, name: str) -> list[tuple[float, float]]:
        return sorted((s.start, s.stop) for s in end.timeline if s.lane == lane and s.name == name)

    thinker, talker = times("thinker", "prompt"), times("talker", "prompt")
    vocoder = times("code2wav", "first frame")
    if not (thinker and talker and vocoder and packets):
        return None
    begun, token, frame, sound = thinker[0][0], thinker[-1][1], talker[-1][1], vocoder[-1][1]
    return [
        committed,
        begun,
        token - begun,
        frame - token,
        sound - frame,
        packets[0].at - committed - sound,
    ]


def played(found: dict[str, Any]) -> Playback | None:
    """What a listener hears who plays each packet as it comes."""
    return play([Packet(*p) for p in found.get("packets", ())])


def without_packets(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if k != "packets"}


def long(params: Params, frames: int) -> Params:
    return replace(params, min_frames=frames, max_frames=frames)

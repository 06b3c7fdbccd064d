"""One process that uses a server as its other clients do, and notes what it notices.

Started by `attacks.py` twice: as `probe`, which asks /live all the time, and as `client`, which has
an API key of its own, listens to streamed answers, and sends ordinary requests of every kind. A job
comes as one JSON line on stdin; `ready` is printed; a second line holds the moment to begin, a
third ends it; then the result is printed. What has no answer by then counts with the time that it
has waited. Imports no torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.slow.harness.sockets import FAILURES, Closed, Failed, Http, Refused, websocket
from tests.slow.hostile import bodies

PROBE_S = 0.02
PAUSE_S = 0.3
PATIENCE_S = 60.0
# an ordinary request without an answer after so long counts as refused when the watch ends
LATE_S = 5.0
LISTENERS = 2
FRAMES = 100  # of each streamed answer
CHAT, SPEECH, FORMS = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"


class Wrong(ValueError):
    """An answer other than the one that an ordinary request gets."""


@dataclass(slots=True)
class Notes:
    """What was noticed. Times are seconds; `at` counts from the beginning."""

    live: list[tuple[float, float]] = field(default_factory=list)  # at, latency
    gaps: list[tuple[float, float]] = field(
        default_factory=list
    )  # at, between two pieces of a stream
    first: list[tuple[float, float]] = field(
        default_factory=list
    )  # at, from a request to its stream's first piece
    asked: list[tuple[float, str, str, float]] = field(
        default_factory=list
    )  # at, kind, outcome, seconds
    open: dict[int, tuple[str, float]] = field(
        default_factory=dict
    )  # what is waited for, since when
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    began: float = 0.0

    def now(self) -> float:
        return time.monotonic() - self.began

    def waited(self, what: str, since: float) -> None:
        """Something was waited for in vain until now."""
        seconds = self.now() - since
        if what in ("live", "first", "gaps"):
            getattr(self, what).append((since, seconds))
        elif seconds > LATE_S and what != "stream":  # its gaps are noted
            self.asked.append((since, what, "no answer", seconds))


@dataclass(slots=True)
class Victim:
    port: int
    key: str
    notes: Notes = field(default_factory=Notes)

    # ---- the probe

    async def probe(self) -> None:
        """Latencies of /live."""
        notes, http = self.notes, Http(self.port)
        while True:
            since = notes.now()
            notes.open[0] = "live", since
            while not await self._alive(http):
                await asyncio.sleep(PROBE_S)  # it goes on waiting
            notes.live.append((since, notes.now() - since))
            del notes.open[0]
            await asyncio.sleep(PROBE_S)

    async def _alive(self, http: Http) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return (await http.request("GET", "/live")).status == 200
        except (*FAILURES, TimeoutError):
            http.close()
            return False

    # ---- streams

    async def listen(self, number: int) -> None:
        """Spoken answers, one after the other, as they are made."""
        turn = 0
        while True:
            turn += 1
            body = {
                "messages": [{"role": "user", "content": f"Question {number}, {turn}"}],
                "modalities": ["text", "audio"], "stream": True, "audio": {"format": "pcm16"},
                "seed": turn,
                "max_tokens": 12, "ignore_eos": True, "min_audio_frames": FRAMES,
                "max_audio_frames": FRAMES,
            }  # fmt: skip
            await self._ask("stream", partial(self._stream, body, number))
            if what := self.notes.open.pop(-1 - number, None):  # it failed in between
                self.notes.waited(*what)

    async def _stream(self, body: Any, number: int) -> None:
        notes = self.notes
        last, begun = notes.now(), False
        async with Http(self.port, self.key) as http:
            notes.open[-1 - number] = "first", last
            await http.send("POST", CHAT, [json.dumps(body).encode()], "application/json")
            answer = await http.begin()
            if answer.status != 200:
                raise Wrong(str(answer.status))
            async for piece in http.pieces(answer):
                if b'"error":' in piece:
                    raise Wrong("error in a stream")
                if b'"data":' not in piece and b'"transcript":' not in piece:
                    continue
                now = notes.now()
                (notes.gaps if begun else notes.first).append((last, now - last))
                last, begun = now, True
                notes.open[-1 - number] = "gaps", now
            notes.open.pop(-1 - number, None)
        if not begun:
            raise Wrong("a stream without content")

    # ---- ordinary requests

    async def _ask(self, kind: str, work: Callable[[], Awaitable[None]]) -> None:
        notes = self.notes
        since = notes.now()
        number = next(notes.numbers)
        notes.open[number] = kind, since
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work()
            outcome = "ok"
        except TimeoutError:
            outcome = "no answer"
        except Refused as e:
            outcome = str(e.status)
        except (Wrong, Closed, Failed) as e:
            outcome = str(e)[:200]
        except FAILURES as e:
            outcome = f"{type(e).__name__} {e}"[:200]
        del notes.open[number]
        notes.asked.append((since, kind, outcome, notes.now() - since))
        await asyncio.sleep(PAUSE_S)

    async def _whole(
        self, path: str, body: Any, check: Callable[[bytes], bool], kind: str = "application/json"
    ) -> None:
        async with Http(self.port, self.key) as http:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await http.request("POST", path, data, content_type=kind)
        if answer.status != 200:
            raise Wrong(f"{answer.status} {_code(answer.body)}")
        if not check(answer.body):
            raise Wrong("200 with another answer")

    async def chat(self) -> None:
        await self._whole(CHAT, bodies.chat("How are you?"), lambda b: b'"choices":' in b)

    async def structured(self) -> None:
        shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        await self._whole(CHAT, bodies.schema(shape, temperature=0), lambda b: b'"choices":' in b)

    async def speech(self) -> None:
        body = {"input": "Good day", "response_format": "pcm", "max_audio_frames": 4}
        await self._whole(SPEECH, body, lambda b: len(b) > 1000)

    async def transcription(self) -> None:
        body = bodies.form(bodies.wav(1.0), [("max_tokens", "4")])
        await self._whole(FORMS, body, lambda b: b'"text":' in b, bodies.FORM)

    async def session(self) -> None:
        async with websocket(self.port, "/v1/realtime", self.key) as socket:
            await socket.until("session.created")

    async def live_speech(self) -> None:
        async with websocket(self.port, "/v1/audio/speech/stream", self.key) as socket:
            await socket.send({"type": "session.config", "max_audio_frames": 4})
            await socket.send({"type": "input.text", "text": "Good day"})
            await socket.send({"type": "input.done"})
            await socket.until("session.done")

    async def again_and_again(self, kind: str) -> None:
        while True:
            await self._ask(kind, getattr(self, kind))


KINDS = ("chat", "structured", "speech", "transcription", "session", "live_speech")


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


async def run(job: dict[str, Any]) -> Notes:
    victim = Victim(job["port"], job["key"])
    notes = victim.notes
    await asyncio.sleep(max(0.0, job["begin"] - time.monotonic()))
    notes.began = time.monotonic()
    if job["role"] == "probe":
        work = [victim.probe()]
    else:
        work = [
            *(victim.listen(i) for i in range(LISTENERS)),
            *(victim.again_and_again(kind) for kind in KINDS),
        ]
    tasks = [asyncio.ensure_future(w) for w in work]
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait((over, *tasks), return_when=asyncio.FIRST_COMPLETED)
    for what in list(notes.open.values()):
        notes.waited(*what)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return notes


def main() -> None:
    job = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    job["begin"] = float(sys.stdin.readline())
    notes = asyncio.run(run(job))
    told = {name: getattr(notes, name) for name in ("live", "gaps", "first", "asked")}
    print(json.dumps({**told, "seconds": notes.now()}), flush=True)


if __name__ == "__main__":
    main()

"""One process that attacks: says that it is prepared, begins when it is told to, and prints what it
was answered.

Started by `attacks.py`, which gives it a job as one JSON line on stdin and then a line with the
moment to begin. It is the client of an API key of its own. Everything it sends is made before it
begins: an attacker stands for another machine, so that making a request must cost this one nothing
while others are measured. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.slow.harness.sockets import FAILURES, Closed, Http, Refused, Socket, connect

RETRY_S = 0.5


@dataclass(slots=True)
class Attacker:
    """What an attack sends with, and what came of it."""

    port: int
    key: str
    index: int = 0  # among the processes of this attack
    answers: list[tuple[str, float]] = field(
        default_factory=list
    )  # the status or what went wrong; seconds
    messages: dict[str, str] = field(default_factory=dict)  # by status: the first one's words
    began: float = 0.0

    async def begin(self) -> None:
        """All is made. Wait for the moment at which everybody begins."""
        print("ready", flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(max(0.0, float(line) - time.monotonic()))
        self.began = time.monotonic()

    def note(self, status: str | int, since: float, words: str = "") -> None:
        self.answers.append((str(status), time.monotonic() - since))
        self.messages.setdefault(str(status), words[:300])

    @asynccontextmanager
    async def noted(self, patience: float, since: float | None = None) -> AsyncIterator[None]:
        """What fails, or takes longer than `patience`, is an answer too."""
        since = time.monotonic() if since is None else since
        try:
            async with asyncio.timeout(patience):
                yield
        except TimeoutError:
            self.note("none", since)
        except Refused as e:
            self.note(e.status, since, str(e))
        except Closed as e:
            self.note(f"closed {e.code}", since, str(e))
        except FAILURES as e:
            self.note(type(e).__name__, since, str(e))

    async def post(
        self,
        path: str,
        *body: bytes,
        patience: float = 60.0,
        content_type: str = "application/json",
        http: Http | None = None,
    ) -> None:
        """A request, and its answer; the client leaves when its patience is over. Without `http`: a
        connection of its own."""
        since = time.monotonic()
        mine = http or Http(self.port, self.key)
        try:
            async with self.noted(patience):
                answer = await mine.request("POST", path, *body, content_type=content_type)
                self.note(answer.status, since, answer.body[:300].decode(errors="replace"))
        finally:
            if http is None or self.answers[-1][0] in ("none", *(e.__name__ for e in FAILURES)):
                mine.close()

    async def chat(self, body: bytes, patience: float = 60.0) -> None:
        await self.post("/v1/chat/completions", body, patience=patience)

    @asynccontextmanager
    async def session(
        self, path: str = "/v1/realtime", insist: float = 0.0
    ) -> AsyncIterator[Socket | None]:
        """A WebSocket; None if it is refused, though tried again until `insist` seconds after the
        beginning. Each refusal is noted."""
        socket: Socket | None = None
        while True:
            since = time.monotonic()
            async with self.noted(60):
                socket = await connect(self.port, path, self.key)
                self.note(101, since)
            if socket is not None or time.monotonic() - self.began > insist:
                break
            await asyncio.sleep(RETRY_S)
        try:
            yield socket
        finally:
            if socket is not None:
                socket.close()

    async def reading(self, socket: Socket) -> None:
        """Take whatever comes until it ends, and note how."""
        since = time.monotonic()
        try:
            while True:
                event = await socket.receive()
                if isinstance(event, dict) and event.get("type") == "error":
                    self.note("error event", since, json.dumps(event))
        except Closed as e:
            self.note(f"closed {e.code}", since, str(e))
        except FAILURES as e:
            self.note(type(e).__name__, since)


Attack = Callable[[Attacker], Awaitable[None]]


def main() -> None:
    from tests.slow.hostile.cases import CASES  # it needs `Attacker`
    from tests.slow.hostile.flooders import step_back

    job: dict[str, Any] = json.loads(sys.stdin.readline())
    attacker = Attacker(job["port"], job["key"], job["index"])
    if job["idle"]:
        step_back()
    spent = time.process_time()

    async def attack() -> None:
        async with asyncio.timeout(job["limit"]):
            await CASES[job["attack"]].attack(attacker)

    error = None
    try:
        asyncio.run(attack())
    except TimeoutError:
        error = f"the attack was not over after {job['limit']:g} s"
    seconds = time.monotonic() - attacker.began if attacker.began else 0.0
    told = {k: v for k, v in asdict(attacker).items() if k in ("answers", "messages")}
    print(
        json.dumps(
            {**told, "error": error, "seconds": seconds, "cpu_s": time.process_time() - spent}
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()

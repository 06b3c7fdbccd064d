"""One process of listeners: asks a server questions over HTTP and notes when each piece of each
answer came.

Started by the programs `serve` and `hostile`, several at once, so that reading many streams
disturbs neither the server nor each other. A job comes as one JSON line on stdin; `ready` is
printed; a second line holds the moment to begin (CLOCK_MONOTONIC, which all processes of a machine
share); the samples go to the job's file. Sockets are read bare: a client library would cost more
than what is measured. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from stretto.loadtest.runner import Sample
from stretto.loadtest.sse import EventSplitter, RequestFailed, read_event


class Job(msgspec.Struct, forbid_unknown_fields=True):
    port: int
    bodies: str  # a file: one request a line
    out: str  # where the samples go
    streams: int  # listeners of this process
    warmup: int = 0  # requests that are not counted, the first ones
    seconds: float = 60.0  # no request begins after so long
    timeout: float = 60.0  # of one request
    spread: float = 0.0  # the listeners come one by one over so many seconds
    # when each request is sent, by seconds from the beginning; then `streams` is moot
    arrivals: list[float] | None = None
    # reads no further ahead than so many seconds of sound, as a player would
    lead: float | None = None


class Heard(msgspec.Struct):
    """A sample, what the server said of itself, and whether it counts."""

    sample: Sample
    counts: bool
    report: Any = None


async def ask(job: Job, body: bytes, number: int, start: float) -> Heard:
    sent = time.monotonic()
    heard = Heard(Sample(number, sent - start), number >= job.warmup)
    sample = heard.sample
    try:
        async with asyncio.timeout(job.timeout):
            await listen(job, body, sent, heard)
        if not sample.packets:
            raise RequestFailed("no audio", "the answer had no speech")
    except TimeoutError:
        sample.error, sample.message = "timeout", f"no end after {job.timeout:g} s"
    except RequestFailed as e:
        sample.error, sample.message = e.reason, str(e)
    except (OSError, asyncio.IncompleteReadError, ValueError) as e:
        sample.error, sample.message = "broken", f"{type(e).__name__}: {e}"
    sample.end = time.monotonic() - sent
    return heard


async def listen(job: Job, body: bytes, sent: float, heard: Heard) -> None:
    limit = 1 << 18 if job.lead is None else 1 << 16
    reader, writer = await asyncio.open_connection("127.0.0.1", job.port, limit=limit)
    if job.lead is not None:  # else the socket would take in much of an answer that nobody has read
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)
    try:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{job.port}\r\nContent-Type: "
            f"application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        if status != 200:
            raise RequestFailed(f"http {status}", (await reader.read(400)).decode(errors="replace"))
        splitter = EventSplitter()
        while size := int(await reader.readline(), 16):
            part = await reader.readexactly(size + 2)
            at = time.monotonic() - sent
            for data in splitter.feed(part[:-2]):
                take(heard, at, data)
            if job.lead is not None and heard.sample.packets:
                ahead = heard.sample.packets[0].at + heard.sample.audio_seconds - at
                await asyncio.sleep(max(0.0, ahead - job.lead))
    finally:
        writer.close()


def take(heard: Heard, at: float, data: bytes) -> None:
    if data == b"[DONE]":
        return
    for piece in read_event(data):
        heard.sample.take(at, piece)
    if b'"stretto":' in data:
        heard.report = json.loads(data).get("stretto")


async def run(job: Job, bodies: list[bytes], start: float) -> list[Heard]:
    """A closed loop: each listener sends its next request when it has its answer, until none is
    left or time is up. Or, with `arrivals`, an open one: each request at its own time."""
    todo, found = iter(enumerate(bodies)), []

    async def passer_by(number: int, at: float) -> None:
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        found.append(await ask(job, bodies[number], number, start))

    if job.arrivals is not None:
        await asyncio.gather(
            *(passer_by(i, at) for i, at in zip(range(len(bodies)), job.arrivals, strict=True))
        )
        return found

    async def listener(place: int) -> None:
        await asyncio.sleep(max(0.0, start + job.spread * place / job.streams - time.monotonic()))
        for number, body in todo:
            if time.monotonic() - start > job.seconds:
                return
            found.append(await ask(job, body, number, start))

    await asyncio.gather(*(listener(i) for i in range(job.streams)))
    return found


def main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    bodies = Path(job.bodies).read_bytes().splitlines()
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    found = asyncio.run(run(job, bodies, start))
    Path(job.out).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()

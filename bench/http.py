"""What the HTTP server adds to a packet: from the engine to the socket, and to a client that reads
it.

    python -m bench http --out bench/results/server.json

A synthetic engine emits ready-made PCM packets at the pace of real speech (80 ms each). It notes
when it hands each one out and when it is asked for the next, which is when the bytes were given to
the socket: `on_socket`. The server runs as usual, in a process of its own; clients in this process
read raw sockets and note when a packet's last byte is there: `at_client`, which adds the kernel and
the reader being woken. The clock is the same (CLOCK_MONOTONIC). Next to them stands how late the
engine's own timer was, which is none of the server's doing but tells how busy the machine is, and
the CPU time of the server's process, which a busy machine does not change much."""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing as mp
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.harness.env import describe
from bench.harness.results import arguments, parser, write
from stretto.config.server import ServerConfig
from stretto.engine.events import AudioChunk, Event, Finished, Progress, TextDelta, Usage
from stretto.family import ModelInfo
from stretto.server.run import Server

SAMPLES = 1920  # a frame: 80 ms
QUESTION = [{"role": "user", "content": "go"}]
BODIES = {
    "chat": ("/v1/chat/completions", {"messages": QUESTION, "modalities": ["text", "audio"],
    "stream": True}),
    "speech": ("/v1/audio/speech", {"input": "go", "response_format": "pcm"}),
}  # fmt: skip


class PacedEngine:
    """Hands out packets at fixed times; packet i of a stream begins with the samples (stream,
    i)."""

    def __init__(self, packets: int, pace: float) -> None:
        self.packets, self.pace = packets, pace
        self.left: dict[tuple[int, int], float] = {}
        self.written: dict[tuple[int, int], float] = {}
        self.late: list[float] = []
        self.streams = 0
        self.began = 0.0
        self.ended = 0.0

    def cpu(self) -> float:
        """Seconds of this process from the first packet to the last."""
        return self.ended - self.began

    info = ModelInfo("paced", ("ethan",), "ethan", 24_000, 32768)
    progress = Progress("ready")

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def drain(self, timeout: float) -> None: ...

    async def close(self) -> None: ...

    def generate(self, messages: Any, **given: Any) -> AsyncIterator[Event]:
        return self._events()

    def speak(self, text: str, **given: Any) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        stream, self.streams = self.streams, self.streams + 1
        loop = asyncio.get_running_loop()
        # Streams of different phase, as requests that came at different moments have.
        due = loop.time() + 0.05 + self.pace * (stream * 0.618034 % 1.0)
        noise = np.random.default_rng(stream).integers(-8000, 8000, SAMPLES)
        yield TextDelta((0,), "go")
        for i in range(self.packets):
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.late.append(loop.time() - due)
            due += self.pace
            noise[:2] = stream, i
            chunk = AudioChunk(i * SAMPLES, (noise / 32767.0).astype(np.float32))
            self.began = self.began or time.process_time()
            self.left[stream, i] = time.monotonic()
            yield chunk
            self.written[stream, i] = time.monotonic()
            self.ended = time.process_time()
        yield Finished("stop", "stop", Usage(1, 1, self.packets, self.packets * SAMPLES), 0)


def serve(pipe: Connection, packets: int, pace: float) -> None:
    """The server's process: says its port, and in the end when each packet left."""
    engine = PacedEngine(packets, pace)

    async def open_engine() -> PacedEngine:
        return engine

    async def main() -> None:
        server = Server.bind(ServerConfig(port=0, max_concurrent=1024), open_engine)
        pipe.send(server.config.port)
        asyncio.get_running_loop().add_reader(pipe.fileno(), server.stop)
        await server.serve()

    asyncio.run(main())
    pipe.recv()
    pipe.send((engine.left, engine.written, engine.late, engine.cpu()))


async def read_stream(port: int, kind: str, arrived: dict[tuple[int, int], float]) -> None:
    path, body = BODIES[kind]
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await reader.readuntil(b"\r\n\r\n")
    while size := int(await reader.readline(), 16):
        part = await reader.readexactly(size + 2)
        now = time.monotonic()
        pcm = pcm_of(part[:-2], kind)
        if pcm:
            stream, i = np.frombuffer(pcm[:4], "<i2").tolist()
            arrived[stream, i] = now
    writer.close()


def pcm_of(part: bytes, kind: str) -> bytes:
    if kind == "speech":
        return part
    at = part.find(b'"data":"')
    return base64.b64decode(part[at + 8 : at + 16]) if at >= 0 else b""


def measure(kind: str, streams: int, packets: int, pace: float) -> dict[str, Any]:
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(there, packets, pace))
    process.start()
    port = here.recv()
    arrived: dict[tuple[int, int], float] = {}

    async def main() -> None:
        await asyncio.gather(*(read_stream(port, kind, arrived) for _ in range(streams)))

    asyncio.run(main())
    here.send("stop")
    left, written, late, cpu = here.recv()
    process.join()
    assert set(arrived) == set(left), "a packet was lost"
    on_socket = [1e6 * (written[k] - left[k]) for k in sorted(left)]
    at_client = [1e6 * (arrived[k] - left[k]) for k in sorted(left)]
    return {
        "kind": kind,
        "streams": streams,
        "packets": len(left),
        "on_socket_us": spread(on_socket),
        "at_client_us": spread(at_client),
        "cpu_us_per_packet": round(1e6 * cpu / len(left), 1),
        "engine_timer_late_us": spread([1e6 * x for x in late]),
        "on_socket_samples_us": [round(m, 1) for m in on_socket],
        "at_client_samples_us": [round(m, 1) for m in at_client],
    }


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return {name: round(value, 1) for name, value in found.items()}


def main(given: Sequence[str]) -> int:
    p = parser("http", __doc__)
    p.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    p.add_argument("--seconds", type=float, default=12.0, help="of speech per stream")
    p.add_argument("--pace", type=float, default=0.08, help="seconds between packets of a stream")
    args = p.parse_args(given)
    packets = max(2, int(args.seconds / args.pace))
    result: dict[str, Any] = {"env": describe(), "arguments": arguments(args), "runs": []}
    for kind in BODIES:
        for streams in args.streams:
            result["runs"].append(r := measure(kind, streams, packets, args.pace))
            socket, client, timer = r["on_socket_us"], r["at_client_us"], r["engine_timer_late_us"]
            print(
                f"{kind:<7}{streams:>3} streams, us: on socket p50 {socket['p50']:.0f} p99 "
                f"{socket['p99']:.0f}"
                f"; at the client p50 {client['p50']:.0f} p99 {client['p99']:.0f}; CPU "
                f"{r['cpu_us_per_packet']:.0f}"
                f"; the timer was late by p50 {timer['p50']:.0f} p99 {timer['p99']:.0f}",
                flush=True,
            )
            write(args.out, result)
    return 0

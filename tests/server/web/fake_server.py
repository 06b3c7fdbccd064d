"""A scripted server for the page: serves the real files under the real policy and streams answers
of true PCM.

The script is set by the test through `Script`; requests are kept for it to look at. Runs uvicorn on
a free loopback port, in a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

import stretto.server
from tests.server.web import fake_realtime
from tests.server.web.fake_realtime import FakeRealtime

READY = {"status": "ready", "stages": {"thinker": "ready", "talker": "ready", "code2wav": "ready"}}
WEB = Path(stretto.server.__file__).parent / "web"
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src 'self' "
    "blob:; "
    "worker-src 'self'; img-src 'self' data:"
)
RATE = 24000
ANSWER = (
    "In a fugue, the stretto is the moment when the voices stop waiting for one another. "
    "Each takes up the subject before the last has laid it down, and the music tightens without "
    "growing faster. "
    "This answer was made in the same way: while these words were still being chosen, they were "
    "already being spoken."
)


@dataclass
class Script:
    """What the server does next. Packets are sizes in frames of 80 ms; the first frame gives 1365
    samples."""

    health: dict[str, Any] = field(default_factory=lambda: dict(READY))
    text: str = ANSWER
    packets: tuple[int, ...] = (1, 2, 4, 4)
    pace: float = 0.0  # seconds between events of the stream
    refuse: tuple[int, dict[str, str], str] | None = None  # status, headers, message
    refusals: int = 1  # how often, before it answers
    refuse_from: int = 1  # the first request that is refused
    answers: int | None = None  # so many requests are answered, later ones wait for ever
    silent: bool = False  # text alone, whatever is asked for
    break_after: int | None = None  # events, then an error event
    cut_after: int | None = None  # events, then the connection ends
    endless: bool = False  # goes on until the client leaves
    hold: tuple[
        str, ...
    ] = ()  # where it waits for `go_on`: "words 0" and "packet 0" (before them), ..., "end"
    key: str | None = None
    timeline: bool = True
    spans: list[dict[str, Any]] | None = None  # of the timeline; else those of three stages
    card: dict[str, Any] = field(default_factory=dict)  # what /v1/models says besides


def spoken(start: int, samples: int) -> bytes:
    """A calm chord that swells and fades: something a person can check by ear, continuous from
    packet to packet."""
    t = (start + np.arange(samples)) / RATE
    chord = sum(np.sin(2 * math.pi * f * t) for f in (220.0, 277.2, 329.6)) / 3
    wave = 0.3 * (0.6 + 0.4 * np.sin(2 * math.pi * 0.7 * t)) * chord
    return (wave * 32767).round().astype("<i2").tobytes()


def spans(num_words: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """A timeline as the engine would tell it: stages that overlap."""
    rows = [("thinker", "prefill", 0.004, 0.018), ("talker", "prefill", 0.010, 0.021)]
    step = 0.0021
    rows += [
        ("thinker", "decode", 0.018 + i * step, 0.018 + i * step + 0.0016) for i in range(num_words)
    ]
    at, frame = 0.0235, 0
    for n, size in enumerate(sizes):
        rows.append(("thinker>talker", f"chunk {n}", at - 0.002, at - 0.0012))
        for _ in range(size):
            rows.append(("talker", f"frame {frame}", at, at + 0.0017))
            at, frame = at + 0.002, frame + 1
        rows.append(("talker>code2wav", f"chunk {n}", at, at + 0.0006))
        rows.append(("code2wav", f"packet {n}", at + 0.0007, at + 0.0021))
        rows.append(("packets", f"packet {n}", at + 0.0021, at + 0.0023))
    return [
        {"lane": lane, "name": name, "start": start, "stop": stop}
        for lane, name, start, stop in rows
    ]


@dataclass
class FakeServer(AbstractContextManager["FakeServer"]):
    script: Script = field(default_factory=Script)
    requests: list[dict[str, Any]] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)  # a request was added
    left: threading.Event = field(
        default_factory=threading.Event
    )  # a client went away in the middle of an answer
    realtime: FakeRealtime = field(default_factory=FakeRealtime)
    made: dict[str, dict[str, Any]] = field(default_factory=dict)  # voices of clips
    url: str = ""
    loop: asyncio.AbstractEventLoop | None = None  # the server's own, once a question has come
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None

    def reset(self) -> None:
        self.script, self.requests, self.made, self.left = Script(), [], {}, threading.Event()
        self.gate = asyncio.Semaphore(0)
        self.realtime = FakeRealtime()

    def wait_for_requests(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.requests) >= count, 120), (
                f"only {len(self.requests)} came"
            )

    def go_on(self) -> None:
        """Let an answer pass the next place where the script holds it. May be said before it is
        there."""
        assert self.loop is not None, "nothing was asked yet"
        self.loop.call_soon_threadsafe(self.gate.release)

    async def at(self, place: str) -> None:
        if place in self.script.hold:
            await self.gate.acquire()

    # --- routes

    async def health(self, _: Request) -> Response:
        body = self.script.health
        return JSONResponse(body, status_code=200 if body["status"] == "ready" else 503)

    def unauthorized(self, request: Request) -> Response | None:
        key = self.script.key
        if key is None or request.headers.get("authorization") == f"Bearer {key}":
            return None
        return refusal(401, {}, "Incorrect API key provided.", "authentication_error")

    async def models(self, request: Request) -> Response:
        if (refused := self.unauthorized(request)) is not None:
            return refused
        card = {
            "id": "tiny", "object": "model", "voices": ["chelsie", "ethan", "aiden"],
            "default_voice": "ethan",
            "sample_rate": RATE, "input_modalities": ["text", "audio", "image", "video"],
            "output_modalities": ["text", "audio"], "max_body_bytes": 1 << 20,
            "random_weights": False,
            "stages": {"code2wav": "vocoder: makes the sound"}, **self.script.card,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        if (refused := self.unauthorized(request)) is not None:
            return refused
        body = await request.json()
        self.loop = asyncio.get_running_loop()
        with self.came:
            self.requests.append(body)
            self.came.notify_all()
        script = self.script
        if (
            script.refuse is not None
            and script.refusals > 0
            and len(self.requests) >= script.refuse_from
        ):
            script.refusals -= 1
            return refusal(*script.refuse)
        if script.silent:
            body["modalities"] = ["text"]
        if script.answers is not None and len(self.requests) > script.answers:
            await asyncio.Event().wait()
        return StreamingResponse(self.watch(self.answer(body)), media_type="text/event-stream")

    async def speech(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if self.script.refuse is not None:
            return refusal(*self.script.refuse)

        async def events() -> AsyncIterator[bytes]:
            start = 0
            for n, size in enumerate(self.script.packets):
                samples = size * 1920 - (555 if n == 0 else 0)
                yield sse(
                    {
                        "type": "speech.audio.delta",
                        "audio": base64.b64encode(spoken(start, samples)).decode(),
                    }
                )
                start += samples
            yield sse(
                {
                    "type": "speech.audio.done",
                    "usage": {"stretto": {"timeline": spans(0, self.script.packets)}},
                }
            )

        return StreamingResponse(events(), media_type="text/event-stream")

    async def voices(self, request: Request) -> Response:
        """What was made of clips is kept in `requests`."""
        if request.method == "POST":
            self.requests.append(body := await request.json())
            if self.script.refuse is not None:
                return refusal(*self.script.refuse)
            self.made[body["name"]] = {
                "object": "voice",
                "name": body["name"],
                "created": 1,
                "has_text": False,
            }
        elif request.method == "DELETE":
            del self.made[request.path_params["name"]]
        return JSONResponse({"object": "list", "data": list(self.made.values())})

    def turn(self) -> list[dict[str, Any]]:
        """A turn and its answer, with what the server would measure."""
        measured = [
            ("thinker", "encode", 0.0, 0.03), ("thinker", "prompt", 0.03, 0.05),
            ("talker", "prompt", 0.04, 0.07), ("code2wav", "first frame", 0.07, 0.08),
        ]  # fmt: skip
        timeline = [{"lane": a, "name": b, "start": c, "stop": d} for a, b, c, d in measured]
        return [
            fake_realtime.started(),
            fake_realtime.stopped(),
            *fake_realtime.answer(self.script.text),
            fake_realtime.sound(base64.b64encode(spoken(0, 24000)).decode()),
            fake_realtime.done(vad_wait_s=0.5, speech_to_audio_s=0.6, timeline=timeline),
        ]

    async def talk(self, socket: WebSocket) -> None:
        await self.realtime.serve(socket)

    async def watch(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        script, done = self.script, False
        try:
            n = 0
            async for event in events:
                if script.break_after == n:
                    yield sse(
                        {
                            "error": {
                                "message": "the talker stage died",
                                "type": "server_error",
                                "code": None,
                            }
                        }
                    )
                    break
                if script.cut_after == n:
                    raise ConnectionResetError("as the script says")
                yield sse(event)
                n += 1
                await asyncio.sleep(script.pace)
            else:
                yield b"data: [DONE]\n\n"
            done = True
        finally:
            if not done:
                self.left.set()

    async def answer(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        script, aloud = self.script, "audio" in body["modalities"]
        words = script.text.split(" ")
        words = [w + " " for w in words[:-1]] + words[-1:]
        yield chunk({"role": "assistant", "content": ""} if not aloud else {"role": "assistant"})
        if aloud:
            yield chunk({"audio": {"id": "audio_1"}})
        sizes, start, said = script.packets, 0, 0
        for n, size in enumerate(sizes):
            share = len(words) * (n + 1) // len(sizes)
            await self.at(f"words {n}")
            for word in words[said:share]:
                yield chunk({"audio": {"transcript": word}} if aloud else {"content": word})
            said = share
            await self.at(f"packet {n}")
            if aloud:
                samples = size * 1920 - (555 if n == 0 else 0)
                yield chunk({"audio": {"data": base64.b64encode(spoken(start, samples)).decode()}})
                start += samples
        while script.endless:
            yield chunk(
                {"audio": {"data": base64.b64encode(spoken(start, 1920)).decode()}}
                if aloud
                else {"content": "la "}
            )
            start += 1920
            await asyncio.sleep(0.02)
        await self.at("end")
        if aloud:
            yield chunk({"audio": {"expires_at": 2_000_000_000}})
        last = chunk({}, "stop")
        if script.timeline and body.get("timeline"):
            last["stretto"] = {"seed": 0, "timeline": script.spans or spans(len(words), sizes)}
        yield last
        details = {"text_tokens": len(words), "audio_tokens": sum(sizes)}
        yield {
            "choices": [],
            "usage": {"completion_tokens": 99, "completion_tokens_details": details},
        }

    # --- life

    def __enter__(self) -> FakeServer:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/audio/speech", self.speech, methods=["POST"]),
            Route("/v1/audio/voices", self.voices, methods=["GET", "POST"]),
            Route("/v1/audio/voices/{name}", self.voices, methods=["DELETE"]),
            WebSocketRoute("/v1/realtime", self.talk),
            Mount("/", StaticFiles(directory=WEB, html=True)),
        ]
        app = Starlette(routes=routes, middleware=[Middleware(Policy)])
        # Port 0: the system picks one. `lifespan` off and no signal handlers, since this is not the
        # main thread. It never closes a connection that the browser keeps: one that it closed in
        # the moment of a new question would look like a server that went away.
        config = uvicorn.Config(
            app,
            port=0,
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=3600,
        )
        self.server = uvicorn.Server(config)
        listening = config.bind_socket()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [listening]}, daemon=True
        )
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self.server is not None
        assert self.thread is not None
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


class Policy:
    """Adds the content security policy to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", POLICY.encode()),
                ]
            await send(message)

        await self.app(scope, receive, with_policy)


def refusal(
    status: int, headers: dict[str, str], message: str, kind: str = "rate_limit_error"
) -> Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers=headers)


def sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "model": "tiny",
        "choices": [choice],
    }

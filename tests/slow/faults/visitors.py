"""Clients of every kind, for a soak of a running server: they ask, wait for the right status, and
leave at any moment.

Used by the part `server` and by the small soak of the test suite. A visitor counts how each visit
ended; what was not the client's own doing is a failure. Imports no torch."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tests.server.realtime.sounds import b64, pcm, silence, speech
from tests.slow.harness.sockets import (
    FAILURES,
    TEXT,
    Answer,
    Closed,
    Http,
    Refused,
    Socket,
    connect,
    frame,
    websocket,
)
from tests.slow.hostile import bodies

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
LIVE, REALTIME = "/v1/audio/speech/stream", "/v1/realtime"
TRANSCRIPTIONS, VOICES = "/v1/audio/transcriptions", "/v1/audio/voices"
PATIENCE_S = 120.0  # only what hangs takes this long
SOON_S = 0.05  # within which a client that does not wait leaves
SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "min_audio_frames": 3,
    "max_audio_frames": 3,
}
STREAMED: dict[str, Any] = {"stream": True, "audio": {"format": "pcm16"}}
LONG: dict[str, Any] = {
    "max_tokens": 60,
    "ignore_eos": True,
    "min_audio_frames": 60,
    "max_audio_frames": 60,
}
SHAPE = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "look up", "parameters": SHAPE},
}


class Wrong(Exception):
    """An answer other than the one that such a request gets."""


# ---- what is sent


@cache
def clip(seconds: float = 0.5) -> str:
    return base64.b64encode(bodies.wav(seconds)).decode()


@cache
def picture() -> str:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (96, 64), (90, 120, 30)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@cache
def video() -> str:
    """Half a second of a grey square."""
    import av
    import numpy as np

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(4):
            shown = av.VideoFrame.from_ndarray(
                np.full((64, 64, 3), 40 * i, np.uint8), format="rgb24"
            )
            shown.pts = i
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return base64.b64encode(out.getvalue()).decode()


@cache
def voice() -> bytes:
    """Sound that the detector takes for speech, and the pause that ends it, at 24 kHz."""
    return pcm(speech(0.8), silence(0.2))


# ---- visits


@dataclass(slots=True)
class Visitor:
    """One after the other, on connections of its own."""

    port: int
    key: str
    rng: random.Random
    ended: Counter[str] = field(default_factory=Counter)  # by kind and outcome
    failures: list[str] = field(default_factory=list)

    async def visit(self, kind: str) -> None:
        """What it answers is counted; anything but that is a failure."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await KINDS[kind](self)
        except TimeoutError:
            outcome = self._failed(kind, "no answer")
        except (Wrong, Refused, Closed, *FAILURES) as e:
            outcome = self._failed(kind, f"{type(e).__name__}: {e}")
        self.ended[f"{kind}: {outcome}"] += 1

    def _failed(self, kind: str, why: str) -> str:
        self.failures.append(f"{kind}: {why[:300]}")
        return "failed"

    # -- whole requests

    async def ask(
        self,
        path: str,
        body: Any,
        want: int = 200,
        kind: str = "application/json",
        key: str | None = None,
    ) -> Answer:
        async with Http(self.port, self.key if key is None else key) as http:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await http.request("POST", path, data, content_type=kind)
        if answer.status != want:
            raise Wrong(
                f"{answer.status} instead of {want}: {answer.body[:200].decode(errors='replace')}"
            )
        return answer

    async def talk(self, content: Any, **more: Any) -> str:
        answer = await self.ask(CHAT, question(content, **more))
        if more.get("stream"):
            if b"data: [DONE]" not in answer.body or b'"error":' in answer.body:
                raise Wrong(
                    f"a stream that ended early: {answer.body[-200:].decode(errors='replace')}"
                )
        elif len(answer.json["choices"]) != more.get("n", 1):
            raise Wrong(f"{len(answer.json['choices'])} choices")
        return "200"


def question(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **more}


Visit = Callable[[Visitor], Awaitable[str]]
KINDS: dict[str, Visit] = {}
SESSIONS: list[str] = []  # those that are WebSockets
LEAVING: list[str] = []  # those whose client goes before the end


def kind(visit: Visit) -> Visit:
    KINDS[getattr(visit, "__name__", "")] = visit
    return visit


def session(visit: Visit) -> Visit:
    SESSIONS.append(getattr(visit, "__name__", ""))
    return kind(visit)


@kind
async def text(v: Visitor) -> str:
    return await v.talk(f"Question {v.rng.random()}")


@kind
async def streamed(v: Visitor) -> str:
    return await v.talk("Hello", stream=True, stream_options={"include_usage": True})


@kind
async def spoken(v: Visitor) -> str:
    return await v.talk(
        "Say it", **SPOKEN, audio={"format": v.rng.choice(["wav", "mp3", "flac", "opus"])}
    )


@kind
async def streamed_spoken(v: Visitor) -> str:
    return await v.talk("Say it", **SPOKEN, **STREAMED)


@kind
async def several(v: Visitor) -> str:
    return await v.talk("Twice", n=2, seed=v.rng.randrange(1000))


@kind
async def structured(v: Visitor) -> str:
    shape = {**SHAPE, "title": str(v.rng.random())}
    await v.talk(
        "As JSON",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": shape}},
    )
    return "200"


@kind
async def tools(v: Visitor) -> str:
    return await v.talk("Look", tools=[TOOL], tool_choice=v.rng.choice(["required", "auto"]))


@kind
async def recalled(v: Visitor) -> str:
    """A spoken answer is named in the next question."""
    answer = await v.ask(CHAT, question("Say it", **SPOKEN))
    first = answer.json["choices"][0]["message"]["audio"]["id"]
    messages = [*question("Say it")["messages"], {"role": "assistant", "audio": {"id": first}}]
    await v.ask(CHAT, {"messages": [*messages, *question("Again")["messages"]], "max_tokens": 4})
    return "200"


@kind
async def sound_in(v: Visitor) -> str:
    return await v.talk([bodies.sound(clip()), {"type": "text", "text": "What was that?"}])


@kind
async def picture_in(v: Visitor) -> str:
    return await v.talk(
        [bodies.picture(picture(), "png"), {"type": "text", "text": "What is that?"}]
    )


@kind
async def video_in(v: Visitor) -> str:
    return await v.talk(
        [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{video()}"}}]
    )


@kind
async def large_sound(v: Visitor) -> str:
    """So long that the request is taken apart in another process."""
    return await v.talk([bodies.sound(clip(14.0))], max_tokens=2)


@kind
async def read_aloud(v: Visitor) -> str:
    form = v.rng.choice(["pcm", "wav", "mp3", "opus", "flac"])
    await v.ask(SPEECH, {"input": "Good day", "response_format": form, "max_audio_frames": 4})
    return "200"


@kind
async def read_as_events(v: Visitor) -> str:
    body = {
        "input": "Good day",
        "stream_format": "sse",
        "response_format": "pcm",
        "max_audio_frames": 4,
    }
    answer = await v.ask(SPEECH, body)
    if b"speech.audio.done" not in answer.body:
        raise Wrong("a stream that ended early")
    return "200"


@kind
async def transcription(v: Visitor) -> str:
    fields = [("max_tokens", "4"), ("stream", v.rng.choice(["true", "false"]))]
    await v.ask(TRANSCRIPTIONS, bodies.form(bodies.wav(0.5), fields), kind=bodies.FORM)
    return "200"


@kind
async def voices(v: Visitor) -> str:
    """The list, and a clip for a model that has only its own."""
    async with Http(v.port, v.key) as http:
        if (answer := await http.request("GET", VOICES)).status != 200:
            raise Wrong(str(answer.status))
    await v.ask(VOICES, {"name": "granny", "audio": clip()}, want=400)
    return "200, 400"


@kind
async def looks(v: Visitor) -> str:
    """What costs nothing, on one connection."""
    async with Http(v.port, v.key) as http:
        for path in ("/live", "/health", "/v1/models", "/version", "/"):
            if (answer := await http.request("GET", path)).status != 200:
                raise Wrong(f"{path}: {answer.status}")
    return "200"


@kind
async def refused(v: Visitor) -> str:
    """What cannot work."""
    fine = question("Hello")
    choices: list[tuple[str, Any, int, str | None]] = [
        (CHAT, b"{", 400, None),
        (CHAT, {**fine, "temperature": 9}, 400, None),
        (CHAT, {**fine, "no_such_field": 1}, 400, None),
        (CHAT, question("word " * 9_000), 400, None),
        (CHAT, question([bodies.sound("!!!")]), 400, None),
        (CHAT, question([bodies.picture("AAAA", "png")]), 400, None),
        (CHAT, {**fine, "model": "another"}, 404, None),
        (CHAT, fine, 401, "wrong"),
        (SPEECH, {"input": ""}, 400, None),
        ("/v1/nothing", fine, 404, None),
        (CHAT, {**fine, "response_format": {"type": "json_schema",
        "json_schema": {"schema": {"type": "x"}}}}, 400,
         None),
    ]  # fmt: skip
    path, body, want, key = v.rng.choice(choices)
    await v.ask(path, body, want=want, key=key)
    return str(want)


# ---- clients that leave


def leaving(name: str) -> Callable[[Visit], Visit]:
    def add(visit: Visit) -> Visit:
        LEAVING.append(name)
        KINDS[name] = visit
        return visit

    return add


def requests(v: Visitor) -> tuple[str, bytes, str]:
    """One that may be left: path, body, content type."""
    json_, stream = "application/json", {**SPOKEN, **STREAMED, **LONG}
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**SHAPE, "title": str(v.rng.random())}},
    }
    return v.rng.choice([
        (CHAT, _json(question("Hello", **LONG)), json_),
        (CHAT, _json(question("Hello", **stream)), json_),
        (CHAT, _json(question("Hello", n=2, **LONG)), json_),
        (CHAT, _json(question("As JSON", response_format=shape)), json_),
        (CHAT, _json(question([bodies.sound(clip())], **stream)), json_),
        (CHAT, _json(question([bodies.picture(picture(), "png")], **LONG)), json_),
        (CHAT, _json(question([bodies.sound(clip(14.0))], **LONG)), json_),
        (SPEECH, _json({"input": "Good day to you all", "response_format": "pcm"}), json_),
        (TRANSCRIPTIONS, bodies.form(bodies.wav(2.0), [("max_tokens", "40")]), bodies.FORM),
    ])  # fmt: skip


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@leaving("leaves: connected")
async def connected(v: Visitor) -> str:
    async with Http(v.port, v.key) as http:
        await http.open()
    return "left"


@leaving("leaves: headers")
async def in_headers(v: Visitor) -> str:
    path, body, content_type = requests(v)
    async with Http(v.port, v.key) as http:
        _, writer = await http.open()
        head = http.head("POST", path, len(body), content_type)
        writer.write(head[: v.rng.randrange(1, len(head))])
        await writer.drain()
    return "left"


@leaving("leaves: body")
async def in_body(v: Visitor) -> str:
    path, body, content_type = requests(v)
    async with Http(v.port, v.key) as http:
        await http.send("POST", path, [body[: v.rng.randrange(len(body))]], content_type, len(body))
        await asyncio.sleep(v.rng.uniform(0, SOON_S))
    return "left"


@leaving("leaves: sent")
async def when_sent(v: Visitor) -> str:
    path, body, content_type = requests(v)
    async with Http(v.port, v.key) as http:
        await http.send("POST", path, [body], content_type)
    return "left"


@leaving("leaves: later")
async def later(v: Visitor) -> str:
    path, body, content_type = requests(v)
    async with Http(v.port, v.key) as http:
        await http.send("POST", path, [body], content_type)
        await asyncio.sleep(v.rng.uniform(0, 4 * SOON_S))
    return "left"


@leaving("leaves: answer")
async def in_answer(v: Visitor) -> str:
    """After some pieces of a stream."""
    content = v.rng.choice(["Hello", [bodies.sound(clip())]])
    async with Http(v.port, v.key, limit=1 << 16) as http:
        await http.send(
            "POST",
            CHAT,
            [_json(question(content, **{**SPOKEN, **STREAMED, **LONG}))],
            "application/json",
        )
        answer = await http.begin()
        if answer.status != 200:
            raise Wrong(str(answer.status))
        left = v.rng.randrange(1, 8)
        async for _ in http.pieces(answer):
            left -= 1
            if not left:
                break
    return "left"


# ---- WebSockets


ANSWER = ("response.done", "error")


def item(text: str) -> bytes:
    return bodies.item({"type": "input_text", "text": text})


async def opened(v: Visitor, **more: Any) -> Socket:
    """A realtime session that is set up."""
    socket = await connect(v.port, REALTIME, v.key)
    try:
        await socket.until("session.created")
        fields = {"type": "realtime", "max_output_tokens": 6, "max_audio_frames": 4, **more}
        await socket.send({"type": "session.update", "session": fields})
        await socket.until("session.updated")
    except BaseException:
        socket.close()
        raise
    return socket


async def responded(socket: Socket, *want: str) -> str:
    done = await socket.until("response.done")
    status: str = done["response"]["status"]
    if status not in want:
        raise Wrong(
            f"a response was {status}: {json.dumps(done['response'].get('status_details'))}"
        )
    return status


@session
async def written(v: Visitor) -> str:
    """Two turns in writing."""
    socket = await opened(v, output_modalities=["text"])
    try:
        for i in range(2):
            await socket.send(item(f"Turn {i}"))
            await socket.send({"type": "response.create"})
            await responded(socket, "completed", "incomplete")
    finally:
        socket.close()
    return "answered"


@session
async def said(v: Visitor) -> str:
    """Sound that the client ends, answered aloud."""
    socket = await opened(v, audio={"input": {"turn_detection": None}})
    try:
        await socket.send({"type": "input_audio_buffer.append", "audio": b64(voice())})
        await socket.send({"type": "input_audio_buffer.commit"})
        await socket.send({"type": "response.create"})
        await responded(socket, "completed", "incomplete")
    finally:
        socket.close()
    return "answered"


@session
async def cancelled(v: Visitor) -> str:
    """An answer is stopped by the client, and another one is made."""
    socket = await opened(v, max_output_tokens=200, max_audio_frames=400)
    try:
        await socket.send(item("Tell me everything"))
        await socket.send({"type": "response.create"})
        await socket.until("response.output_audio.delta", "response.done")
        await socket.send({"type": "response.cancel"})
        done = await socket.until(*ANSWER)
        await socket.send(item("And now?"))
        await socket.send(
            {"type": "response.create", "response": {"max_output_tokens": 4, "max_audio_frames": 4}}
        )
        await responded(socket, "completed", "incomplete", "cancelled")
    finally:
        socket.close()
    return str(done.get("response", done).get("status", "over already"))


@session
async def interrupted(v: Visitor) -> str:
    """Speech stops an answer, and is answered when it ends."""
    socket = await opened(v, max_output_tokens=200, max_audio_frames=400)
    try:
        await socket.send(item("Tell me everything"))
        await socket.send({"type": "response.create"})
        await socket.until("response.output_audio.delta")
        await socket.send({"type": "input_audio_buffer.append", "audio": b64(voice())})
        await socket.until("input_audio_buffer.speech_started")
        status = await responded(socket, "cancelled", "completed", "incomplete")
        await socket.send({"type": "input_audio_buffer.append", "audio": b64(pcm(silence(1.0)))})
        await socket.until("response.created")
    finally:
        socket.close()
    return status


@session
async def read_live(v: Visitor) -> str:
    """Speech while the text is written."""
    async with websocket(v.port, LIVE, v.key) as socket:
        await socket.send(
            {"type": "session.config", "response_format": "pcm", "max_audio_frames": 6}
        )
        for word in ("Good ", "day ", "to ", "you"):
            await socket.send({"type": "input.text", "text": word})
        await socket.send({"type": "input.done"})
        await socket.until("session.done")
    return "answered"


@session
async def left_live(v: Visitor) -> str:
    """The same, and the client goes at any moment."""
    stop = v.rng.randrange(5)
    async with websocket(v.port, LIVE, v.key) as socket:
        if stop > 0:
            await socket.send(
                {"type": "session.config", "response_format": "pcm", "max_audio_frames": 60}
            )
        if stop > 1:
            await socket.send({"type": "input.text", "text": "Good day to you all, and "})
        if stop > 2:
            await socket.send({"type": "input.done"})
        if stop > 3:
            await socket.until("audio.start")
            await socket.receive()
    return "left"


@session
async def left_session(v: Visitor) -> str:
    """A session whose client goes at any moment."""
    stop = v.rng.randrange(6)
    socket = await connect(v.port, REALTIME, v.key)
    try:
        if stop > 0:
            await socket.until("session.created")
        if stop == 1:
            await socket.send({"type": "input_audio_buffer.append", "audio": b64(voice())})
        if stop == 2:
            socket.writer.write(frame(TEXT, 100_000, last=False) + bytes(50_000))
        if stop > 2:
            await socket.send(item("Tell me everything"))
            await socket.send({"type": "response.create"})
        if stop > 3:
            await socket.until("response.created")
        if stop > 4:
            await socket.until("response.output_audio.delta", "response.done")
    finally:
        socket.close()
    return "left"


async def visits(
    make: Callable[[int], Visitor], kinds: Iterable[str], at_once: int
) -> list[Visitor]:
    """All of them, so many at once; gives those who came."""
    todo, came = iter(kinds), [make(i) for i in range(at_once)]

    async def keep_on(visitor: Visitor) -> None:
        for name in todo:
            await visitor.visit(name)

    await asyncio.gather(*(keep_on(v) for v in came))
    return came

"""The attacks by name. Each is bounded in number and time, and says in its docstring what it is.

An attack prepares what it sends, waits for the common beginning (`begin`), and notes every
answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.slow.harness.sockets import TEXT, Http, Socket, frame, write
from tests.slow.hostile import bodies
from tests.slow.hostile.attacker import Attack, Attacker
from tests.slow.hostile.bodies import MIB

JUST_BELOW = (512 << 10) - 64  # bytes of a body that ba39894 took apart on its event loop
KIB = 1 << 10
TEXT_PART = 120_000  # characters
HOLD_S = 15.0  # how long attackers hold what they have


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    about: str
    attack: Attack
    watch_s: float  # how long the others are watched at least
    limit_s: float  # the attack is over by then
    processes: int
    flags: tuple[str, ...]  # of the server
    unread_log: bool


CASES: dict[str, Case] = {}


def case(
    watch: float = 8.0,
    limit: float = 90.0,
    processes: int = 1,
    flags: tuple[str, ...] = (),
    unread_log: bool = False,
) -> Callable[[Attack], Attack]:
    def add(attack: Attack) -> Attack:
        name = getattr(attack, "__name__", "")
        CASES[name] = Case(
            name, attack.__doc__ or "", attack, watch, limit, processes, flags, unread_log
        )
        return attack

    return add


async def at_once(count: int, one: Callable[[int], object]) -> None:
    await asyncio.gather(*(one(i) for i in range(count)))  # type: ignore[call-overload]


# ---- descriptors


@case(limit=180)
async def descriptors(a: Attacker) -> None:
    """2,100 short requests, eight at once."""
    body, numbers = bodies.chat(max_tokens=1), iter(range(2100))
    await a.begin()

    async def client(_: int) -> None:
        async with Http(a.port, a.key) as http:
            for _ in numbers:
                await a.post("/v1/chat/completions", body, patience=30, http=http)

    await at_once(8, client)


# ---- grammars


@case(watch=20)
async def multiple_of_9999991(a: Attacker) -> None:
    """A schema of forty bytes that takes more than a minute to compile; its client leaves after a
    second."""
    body = bodies.multiple_of(9_999_991)
    await a.begin()
    await a.chat(body, patience=1.0)


@case(watch=12)
async def multiple_of_999983(a: Attacker) -> None:
    """A schema that takes 17 s to compile; its client waits."""
    body = bodies.multiple_of(999_983)
    await a.begin()
    await a.chat(body)


@case(limit=120)
async def bounded_integers(a: Attacker) -> None:
    """Eight schemas of 1,000 bounded integers at once."""
    made = [bodies.bounded_integers(1000, i) for i in range(8)]
    await a.begin()
    await at_once(8, lambda i: a.chat(made[i], patience=100))


@case(limit=120)
async def many_properties(a: Attacker) -> None:
    """16 schemas of 3,500 properties at once."""
    made = [bodies.properties(3500, i) for i in range(16)]
    await a.begin()
    await at_once(16, lambda i: a.chat(made[i], patience=100))


# ---- what is held


@case(watch=20)
async def stalled_uploads(a: Attacker) -> None:
    """Eight uploads of 64 MiB that stop one byte short, and smaller ones into what room they leave,
    until not even 16 KiB are taken. They wait for the server to end them."""
    data = b"[" + b" " * (64 * MIB - 2)
    await a.begin()

    async def upload(size: int, sent: asyncio.Event) -> None:
        since = time.monotonic()
        async with Http(a.port, a.key) as http, a.noted(75):
            await http.send(
                "POST", "/v1/chat/completions", [data[:size]], "application/json", size + 1
            )
            sent.set()
            a.note((await http.begin()).status, since)

    async def fill() -> None:
        """As long as one of this size is held, send another; then one of half the size."""
        size, held = 32 * MIB, set()
        while size >= 16 << 10 and len(held) < 100:
            sent = asyncio.Event()
            held.add(one := asyncio.ensure_future(upload(size, sent)))
            there = asyncio.ensure_future(sent.wait())
            await asyncio.wait((one, there), return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            await asyncio.wait((one,), timeout=0.3)
            size = size // 2 if one.done() else size
        await asyncio.gather(*held)

    await asyncio.gather(*(upload(len(data), asyncio.Event()) for _ in range(8)), fill())


@case(watch=40)
async def dribbling_speech(a: Attacker) -> None:
    """64 streams of live speech that send two words, and then a letter every ten seconds, for
    forty."""
    await a.begin()

    async def dribble(socket: Socket) -> None:
        await socket.send({"type": "session.config", "response_format": "pcm"})
        await socket.send({"type": "input.text", "text": "Hello there "})
        while time.monotonic() - a.began < 40:
            await asyncio.sleep(10)
            await socket.send({"type": "input.text", "text": "a "})

    async def stream(_: int) -> None:
        async with a.session("/v1/audio/speech/stream", insist=20) as socket:
            if socket is not None:
                work = [asyncio.ensure_future(w) for w in (dribble(socket), a.reading(socket))]
                await asyncio.wait(work, timeout=42, return_when=asyncio.FIRST_COMPLETED)
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)

    await at_once(64, stream)


@case(watch=HOLD_S)
async def idle_sessions(a: Attacker) -> None:
    """64 realtime sessions that do nothing for a quarter of a minute."""
    await a.begin()

    async def idle(_: int) -> None:
        async with a.session(insist=HOLD_S) as socket:
            await asyncio.sleep(
                max(0.0, HOLD_S - (time.monotonic() - a.began)) if socket is not None else 0.0
            )

    await at_once(64, idle)


@case(watch=HOLD_S)
async def unfinished_messages(a: Attacker) -> None:
    """64 realtime sessions that send 20 MiB of one message, each without its end, and hold it."""
    part = b" " * MIB
    await a.begin()

    async def session(_: int) -> None:
        async with a.session(insist=HOLD_S) as socket:
            if socket is None:
                return
            async with a.noted(40):
                for i in range(20):
                    socket.writer.write(frame(TEXT if not i else 0, len(part), last=False))
                    await write(socket.writer, part)
                await asyncio.sleep(max(0.0, HOLD_S - (time.monotonic() - a.began)))
                a.note("held", a.began)

    await at_once(64, session)


@case(unread_log=True, limit=60)
async def unread_log(a: Attacker) -> None:
    """The server's stderr is a pipe that nobody reads; 1,500 requests, eight at once, of which each
    is a line."""
    numbers = iter(range(1500))
    body = bodies.chat(max_tokens=1)
    await a.begin()

    async def client(_: int) -> None:
        async with Http(a.port, a.key) as http:
            for _ in numbers:
                await a.post("/v1/chat/completions", body, patience=10, http=http)
                if a.answers[-1][0] == "none":
                    return

    await at_once(8, client)


# ---- the event loop


async def storm(
    a: Attacker,
    count: int,
    body: bytes,
    path: str = "/v1/chat/completions",
    kind: str = "application/json",
) -> None:
    await a.begin()
    await at_once(count, lambda _: a.post(path, body, content_type=kind))


@case()
async def template_kwargs(a: Attacker) -> None:
    """24 requests with chat_template_kwargs of just below 512 KiB."""
    await storm(a, 24, bodies.template_kwargs(JUST_BELOW))


@case()
async def large_schemas(a: Attacker) -> None:
    """24 requests with a schema of just below 512 KiB."""
    await storm(a, 24, bodies.large_schema(JUST_BELOW))


@case()
async def required_calls(a: Attacker) -> None:
    """24 requests with tools of just below 512 KiB, of which one must be called."""
    await storm(a, 24, bodies.required_call(JUST_BELOW))


@case()
async def kwargs_below_limit(a: Attacker) -> None:
    """24 requests with chat_template_kwargs of just below 16 KiB, which are decoded on the loop."""
    await storm(a, 24, bodies.template_kwargs(16 * KIB))


@case()
async def schemas_below_limit(a: Attacker) -> None:
    """24 requests with a schema of just below 128 KiB."""
    await storm(a, 24, bodies.large_schema(128 * KIB))


@case()
async def properties_below_limit(a: Attacker) -> None:
    """16 schemas of 500 properties at once: nearly as many as a grammar may have."""
    made = [bodies.properties(500, i) for i in range(16)]
    await a.begin()
    await at_once(16, lambda i: a.chat(made[i]))


@case()
async def calls_below_limit(a: Attacker) -> None:
    """24 requests with tools of just below 128 KiB, of which one must be called."""
    await storm(a, 24, bodies.required_call(128 * KIB))


@case()
async def logit_bias(a: Attacker) -> None:
    """Four requests with 13 MiB of logit_bias."""
    await storm(a, 4, bodies.logit_bias(13 * MIB))


@case()
async def voice_clips(a: Attacker) -> None:
    """Eight voices with clips of nearly 12 MiB in JSON."""
    body = b'{"name":"v","audio":"' + b"A" * (12 * MIB - 64) + b'"}'
    await storm(a, 8, body, "/v1/audio/voices")


@case()
async def large_forms(a: Attacker) -> None:
    """Four transcriptions with forms of 63 MiB."""
    body = bodies.form(bytes(63 * MIB), [("response_format", "json")])
    await storm(a, 4, body, "/v1/audio/transcriptions", bodies.FORM)


@case()
async def session_updates(a: Attacker) -> None:
    """Eight realtime sessions that send 740 KiB of tools ten times."""
    await update_sessions(a, 740 * KIB)


@case()
async def updates_below_limit(a: Attacker) -> None:
    """The same with 200 KiB, which the server stores."""
    await update_sessions(a, 200 * KIB)


async def update_sessions(a: Attacker, size: int) -> None:
    body = bodies.session_tools(size)
    await a.begin()

    async def session(_: int) -> None:
        async with a.session() as socket:
            if socket is None:
                return
            for _ in range(10):
                since = time.monotonic()
                async with a.noted(30):
                    await socket.send(body)
                    event = await socket.until("session.updated", "error")
                    a.note(str(event["type"]), since, str(event.get("error", "")))

    await at_once(8, session)


@case(limit=120)
async def long_conversations(a: Attacker) -> None:
    """Four realtime sessions with conversations of 960,000 characters, of which each is asked for
    an answer twice."""
    items = [
        bodies.item({"type": "input_text", "text": bodies.letters(TEXT_PART, i)}) for i in range(8)
    ]
    respond = b'{"type":"response.create","response":{"output_modalities":["text"],"max_output_tokens":4}}'  # noqa: E501
    await a.begin()

    async def session(_: int) -> None:
        async with a.session() as socket:
            if socket is None:
                return
            for body in items:
                since = time.monotonic()
                async with a.noted(30):
                    await socket.send(body)
                    event = await socket.until(
                        "conversation.item.added", "conversation.item.created", "error"
                    )
                    a.note(str(event["type"]), since, str(event.get("error", "")))
            for _ in range(2):
                since = time.monotonic()
                async with a.noted(60):
                    await socket.send(respond)
                    event = await socket.until("response.done", "error")
                    status = event.get("response", {}).get("status", "")
                    a.note(f"{event['type']} {status}".strip(), since, str(event.get("error", "")))

    await at_once(4, session)


@case()
async def many_sounds(a: Attacker) -> None:
    """240 sounds in one event of 18 MiB, in four realtime sessions, three times."""
    await add_sounds(a, 240)


@case()
async def sounds_below_limit(a: Attacker) -> None:
    """The same with 60 sounds, which the server stores."""
    await add_sounds(a, 60)


async def add_sounds(a: Attacker, count: int) -> None:
    sounds = [{"type": "input_audio", "audio": bodies.pcm(1.2)}] * count
    body = bodies.item(*sounds)
    await a.begin()

    async def session(_: int) -> None:
        async with a.session() as socket:
            if socket is None:
                return
            for _ in range(3):
                since = time.monotonic()
                async with a.noted(60):
                    await socket.send(body)
                    event = await socket.until(
                        "conversation.item.added", "conversation.item.created", "error"
                    )
                    a.note(str(event["type"]), since, str(event.get("error", "")))

    await at_once(4, session)


@case(processes=2)
async def metrics_readers(a: Attacker) -> None:
    """16 readers of /metrics for six seconds, as fast as they are answered."""
    await a.begin()

    async def reader(_: int) -> None:
        async with Http(a.port, a.key) as http:
            while time.monotonic() - a.began < 6:
                since = time.monotonic()
                async with a.noted(20):
                    answer = await http.request("GET", "/metrics")
                    a.note(answer.status, since)

    await at_once(8, reader)


# ---- work


@case(limit=150)
async def progressive_jpegs(a: Attacker) -> None:
    """Four pictures of 64 million pixels in 3,000 scans without content."""
    body = bodies.chat([bodies.picture(bodies.progressive_jpeg(8000, 3000))])
    await a.begin()
    await at_once(4, lambda _: a.chat(body, patience=120))


@case(limit=150)
async def jpegs_below_limit(a: Attacker) -> None:
    """The same with 240 scans, of which a picture may have 256."""
    body = bodies.chat([bodies.picture(bodies.progressive_jpeg(8000, 240))])
    await a.begin()
    await at_once(4, lambda _: a.chat(body, patience=120))


@case()
async def many_answers(a: Attacker) -> None:
    """32 requests for eight answers of 64 tokens each."""
    body = bodies.chat(n=8, max_tokens=64, ignore_eos=True)
    await storm(a, 32, body)

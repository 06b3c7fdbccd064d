"""A WebSocket connection below its messages: frames of any size, in any number, and nobody else
waits for them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from stretto.server.http import flow_throttle as floods
from stretto.server.http import websocket
from stretto.server.http.flow_throttle import TurnQueue
from stretto.server.http.websocket import (
    MANY_FRAMES,
    MAX_FRAGMENTS,
    MAX_UNREAD_BYTES,
    SLICE_BYTES,
    SMALL_BYTES,
    TINY_BYTES,
    Socket,
)
from stretto.server.loop_time import HEAVY
from stretto.server.shares import Shares
from tests.server.http.frames import CONTINUED, PING, TEXT, frame
from tests.server.http.wires import Wire, settle

HELLO = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "
    b"websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice in each turn of the loop, however fast the machine, and no time in between."""
    monkeypatch.setattr(websocket, "TURN_S", 0.0)
    monkeypatch.setattr(floods, "REST_S", 0.0)


class Talk:
    """A client's connection to an app that takes messages, while `takes` is set."""

    def __init__(self, large_reads: TurnQueue | None = None) -> None:
        self.got: list[bytes] = []
        self.takes, self.ended = asyncio.Event(), asyncio.Event()
        self.takes.set()
        self.turns = 0  # of the loop that it needs for a message
        config = uvicorn.Config(self.app, interface="asgi3", log_config=None, ws_ping_interval=None)
        self.line = Wire()
        self.floods, self.memory = TurnQueue(floods.REST_S), Shares(64 << 20)
        large_reads = large_reads or TurnQueue()
        self.line.protocol = self.socket = Socket(
            self.floods,
            large_reads,
            self.memory,
            config=config,
            server_state=ServerState(),
            app_state={},
        )
        self.socket.connection_made(self.line)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                self.got.append(message["bytes"])
            await self.takes.wait()
            for _ in range(self.turns):
                await asyncio.sleep(0)
        self.ended.set()

    async def open(self) -> None:
        self.socket.data_received(HELLO)
        await settle()
        assert self.line.sent.startswith(b"HTTP/1.1 101 ")
        self.line.sent = b""

    async def say(self, data: bytes) -> None:
        """As a transport does: nothing is brought while reading is paused."""
        while self.line.paused:
            await asyncio.sleep(0)
        self.socket.data_received(data)


def run(test: Callable[[Talk], Awaitable[None]]) -> None:
    async def main() -> None:
        talk = Talk()
        await talk.open()
        await test(talk)
        talk.line.abort()
        await talk.ended.wait()

    asyncio.run(main())


@pytest.mark.parametrize("piece", [1000, SMALL_BYTES, 1 << 20])
def test_large_frames_come_whole_with_what_follows(piece: int) -> None:
    async def test(talk: Talk) -> None:
        sizes = (SMALL_BYTES, SMALL_BYTES + 1, 3, 300_000, 300_000, 0)
        messages = [random.Random(size).randbytes(size) for size in sizes]
        data = b"".join(frame(TEXT, message) for message in messages)
        for at in range(0, len(data), piece):
            await talk.say(data[at : at + piece])
        while len(talk.got) < len(messages):
            await asyncio.sleep(0)
        assert talk.got == messages

    run(test)


def test_a_connection_that_ends_within_a_large_frame() -> None:
    async def test(talk: Talk) -> None:
        await talk.say(frame(TEXT, bytes(300_000))[:200_000])
        talk.socket.eof_received()

    run(test)


def test_what_a_connection_held_is_freed_in_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "FREE_BYTES", 1000)

    async def test(talk: Talk) -> None:
        await talk.say(frame(TEXT, bytes(1000), False))
        for _ in range(29):
            await talk.say(frame(CONTINUED, bytes(1000), False))
        while talk.socket.large_reads.waiting:
            await asyncio.sleep(0)
        talk.line.abort()
        await talk.ended.wait()
        passes = 0
        while talk.socket.large_reads.waiting:
            passes += 1
            await asyncio.sleep(0)
        assert passes >= 20
        assert talk.memory.held == 0

    run(test)


@pytest.mark.parametrize("seed", range(5))
def test_messages_come_whole_and_in_order_however_they_are_cut(seed: int) -> None:
    async def test(talk: Talk) -> None:
        rng = random.Random(seed)
        messages = [rng.randbytes(rng.choice((0, 1, 5, 200, 60_000))) for _ in range(120)]
        data = b""
        for message in messages:
            at = rng.randrange(len(message) + 1)
            data += (
                frame(TEXT, message[:at], False) + frame(PING, b"") + frame(CONTINUED, message[at:])
            )
        while data:
            size = rng.choice((1, 100, SLICE_BYTES, 100_000))
            await talk.say(data[:size])
            data = data[size:]
        while len(talk.got) < len(messages):
            await asyncio.sleep(0)
        await settle()
        assert talk.got == messages
        assert not talk.line.paused

    run(test)


def test_tiny_frames_leave_others_their_turn() -> None:
    async def test(talk: Talk) -> None:
        ping, many = frame(PING, b""), 40_000
        await talk.say(ping * many)
        answered = [0]
        while answered[-1] < many:
            answered.append(talk.line.sent.count(b"\x8a\x00"))
            assert talk.line.paused or answered[-1] == many
            await asyncio.sleep(0)  # one turn of the loop
        assert max(b - a for a, b in itertools.pairwise(answered)) <= SLICE_BYTES // len(ping) + 1
        assert not talk.line.paused

    run(test)


class Turns:
    """A loop of which one wants to know what it is asked to call later."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.asked.append((seconds, lambda: call(*args)))

    def go_on(self) -> None:
        [(seconds, call)] = self.asked
        assert seconds == 7.0
        self.asked.clear()
        call()


def test_floods_share_one_turn() -> None:
    """However many there are: a rest, one turn, a rest."""
    loop, line, done = Turns(), TurnQueue(7.0), []

    def flood(name: str, turns: int) -> None:
        done.append(name)
        if turns > 1:
            line.wait(loop, lambda: flood(name, turns - 1))  # type: ignore[arg-type]

    for name, turns in (("a", 3), ("b", 1), ("c", 2)):
        line.wait(loop, lambda name=name, turns=turns: flood(name, turns))  # type: ignore[arg-type, misc]
    for count in range(6):
        assert len(done) == count
        loop.go_on()
    assert "".join(done) == "abcaca"
    assert not loop.asked
    line.wait(loop, lambda: flood("d", 1))  # type: ignore[arg-type]
    loop.go_on()
    assert done[-1] == "d"


@pytest.mark.parametrize("count", [MANY_FRAMES, 40_000])
def test_a_flood_waits_for_its_turn(count: int) -> None:
    """Also one that brings its frames in small reads. The app goes on reading meanwhile: that does
    not end the wait."""

    async def test(talk: Talk) -> None:
        turns: list[Callable[[], None]] = []
        talk.floods.wait = lambda loop, turn: turns.append(turn)  # type: ignore[method-assign]
        tiny = frame(TEXT, b"")
        await talk.say(tiny * count)
        await settle()
        heard, waits = 0, 0
        while turns:
            await settle()
            assert talk.line.paused
            assert heard < len(talk.got) <= heard + SLICE_BYTES // len(tiny) + 1
            heard, waits = len(talk.got), waits + 1
            turns.pop()()
        await settle()
        assert len(talk.got) == count
        assert waits >= count / (SLICE_BYTES // len(tiny) + 1)
        assert not talk.line.paused

    run(test)


def test_large_reads_of_many_connections_share_one_turn() -> None:
    """In each pass of the loop one of them has a turn; what is small does not wait for that."""

    async def main() -> None:
        line = TurnQueue()
        talks = [Talk(line) for _ in range(8)]
        for talk in talks:
            await talk.open()
        part = frame(TEXT, b"x" * 60_000, False)
        assert len(part) > HEAVY
        for talk in talks:
            talk.socket.data_received(part)

        def left() -> int:
            return sum(len(talk.socket.unparsed) for talk in talks)

        lefts = [left()]
        while lefts[-1]:
            assert all(talk.line.paused for talk in talks if talk.socket.unparsed)
            await asyncio.sleep(0)  # one pass of the loop
            lefts.append(left())
        assert lefts[0] == 8 * len(part)
        assert max(a - b for a, b in itertools.pairwise(lefts)) <= SLICE_BYTES
        assert not any(talk.line.paused for talk in talks)
        talks[0].socket.data_received(part)
        talks[1].socket.data_received(frame(CONTINUED, b"y"))
        await settle()
        assert talks[1].got == [b"x" * 60_000 + b"y"]
        assert talks[0].socket.unparsed
        for talk in talks:
            talk.line.abort()
            await talk.ended.wait()

    asyncio.run(main())


def test_what_is_no_flood_does_not_wait() -> None:
    """Few frames, however small, and many that bring something."""

    async def test(talk: Talk) -> None:
        talk.floods.wait = None  # type: ignore[assignment, method-assign]
        await talk.say(frame(TEXT, b"") * (MANY_FRAMES - 1))
        await talk.say(frame(TEXT, b"x" * TINY_BYTES) * 1000)
        while len(talk.got) < MANY_FRAMES - 1 + 1000:
            await asyncio.sleep(0)

    run(test)


def test_nothing_more_is_read_while_there_is_a_rest() -> None:
    """Though the app, which has stood still for a while, takes messages meanwhile, and uvicorn then
    reads on."""

    async def test(talk: Talk) -> None:
        talk.takes.clear()
        talk.turns = 1
        many = 100
        await talk.say(frame(TEXT, b"x" * 5000) * many)
        await settle()
        talk.takes.set()
        while talk.socket.unparsed:
            assert talk.line.paused
            await asyncio.sleep(0)
        while len(talk.got) < many:
            await asyncio.sleep(0)
        await settle()
        assert not talk.line.paused

    run(test)


def test_nothing_is_read_before_the_app_has_taken_what_there_is() -> None:
    async def test(talk: Talk) -> None:
        talk.takes.clear()
        await talk.say(frame(TEXT, b"x") * 5000)
        while talk.socket.unparsed:
            await asyncio.sleep(0)
        await settle()
        assert talk.line.paused
        talk.takes.set()
        await settle()
        assert not talk.line.paused

    run(test)


@pytest.mark.parametrize("size", [0, 2])
def test_fragments_of_a_message_are_bounded(size: int) -> None:
    async def test(talk: Talk) -> None:
        data = b"x" * size
        await talk.say(
            frame(TEXT, data, False) + frame(CONTINUED, data, False) * (MAX_FRAGMENTS - 2)
        )
        await talk.say(frame(CONTINUED, data))
        while not talk.got:
            await asyncio.sleep(0)
        assert talk.got == [data * MAX_FRAGMENTS]
        assert not talk.line.closing
        await talk.say(
            frame(TEXT, data, False) + frame(CONTINUED, data, False) * (MAX_FRAGMENTS + 500)
        )
        while not talk.line.closing:
            await asyncio.sleep(0)
        assert b"too many fragments" in talk.line.sent
        await settle()
        assert len(talk.socket.frames) <= MAX_FRAGMENTS

    run(test)


def test_who_takes_no_answers_to_its_pings_is_cut() -> None:
    async def test(talk: Talk) -> None:
        talk.line.stuck = True
        ping = frame(PING, b"x" * 125)
        for _ in range(MAX_UNREAD_BYTES // 127 // 500 + 2):
            if not talk.line.lost:
                await talk.say(ping * 500)
        while not talk.line.lost:
            await asyncio.sleep(0)
        assert talk.line.left <= MAX_UNREAD_BYTES + SLICE_BYTES

    run(test)

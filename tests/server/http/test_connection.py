"""What a connection may hold: bytes and time of headers, requests sent ahead, and how many there
may be.

Times are those of a clock that the tests turn by hand; real sockets show that a server is wired to
all this."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from stretto.config.server import ServerConfig
from stretto.errors import StrettoError
from stretto.server.http.connection import (
    AHEAD_BYTES,
    MAX_AHEAD,
    MAX_PIECES,
    SLICE_BYTES,
    TURN_PIECES,
    Connection,
    ConnectionLimits,
)
from stretto.server.http.flow_throttle import REST_S
from stretto.server.run import AT_ONCE, FEWEST_FILES, OTHER_FILES, raise_file_limit, resource
from tests.server.asks import ALOUD, ASK, CHAT
from tests.server.certificates import certificate_settings, needs_openssl
from tests.server.conftest import HEAD, PATIENCE_S, Running, read_until, serve
from tests.server.held import HeldServer
from tests.server.http.wires import Wire, settle
from tests.server.scripted_engine import ScriptedEngine

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Timer:
    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due, self.call, self.cancelled = due, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The loop as a connection sees it: real tasks, time that passes when it is told to."""

    def __init__(self) -> None:
        self.now, self.timers = 0.0, list[Timer]()

    def call_later(self, delay: float, call: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(self.now + delay, lambda: call(*args)))
        return self.timers[-1]

    def create_task(self, work: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := sorted(
            (t for t in self.timers if not t.cancelled and t.due <= until), key=lambda t: t.due
        ):
            self.now = due[0].due
            self.timers.remove(due[0])
            due[0].call()
        self.now = until


class House:
    """A server without sockets: `connect` brings a client, `answer` lets requests held by the app
    go."""

    def __init__(self, **limits: Any) -> None:
        self.clock, self.state, self.refused = Clock(), ServerState(), Counter[str]()
        self.limits = ConnectionLimits.of(
            ServerConfig(**limits), lambda reason: self.refused.update([reason])
        )
        self.config = uvicorn.Config(
            self.app, interface="asgi3", log_config=None, timeout_keep_alive=30, date_header=False
        )
        self.seen = list[tuple[str, int]]()  # path and body's length
        self.left, self.hosts = list[str](), list[bytes]()
        self.gates: dict[str, asyncio.Event] = {}

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        path, size, more = scope["path"], 0, "early" not in scope["path"]
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
            size, more = size + len(message["body"]), message["more_body"]
        self.seen.append((path, size))
        self.hosts += [value for name, value in scope["headers"] if name == b"host"]
        if "hold" in path:
            gate = asyncio.ensure_future(self.gates.setdefault(path, asyncio.Event()).wait())
            gone = asyncio.ensure_future(receive())
            await asyncio.wait((gate, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.append(path)
                return
            gone.cancel()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self) -> Wire:
        wire = Wire()
        wire.protocol = Connection(self.limits, self.config, self.state, {}, self.clock)  # type: ignore[arg-type]
        wire.protocol.connection_made(wire)
        return wire

    async def put(self, wire: Wire, *parts: bytes) -> bytes:
        """Send, and what is answered."""
        before = len(wire.sent)
        for part in parts:
            if not wire.lost:
                wire.protocol.data_received(part)
            await settle()
            while wire.protocol.flow.parse_pending and not wire.lost:
                self.clock.advance(REST_S)
                await settle()
        return wire.sent[before:]

    async def answer(self, path: str) -> None:
        self.gates[path].set()
        await settle()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def get(path: str) -> bytes:
    return GET.replace(b"/", path.encode(), 1)


def head_of(size: int) -> bytes:
    """A request of exactly so many bytes."""
    return b"GET /sized HTTP/1.1\r\nHost: x\r\nX-Pad: " + b"p" * (size - 41) + b"\r\n\r\n"


# ---- bytes


@pytest.mark.parametrize("pieces", [1, 2, 3, 70])
def test_headers_are_bounded_however_they_are_cut(pieces: int) -> None:
    async def main() -> None:
        for size, status in ((1024, b"200"), (1025, b"431"), (200_000, b"431")):
            house = House(max_header_kb=1)
            data = head_of(size)
            assert len(data) == size
            step = -(-size // pieces)
            wire = house.connect()
            got = await house.put(wire, *(data[i : i + step] for i in range(0, size, step)))
            assert got.startswith(b"HTTP/1.1 " + status)
            assert wire.closing == (status == b"431")
            assert house.refused == ({"header_size": 1} if wire.closing else {})

    run(main)


def test_the_request_line_and_many_small_headers_count() -> None:
    async def main() -> None:
        long = b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        many = b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 400 + b"\r\n"
        for data in (long, many):
            house = House(max_header_kb=1)
            assert (await house.put(house.connect(), data)).startswith(b"HTTP/1.1 431")
            assert house.seen == []

    run(main)


def test_each_request_of_a_connection_has_its_own_bytes() -> None:
    async def main() -> None:
        house = House(max_header_kb=1)
        wire = house.connect()
        for _ in range(3):
            assert (await house.put(wire, head_of(1000)[:600], head_of(1000)[600:])).startswith(
                b"HTTP/1.1 200"
            )
        assert (await house.put(wire, head_of(1100)[:600], head_of(1100)[600:])).startswith(
            b"HTTP/1.1 431"
        )

    run(main)


@pytest.mark.parametrize("first", [60, 5_000, 100_060])
def test_a_body_does_not_count_as_headers(first: int) -> None:
    """Head and body in one piece, larger than any head may be: nothing is lost where it is cut."""

    async def main() -> None:
        house = House(max_header_kb=1)
        wire = house.connect()
        data = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"b" * 100_000
        for _ in range(2):
            assert (await house.put(wire, data[:first], data[first:])).startswith(b"HTTP/1.1 200")
        assert house.seen == [("/body", 100_000)] * 2

    run(main)


CHUNKED = b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("behind", [b"", b"0\r\nX: y\r\n\r\n"], ids=["chunks", "headers behind it"])
def test_pieces_of_a_body_are_bounded_in_one_read(behind: bytes) -> None:
    """Each is a call from the parser during which nobody else is served; in reads of their own they
    may be small."""

    async def main() -> None:
        house = House(max_header_kb=1)
        piece = b"X: y\r\n" if behind else b"1\r\nb\r\n"
        begin, end = (CHUNKED + b"0\r\n", b"\r\n") if behind else (CHUNKED, b"0\r\n\r\n")
        wire = house.connect()
        assert (await house.put(wire, begin, piece * MAX_PIECES, piece, end)).startswith(
            b"HTTP/1.1 200 "
        )
        assert not wire.closing
        assert house.seen == [("/body", 0 if behind else MAX_PIECES + 1)]
        got = await house.put(
            wire, begin, piece * (MAX_PIECES + 2)
        )  # a header is told when the next has begun
        assert got.startswith(b"HTTP/1.1 400 ")
        assert b"too many pieces" in got
        assert wire.lost
        assert house.refused == {"pieces": 1}
        await settle()
        assert house.left == ["/body"]

    run(main)


PIECE = b"1\r\nb\r\n"
MOST = TURN_PIECES + SLICE_BYTES // len(PIECE) + 1  # in one turn


def test_pieces_have_short_turns_and_share_them() -> None:
    async def main() -> None:
        house = House()
        wires = [house.connect() for _ in range(3)]
        for wire in wires:
            wire.protocol.data_received(CHUNKED + PIECE * MAX_PIECES)
        while any(w.protocol.flow.parse_pending for w in wires):
            before = [w.protocol.pieces for w in wires]
            assert max(before) <= MAX_PIECES
            await settle()  # the app takes them, and uvicorn would read on
            assert all(w.paused for w in wires if w.protocol.flow.parse_pending)
            house.clock.advance(REST_S)
            taken = [w.protocol.pieces - b for w, b in zip(wires, before, strict=True)]
            assert sorted(map(bool, taken)) == [False, False, True]  # one of them
            assert max(taken) <= MOST
        await settle()
        assert [w.protocol.pieces for w in wires] == [MAX_PIECES] * 3
        assert not any(w.paused for w in wires)
        for wire in wires:
            assert (await house.put(wire, b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert house.seen == [("/body", MAX_PIECES)] * 3

    run(main)


@pytest.mark.parametrize("size", [TURN_PIECES, TURN_PIECES + 200])
def test_pieces_in_small_reads_wait_too(size: int) -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        wire.protocol.data_received(CHUNKED)
        wire.protocol.data_received(PIECE * size)
        assert wire.paused
        house.clock.advance(REST_S)
        assert not wire.paused
        assert (await house.put(wire, b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert house.seen == [("/body", size)]

    run(main)


def test_nothing_of_a_client_that_left_is_parsed_in_its_turn() -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        wire.protocol.data_received(CHUNKED + PIECE * MAX_PIECES)
        await settle()
        taken = wire.protocol.pieces
        wire.abort()
        await settle()
        house.clock.advance(REST_S)
        assert wire.protocol.pieces == taken
        assert house.left == ["/body"]
        assert not house.limits.floods.waiting

    run(main)


def test_other_bodies_are_parsed_as_they_come() -> None:
    async def main() -> None:
        house = House()
        for head, body in (
            (b"POST /plain HTTP/1.1\r\nHost: x\r\nContent-Length: 250000\r\n\r\n", b"b" * 250_000),
            (CHUNKED, (b"fa0\r\n" + b"b" * 4000 + b"\r\n") * 60 + b"0\r\n\r\n"),
        ):
            wire = house.connect()
            wire.protocol.data_received(head + body)
            assert not house.limits.floods.waiting
            await settle()
        assert house.seen == [("/plain", 250_000), ("/body", 240_000)]

    run(main)


def test_headers_behind_a_body_are_not_the_requests_and_are_bounded() -> None:
    async def main() -> None:
        house = House(max_header_kb=1)
        wire = house.connect()
        assert (await house.put(wire, CHUNKED, b"3\r\nabc\r\n0\r\nHost: y\r\n\r\n")).startswith(
            b"HTTP/1.1 200 "
        )
        assert house.hosts == [b"x"]
        assert (await house.put(wire, CHUNKED + b"0\r\n", b"X: ", b"y" * 1000)) == b""
        assert (await house.put(wire, b"y" * 1000)).startswith(b"HTTP/1.1 431 ")
        assert wire.lost
        assert house.refused == {"header_size": 1}

    run(main)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100]
)
def test_garbage_gets_400(data: bytes) -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        got = await house.put(wire, data)
        assert got.startswith(b"HTTP/1.1 400 ")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed"
        assert wire.lost
        assert house.refused == {"malformed": 1}

    run(main)


def test_what_comes_after_the_end_is_not_read() -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        wire.stuck = True  # so that it is not gone at once
        await house.put(wire, b"\0")
        assert wire.closing
        assert await house.put(wire, GET) == b""
        assert house.refused == {"malformed": 1}

    run(main)


def test_garbage_is_not_answered_in_the_middle_of_an_answer() -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        await house.put(wire, get("/hold"))
        assert await house.put(wire, b"\0\0\0") == b""
        assert wire.lost
        await settle()
        assert house.left == ["/hold"]

    run(main)


# ---- time


def test_silence_ends() -> None:
    async def main() -> None:
        house = House(header_timeout=10)
        wire = house.connect()
        house.clock.advance(9.9)
        assert not wire.closing
        house.clock.advance(0.2)
        assert wire.lost
        assert wire.sent == b""  # nothing was asked
        assert house.refused == {"header_timeout": 1}

    run(main)


@pytest.mark.parametrize("drops", [GET, b"\r\n" * 30])
@pytest.mark.parametrize("later", [False, True])
def test_headers_by_drops(drops: bytes, later: bool) -> None:
    """Each byte comes in time, and they do not help: nor on a connection that has been of use
    before."""

    async def main() -> None:
        house = House(header_timeout=10)
        wire = house.connect()
        if later:
            await house.put(wire, GET)
            house.clock.advance(20)
            wire.sent = b""
        for byte in drops[:9]:
            await house.put(wire, bytes([byte]))
            assert not wire.closing
            house.clock.advance(1.0)
        house.clock.advance(1.1)
        assert wire.closing
        assert wire.sent.startswith(b"HTTP/1.1 408 ") == (drops == GET)
        assert house.refused == {"header_timeout": 1}

    run(main)


def test_headers_in_time_are_the_end_of_it() -> None:
    async def main() -> None:
        house = House(header_timeout=10)
        wire = house.connect()
        house.clock.advance(9)
        await house.put(wire, get("/hold")[:5])
        house.clock.advance(0.9)
        await house.put(wire, get("/hold")[5:])
        house.clock.advance(10_000)  # an answer may take as long as it likes
        assert not wire.closing
        await house.answer("/hold")
        assert wire.sent.endswith(b"ok")
        house.clock.advance(29)  # keep-alive
        assert not wire.closing
        house.clock.advance(2)
        assert wire.lost
        assert house.refused == {}

    run(main)


def test_a_request_begun_during_an_answer_must_end_after_it() -> None:
    async def main() -> None:
        house = House(header_timeout=10)
        wire = house.connect()
        await house.put(wire, get("/hold") + b"GET /next HT")
        house.clock.advance(100)
        assert not wire.closing
        await house.answer("/hold")
        house.clock.advance(9)
        assert not wire.closing
        house.clock.advance(2)
        assert wire.closing

    run(main)


def test_the_rest_of_an_answered_body() -> None:
    """An answer may come before all of the body: what is left must come soon, and then the
    connection is idle."""

    async def main() -> None:
        house = House(header_timeout=10)
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        patient, slow = house.connect(), house.connect()
        for wire in (patient, slow):
            assert (await house.put(wire, head)).endswith(b"ok")
            house.clock.advance(2)
        for _ in range(4):
            await house.put(slow, b"x")
            house.clock.advance(1)
        await house.put(patient, b"x" * 100)
        house.clock.advance(5)
        assert slow.lost
        house.clock.advance(20)
        assert not patient.closing
        house.clock.advance(6)
        assert patient.lost

    run(main)


def test_an_answer_that_is_not_taken() -> None:
    async def main() -> None:
        house = House(send_timeout=5)
        stuck, slow = house.connect(), house.connect()
        for wire in (stuck, slow):
            wire.stuck = True
            await house.put(wire, GET)
        for _ in range(4):
            house.clock.advance(4)
            slow.left -= 1
        assert stuck.lost
        assert not slow.lost
        house.clock.advance(10)
        assert slow.lost  # it took no more

    run(main)


# ---- number


def test_the_longest_idle_makes_room() -> None:
    async def main() -> None:
        house = House(max_connections=3)
        first, second, third = (house.connect() for _ in range(3))
        await house.put(first, GET)  # now the second has been idle longest
        await house.put(third, get("/hold"))
        fourth = house.connect()
        assert (first.lost, second.lost, third.lost) == (False, True, False)
        fifth = house.connect()
        assert first.lost
        assert not fourth.lost
        await house.put(fourth, get("/hold"))
        await house.put(fifth, get("/hold"))
        sixth = house.connect()
        assert sixth.sent.startswith(b"HTTP/1.1 503 ")
        assert sixth.lost
        assert not any(w.closing for w in (third, fourth, fifth))
        await settle()
        assert len(house.state.connections) == 3
        assert house.refused == {"evicted": 2, "full": 1}
        await house.answer("/hold")
        seventh = house.connect()
        assert third.lost
        assert (await house.put(seventh, GET)).endswith(b"ok")

    run(main)


def test_many_at_once_do_not_close_more_than_they_need() -> None:
    """Accepted in one turn of the loop, before any closed one is gone."""

    async def main() -> None:
        house = House(max_connections=4)
        old = [house.connect() for _ in range(4)]
        new = [house.connect() for _ in range(3)]
        assert [w.lost for w in old] == [True, True, True, False]
        assert not any(w.lost for w in new)
        assert len(house.state.connections) == 4

    run(main)


def test_one_that_cannot_close_makes_room() -> None:
    async def main() -> None:
        house = House(max_connections=1)
        wire = house.connect()
        wire.stuck = True
        await house.put(wire, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert wire.closing
        assert not wire.lost
        assert (await house.put(house.connect(), GET)).endswith(b"ok")
        assert wire.lost

    run(main)


def test_nothing_is_kept_of_a_connection_that_is_gone() -> None:
    async def main() -> None:
        house = House()
        wires = [house.connect() for _ in range(4)]
        await house.put(wires[1], GET)
        await house.put(wires[2], GET[:5])
        await house.put(wires[3], get("/hold"))
        for wire in wires:
            wire.protocol.connection_lost(ConnectionResetError())
        await settle()
        assert not house.limits.idle
        assert not house.state.connections
        assert not [t for t in house.clock.timers if not t.cancelled]

    run(main)


# ---- requests ahead of their answers


def test_requests_ahead_are_answered_in_turn() -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        await house.put(wire, get("/hold") + b"".join(get(f"/{i}") for i in range(MAX_AHEAD)))
        assert house.seen == [("/hold", 0)]
        await house.answer("/hold")
        assert house.seen == [("/hold", 0), *((f"/{i}", 0) for i in range(MAX_AHEAD))]
        assert wire.sent.count(b"ok") == 1 + MAX_AHEAD
        assert not wire.closing

    run(main)


def test_requests_ahead_are_bounded() -> None:
    async def main() -> None:
        house = House()
        wire = house.connect()
        await house.put(wire, get("/hold") + b"".join(get(f"/{i}") for i in range(MAX_AHEAD + 1)))
        assert wire.lost
        assert house.refused == {"ahead": 1}
        await settle()
        assert house.left == ["/hold"]
        assert house.seen == [("/hold", 0)]
        assert wire.sent == b""

    run(main)


def test_bodies_ahead_are_bounded() -> None:
    """Not by not reading on: then nobody would see the client leave."""

    async def main() -> None:
        for size in (AHEAD_BYTES, AHEAD_BYTES + 1):
            house = House()
            wire = house.connect()
            await house.put(
                wire, get("/hold"), b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n"
            )
            await house.put(wire, b"x" * (size - 10), b"x" * 10)
            assert wire.lost == (size > AHEAD_BYTES)
            assert not wire.protocol.flow.read_paused

    run(main)


def test_leaving_is_told_to_the_request_that_runs() -> None:
    """A request sent ahead must not hide from the one before it that the client has left."""

    async def main() -> None:
        house = House()
        wire = house.connect()
        await house.put(wire, get("/hold") + get("/next"))
        wire.abort()
        await settle()
        assert house.left == ["/hold"]
        assert house.seen == [("/hold", 0)]

    run(main)


# ---- a real server


@contextmanager
def clients(running: Running, number: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S)
            )
            for _ in range(number)
        ]


def everything(s: socket.socket) -> bytes:
    got = b""
    while part := s.recv(65536):
        got += part
    return got


def refused(running: Running, reason: str) -> float:
    text = running.ask("/metrics").body.decode()
    found = [
        line
        for line in text.splitlines()
        if line.startswith(f'stretto_connections_refused_total{{reason="{reason}"')
    ]
    return float(found[0].split()[1]) if found else 0.0


def test_silent_connections_do_not_stay() -> None:
    with serve(ScriptedEngine(), header_timeout=0.05) as running, clients(running, 50) as some:
        assert [everything(s) for s in some] == [b""] * 50
        # Not asked over HTTP: a busy machine may take longer than that for its headers.
        page = running.server.service.metrics.render(0, {}).decode()
        assert 'stretto_connections_refused_total{reason="header_timeout"} 50.0' in page


def test_large_headers_and_garbage() -> None:
    with serve(ScriptedEngine(), max_header_kb=2) as running:
        with clients(running, 2) as (large, garbage):
            large.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2048)
            assert everything(large).startswith(b"HTTP/1.1 431 ")
            garbage.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01")
            assert everything(garbage).startswith(b"HTTP/1.1 400 ")
        assert (refused(running, "header_size"), refused(running, "malformed")) == (1, 1)


def test_idle_connections_make_room() -> None:
    with serve(ScriptedEngine(), max_connections=3) as running, clients(running, 1) as (first,):
        first.sendall(
            b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )  # so that it is there before the others
        read_until(first, b"alive")
        with clients(running, 3) as others:
            assert everything(first) == b""
            for s in others:
                s.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                read_until(s, b"alive")
            assert refused(running, "evicted") >= 1


def test_busy_connections_do_not() -> None:
    with HeldServer(max_connections=1) as held:
        s = held.start(ALOUD)
        with clients(held.running, 1) as (turned_away,):
            got = everything(turned_away)
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in got
        held.release()
        assert held.rest(s).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert held.running.ask("/live").status == 200
        assert "stretto_connections 1.0" in held.running.ask("/metrics").body.decode()


@pytest.mark.parametrize(
    "upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"]
)
def test_nobody_holds_the_engine_by_asking_ahead(upgrade: bytes) -> None:
    """A second request, or a WebSocket, behind one that is being answered; then the client
    leaves."""
    with HeldServer() as held:
        s = held.start(ALOUD)
        s.sendall(
            b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
            + upgrade
            + b"Sec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n"
        )
        if upgrade:
            assert b"HTTP/1.1" not in held.rest(s)
        s.close()
        held.running.do(held.engine.ledger.idle.wait())  # it was never released
        held.running.do(held.running.server.service.admission.idle.wait())
        assert held.engine.ledger.finished == 0


def test_nothing_is_kept_of_a_denied_websocket() -> None:
    """The HTTP side of a connection is not told when the WebSocket side ends."""
    with serve(ScriptedEngine()) as running, clients(running, 1) as (s,):
        s.sendall(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        )
        s.sendall(
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n"
        )
        assert everything(s).startswith(b"HTTP/1.1 404 ")

        async def kept() -> int:
            while running.server.uvicorn.server_state.connections:
                await asyncio.sleep(0)
            return len(running.server.uvicorn.limits.idle)

        assert running.do(kept()) == 0


def test_an_upgrade_to_something_else_is_a_request_like_any() -> None:
    with serve(ScriptedEngine()) as running, clients(running, 1) as (s,):
        for _ in range(2):
            s.sendall(
                b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "
                b"h2c\r\n\r\n"
            )
            assert read_until(s, b"alive").startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_leaves_the_connection_usable() -> None:
    with serve(ScriptedEngine()) as running, clients(running, 1) as (s,):
        body = json.dumps(ASK).encode()
        s.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()  # noqa: E501
        )
        assert read_until(s, b"unsupported_media_type").startswith(b"HTTP/1.1 415 ")
        s.sendall(body + f"POST {CHAT} {HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert read_until(s, b"Hello there.").startswith(b"HTTP/1.1 200 ")


def test_small_packets_do_not_wait() -> None:
    """Nagle's algorithm would hold each back until the client's kernel acknowledges the last: up to
    40 ms."""
    with serve(ScriptedEngine()) as running, clients(running, 1) as (s,):
        s.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(s, b"alive")

        async def option() -> int:
            [connection] = running.server.uvicorn.server_state.connections
            end = connection.transport.get_extra_info("socket")
            return int(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        assert running.do(option()) != 0


@needs_openssl
def test_a_client_that_never_speaks_tls(tmp_path: Path) -> None:
    tls = certificate_settings(tmp_path)
    with (
        serve(ScriptedEngine(), header_timeout=0.05, **tls) as running,
        clients(running, 20) as some,
    ):
        for s in some[10:]:
            with suppress(ConnectionError):  # it may have been closed already
                s.sendall(b"\x16\x03\x01")  # half a hello
        for s in some:
            with suppress(ConnectionError):
                assert everything(s) == b""
    # One that has spoken TLS, and is then silent: time passes when it has, however long that took.
    with serve(ScriptedEngine(), header_timeout=1e6, **tls) as running, clients(running, 1) as (s,):
        trust = ssl.create_default_context(cafile=tls["ssl_certfile"])
        trust.check_hostname = False
        with trust.wrap_socket(s) as spoken:

            async def pass_time() -> None:
                while not running.server.uvicorn.server_state.connections:
                    await asyncio.sleep(0)
                running.loop.time = lambda: time.monotonic() + 2e6  # type: ignore[method-assign]

            running.do(pass_time())
            assert spoken.recv(100) == b""


def test_files_for_all_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_file_limit(1 << 40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert raise_file_limit(1) == 1  # never less than there was
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_fewer_files_are_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the last of them would have no file, and neither would the answers of others."""
    limits, most = [], [2048]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, most[0]))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    assert raise_file_limit(1024) == 1024
    assert not caplog.records
    most[0] = 1024 + OTHER_FILES - 1
    assert raise_file_limit(1024) == (1024 + OTHER_FILES - 1) // 2
    assert "takes 1023 connections, not 1024; `ulimit -n 2048` would do" in caplog.text
    assert limits == [(2048, 2048), (2047, 2047)]
    most[0] = FEWEST_FILES - 1
    with pytest.raises(
        StrettoError, match="may open 255 files, and a server needs 256: raise `ulimit -n`"
    ):
        raise_file_limit(1024)


def test_many_that_come_at_once_leave_others_their_turn() -> None:
    """All of them may wait to be taken, and few are taken in one turn of the event loop."""

    async def come(held: set[Any]) -> list[int]:
        clients = [
            socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S)
            for _ in range(100)
        ]
        try:
            taken = [len(held)]
            while taken[-1] < taken[0] + len(clients):
                await asyncio.sleep(0)  # one turn of the loop
                taken.append(len(held))
            return taken
        finally:
            for client in clients:
                client.close()

    with serve(ScriptedEngine()) as running:
        taken = running.do(come(running.server.uvicorn.server_state.connections))
    assert max(b - a for a, b in itertools.pairwise(taken)) <= AT_ONCE

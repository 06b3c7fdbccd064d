"""Nobody uses up what all share: with many requests, stalled bodies, idle sessions, wide requests
or forged headers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from stretto.config.server import ServerConfig
from stretto.engine.events import Message
from stretto.engine.session import Item
from stretto.errors import Invalid
from stretto.server import heap, keys
from stretto.server.realtime import endpoint
from stretto.server.realtime.session_slots import SessionSlots
from stretto.server.shares import Shares
from tests.preprocess.samples import data_uri, image_file
from tests.preprocess.samples import picture as picture_of
from tests.server.asks import ALOUD, ASK, CHAT
from tests.server.conftest import HEAD, PATIENCE_S, Reply, Running, read_until, serve
from tests.server.held import HeldServer
from tests.server.http.frames import CONTINUED, TEXT, frame
from tests.server.realtime.client import Client, talk
from tests.server.realtime.conftest import talking
from tests.server.realtime.sounds import b64
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import ScriptedSession

ME, OTHER = "127.0.0.1", "127.0.0.2"
MIB = 1 << 20


def until(running: Running, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    running.do(wait())


def ask(running: Running, body: bytes | dict[str, Any], address: str = ME, **headers: str) -> Reply:
    """A chat request from one of the addresses of the loopback."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    line = http.client.HTTPConnection(
        ME, running.port, timeout=PATIENCE_S, source_address=(address, 0)
    )
    with contextlib.closing(line):
        line.request("POST", CHAT, data, {"Content-Type": "application/json", **headers})
        answer = line.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


@contextmanager
def posted(
    running: Running, body: dict[str, Any], address: str = ME, lines: str = ""
) -> Iterator[socket.socket]:
    """A connection from one of the addresses of the loopback on which a chat request was sent."""
    data = json.dumps(body).encode()
    with socket.create_connection(
        (ME, running.port), timeout=PATIENCE_S, source_address=(address, 0)
    ) as s:
        head = f"POST {CHAT} {HEAD}{lines}Content-Length: {len(data)}\r\n\r\n"
        s.sendall(head.encode() + data)
        yield s


# ---- bodies


def test_stalled_uploads_of_one_client_refuse_nobody_else() -> None:
    with (
        serve(ScriptedEngine(), max_body_mb=1.0, max_bodies_mb=8.0) as running,
        ExitStack() as stack,
    ):
        bodies = running.server.service.bodies
        stalled = [
            stack.enter_context(socket.create_connection((ME, running.port), timeout=PATIENCE_S))
            for _ in range(8)
        ]
        for i, s in enumerate(stalled):
            s.sendall(
                f"POST {CHAT} {HEAD}Content-Length: {MIB}\r\n\r\n".encode() + b" " * (MIB - 1)
            )
            if i < 4:
                until(running, lambda i=i: bodies.held == (i + 1) * (MIB - 1))  # type: ignore[misc]
            else:
                assert s.recv(4096).startswith(b"HTTP/1.1 429 "), "half of all is the most for one"
        mine = ask(running, ASK)
        assert mine.status == 429
        assert mine.error["code"] == "rate_limit_exceeded"
        large = json.dumps(ASK).encode()
        for _ in range(3):
            assert ask(running, large + b" " * (MIB - len(large)), OTHER).status == 200
        for s in stalled:
            s.close()
        until(running, lambda: not bodies.held)
        assert ask(running, ASK).status == 200


# ---- places


def test_several_answers_take_several_places() -> None:
    with HeldServer(max_concurrent=8, max_concurrent_share=1.0, max_queue=0) as held:
        with posted(held.running, {**ASK, "n": 8, "stream": True}) as s:
            read_until(s, b'"content"')
            assert held.running.server.service.admission.running == 8
            assert ask(held.running, ASK, OTHER).error["code"] == "server_busy"
            held.release()
            held.running.do(held.running.server.service.admission.idle.wait())
        assert ask(held.running, ASK, OTHER).status == 200


@pytest.mark.parametrize(("places", "mine"), [(16, 14), (8, 7), (2, 1)])
def test_one_client_leaves_a_place_to_others(places: int, mine: int) -> None:
    """Its next request waits, though there is room; another client's is answered."""
    with HeldServer(max_concurrent=places) as held, ExitStack() as stack:
        admission = held.running.server.service.admission
        answered = [held.start(ALOUD) for _ in range(mine)]
        waiting = stack.enter_context(posted(held.running, ASK))
        until(held.running, lambda: admission.running + admission.waiting == mine + 1)
        assert admission.waiting == 1
        with posted(held.running, {**ALOUD, "stream": True}, OTHER) as other:
            read_until(other, b'"data"')
            assert (admission.running, admission.waiting) == (mine + 1, 1)
        held.release()
        assert read_until(waiting, b'"usage"').startswith(b"HTTP/1.1 200 ")
        for s in answered:
            held.rest(s)


def test_a_client_alone_is_answered_where_there_is_one_place() -> None:
    with serve(ScriptedEngine(), max_concurrent=1, max_queue=0) as running:
        assert ask(running, ASK).status == 200
        assert ask(running, {**ASK, "n": 2}).status == 200


def test_a_wide_request_is_admitted_before_later_ones_of_its_client() -> None:
    with HeldServer(max_concurrent=8) as held, ExitStack() as stack:
        admission = held.running.server.service.admission
        first = held.start(ALOUD)
        wide = stack.enter_context(posted(held.running, {**ASK, "n": 8}))
        until(held.running, lambda: admission.waiting == 1)
        later = stack.enter_context(posted(held.running, ASK))
        until(held.running, lambda: admission.waiting == 2)
        assert admission.running == 1
        held.release()
        held.rest(first)
        for s in (wide, later):
            assert read_until(s, b'"usage"').startswith(b"HTTP/1.1 200 ")


def test_several_answers_wait_until_there_is_room() -> None:
    with HeldServer(max_concurrent=8) as held:
        first = held.start(ALOUD)
        with posted(held.running, {**ASK, "n": 8}) as s:
            until(held.running, lambda: held.running.server.service.admission.waiting == 1)
            assert len(held.engine.ledger.running) == 1
            held.release()
            held.rest(first)
            answer = read_until(s, b'"usage"')
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.count(b'"index"') == 8


def test_a_client_that_fills_the_queue_refuses_nobody_else() -> None:
    """It keeps its places; the last of its waiting requests makes room, and the next place is the
    other's."""
    with (
        HeldServer(max_concurrent=2, max_concurrent_share=1.0, max_queue=4) as held,
        ExitStack() as stack,
    ):
        admission = held.running.server.service.admission
        first = [held.start(ALOUD) for _ in range(2)]
        waiting = []
        for i in range(4):
            waiting.append(stack.enter_context(posted(held.running, ASK)))
            until(held.running, lambda i=i: admission.waiting == i + 1)  # type: ignore[misc]
        assert ask(held.running, ASK).error["code"] == "server_busy"
        with posted(held.running, ASK, OTHER) as other:
            assert waiting[-1].recv(4096).startswith(b"HTTP/1.1 429 "), (
                "it came last of the one with the most"
            )
            first[0].close()
            until(held.running, lambda: len(held.engine.calls) == 3)
            assert admission.waiting == 3
            held.release()
            assert read_until(other, b'"usage"').startswith(b"HTTP/1.1 200 ")
        for s in waiting[:3]:
            assert read_until(s, b'"usage"').startswith(b"HTTP/1.1 200 ")
        held.rest(first[1])


# ---- who is who


@pytest.mark.parametrize(
    ("trusted", "second"),
    [((), 429), (("10.0.0.0/8",), 429), (("127.0.0.0/8",), 400), (("*",), 400)],
)
def test_only_named_proxies_say_who_calls(trusted: tuple[str, ...], second: int) -> None:
    with HeldServer(max_concurrent_per_key=1, trusted_proxies=trusted) as held:
        first = held.start(ALOUD)
        forged = ask(held.running, {**ASK, "modle": 1}, **{"X-Forwarded-For": "203.0.113.7"})
        assert forged.status == second
        held.release()
        held.rest(first)


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    first, wrong = "X-Forwarded-For: 2001:db8::1\r\n", {**ASK, "modle": 1}
    with (
        HeldServer(max_concurrent_per_key=1, trusted_proxies=("*",)) as held,
        posted(held.running, {**ALOUD, "stream": True}, lines=first) as s,
    ):
        read_until(s, b'"data"')
        for address, status in (("2001:db8::ffff:2", 429), ("2001:db8:0:1::1", 400)):
            assert ask(held.running, wrong, **{"X-Forwarded-For": address}).status == status
        held.release()
        held.rest(s)


@pytest.mark.parametrize(("trusted", "status"), [((), 200), ((ME,), 403)])
def test_only_named_proxies_say_how_a_client_came(trusted: tuple[str, ...], status: int) -> None:
    """A page that was sent in the clear is not that of a server behind TLS."""
    with serve(
        ScriptedEngine(), trusted_proxies=trusted, allowed_hosts=("omni.example",)
    ) as running:
        headers = {
            "Host": "omni.example",
            "Origin": "http://omni.example",
            "X-Forwarded-Proto": "https",
        }
        assert ask(running, ASK, **headers).status == status


@pytest.mark.parametrize("wrong", ["", "localhost", "10.0.0.0/99", "1.2.3"])
def test_proxies_are_addresses(wrong: str) -> None:
    with pytest.raises(Invalid, match="trusted_proxies is out of range"):
        ServerConfig(trusted_proxies=(wrong,))


# ---- sessions


def refused(running: Running, **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as e, talk(running, **options):
        pass
    return e.value.response.status_code, json.loads(e.value.response.body)["error"]["code"]


def test_one_client_opens_at_most_half_of_all_sessions() -> None:
    with talking(ScriptedEngine(), realtime_sessions=8) as running, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(talk(running))
        assert refused(running) == (429, "rate_limit_exceeded")
        for _ in range(2):
            stack.enter_context(talk(running, source_address=(OTHER, 0)))
        stack.enter_context(talk(running, source_address=("127.0.0.3", 0)))


def test_all_sessions_of_one_client_have_one_client() -> None:
    engine = ScriptedEngine()
    with talking(engine) as running, ExitStack() as stack:
        for address in (ME, ME, OTHER):
            stack.enter_context(talk(running, source_address=(address, 0)))
        assert [s.client for s in engine.sessions] == [ME, ME, OTHER]


def test_by_default_that_is_64() -> None:
    config = ServerConfig()
    sessions = SessionSlots(config.realtime_sessions, config.realtime_sessions_per_key, Shares(1))
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(sessions.slot("me"))
        assert sessions.running == 64
        with (
            pytest.raises(Exception, match="64 realtime sessions of this client are open already"),
            sessions.slot("me"),
        ):
            pass
        with sessions.slot("other"):
            pass
    assert sessions.idle.is_set()


@contextmanager
def keyed(tmp_path: Path, **settings: Any) -> Iterator[tuple[Running, Path]]:
    file = tmp_path / "keys"
    file.write_text("mine\nother\n")
    with talking(ScriptedEngine(), api_key_file=str(file), **settings) as running:
        yield running, file


MINE = {"additional_headers": {"Authorization": "Bearer mine"}}


@pytest.mark.parametrize("speaks", [False, True])
def test_a_session_ends_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """By itself; and at the next event, before it is answered."""
    monkeypatch.setattr(keys, "REREAD_S", 0.0)
    monkeypatch.setattr(endpoint, "POLL_S", 3600.0 if speaks else 0.01)
    with keyed(tmp_path) as (running, file), talk(running, **MINE) as c:
        c.manual()
        with talk(running, additional_headers={"Authorization": "Bearer other"}) as other:
            file.write_text("# mine has gone\nother\n")
            if speaks:
                c.send("response.create")
            with pytest.raises(ConnectionClosed) as closed:
                c.next()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (
                1008, "the API key of this session is no longer valid",
            )  # fmt: skip
            other.manual()
        engine = running.server.service.maybe_engine
        assert isinstance(engine, ScriptedEngine)
        assert not engine.asks


def test_an_answer_to_a_request_is_finished_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REREAD_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("mine\nother\n")
    with HeldServer(api_key_file=str(file)) as held:
        s = held.start(ALOUD, key="mine")
        file.write_text("other\n# mine has gone\n")
        assert ask(held.running, ASK, Authorization="Bearer mine").status == 401
        held.release()
        assert held.rest(s).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


# ---- memory of sessions


def fill(c: Client, size: int, piece: int = 1_440_000) -> str:
    """Sound until there is no room; what is said then."""
    for _ in range(size // piece + 1):
        c.append(bytes(piece), piece)
        c.send("conversation.item.retrieve", item_id="nothing")
        errors = [c.until("error")["error"]]
        while errors[-1]["code"] != "item_retrieve_invalid_item_id":
            errors.append(c.until("error")["error"])
        if len(errors) > 1:
            return str(errors[0]["message"])
    return ""


def test_all_sessions_of_one_client_have_half_of_the_memory() -> None:
    with (
        talking(ScriptedEngine(), realtime_held_mb=16.0, realtime_total_mb=48.0) as running,
        ExitStack() as stack,
    ):
        memory = running.server.service.sessions.memory
        mine, more = (stack.enter_context(talk(running)) for _ in range(2))
        mine.manual()
        more.manual()
        assert fill(mine, 20 * MIB) == "a session holds at most 16 MiB"
        assert "your sessions hold all that they may" in fill(more, 20 * MIB)
        assert 20 * MIB < memory.of(ME) <= 24 * MIB
        with talk(running, source_address=(OTHER, 0)) as other:
            other.manual()
            assert fill(other, 8 * MIB) == ""
        more.send("input_audio_buffer.clear")
        more.until("input_audio_buffer.cleared")
        until(running, lambda: memory.of(ME) < 16 * MIB)
        assert fill(more, 4 * MIB) == ""
        stack.close()
        until(running, lambda: not memory.held)


LONG = "word " * 20_000
TOOLS = [{"type": "function", "name": f"f{i}", "description": "d" * 20_000} for i in range(8)]


def test_settings_and_texts_of_sessions_count() -> None:
    """Instructions, tools and texts are of the client's share; what it gives up, it may use
    again."""
    with (
        talking(ScriptedEngine(), realtime_held_mb=8.0, realtime_total_mb=16.0) as running,
        ExitStack() as stack,
    ):
        memory = running.server.service.sessions.memory
        mine, more = (stack.enter_context(talk(running)) for _ in range(2))
        for c in (mine, more):
            c.manual(instructions=LONG, tools=TOOLS)
        until(running, lambda: memory.of(ME) > 2 * (24 * 160_000 + 100_000))
        with talk(running, source_address=(OTHER, 0)) as other, talk(running) as third:
            other.manual(instructions=LONG, tools=TOOLS)
            third.send("session.update", session={"type": "realtime", "tools": TOOLS})
            assert third.until("error")["error"]["code"] == "session_full"
        assert "your sessions hold all that they may" in fill(more, 2 * MIB, 36_000)
        mine.update(instructions="", tools=[])
        assert fill(more, 2 * MIB, 36_000) == ""
        before = memory.of(ME)
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": LONG}],
        }
        mine.send("conversation.item.create", item=item)
        mine.until("conversation.item.done")
        mine.sync()
        until(running, lambda: memory.of(ME) > before + len(LONG) // 2)
        stack.close()
        until(running, lambda: not memory.held)


def test_inputs_of_a_response_count_until_it_ends() -> None:
    engine = ScriptedEngine()
    release = asyncio.Event()

    async def gate(i: int) -> None:
        await release.wait()

    engine.gate = gate
    sound = {"type": "input_audio", "audio": b64(bytes(480_000))}
    asked = {
        "conversation": "none",
        "output_modalities": ["text"],
        "input": [{"type": "message", "role": "user", "content": [sound]}] * 2,
    }
    with talking(engine, realtime_held_mb=2.0) as running:
        memory = running.server.service.sessions.memory
        with talk(running) as c:
            c.manual()
            c.sync()
            before = memory.held
            c.send("response.create", response=asked)
            c.until("response.created")
            until(running, lambda: memory.held > before + 2 * 640_000)
            c.send("response.create", response=asked)
            assert c.until("error")["error"]["code"] == "conversation_full"
            running.loop.call_soon_threadsafe(release.set)
            c.until("response.done")
            # an event or a message that is under way may count here or there
            until(running, lambda: memory.held < before + 10_000)
            c.send("response.create", response=asked)
            c.until("response.done")
            c.send("response.create", response={"conversation": "none", "tools": TOOLS})
            error = c.until("error")["error"]
            assert (error["code"], error["param"]) == ("conversation_full", "response")
        until(running, lambda: not memory.held)


def test_a_picture_counts_as_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """How large that is turns out when it is decoded."""
    item = ScriptedSession.item

    async def decoded(self: ScriptedSession, message: Message, *, id: str | None = None) -> Item:
        own = await item(self, message, id=id)
        picture = {"type": "image", "data": np.zeros(4 * MIB, np.uint8)}
        return replace(own, message={**message, "content": [picture]})

    monkeypatch.setattr(ScriptedSession, "item", decoded)
    engine = ScriptedEngine()
    picture = {
        "type": "input_image",
        "image_url": data_uri(image_file(picture_of(8, 8)), "image/png"),
    }
    asked = {"id": "p", "type": "message", "role": "user", "content": [picture]}
    with talking(engine, realtime_held_mb=2.0) as running, talk(running) as c:
        c.manual()
        c.send("conversation.item.create", item=asked)
        assert c.until("error")["error"]["code"] == "conversation_full"
        c.send("conversation.item.retrieve", item_id="p")
        assert c.until("error")["error"]["code"] == "item_retrieve_invalid_item_id"
        [session] = engine.sessions
        assert session.items == ()
        c.sync()
        assert running.server.service.sessions.memory.held < MIB


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_sessions_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "POLL_S", 0.01)
    with talking(ScriptedEngine(), realtime_held_mb=64.0) as running:
        with talk(running) as c:
            c.manual()
            for _ in range(100):
                c.append(bytes(96_000), 96_000)
            c.sync()
        gc.collect()  # what earlier tests have left must not be freed meanwhile
        heap.trim()
        before = resident()
        with talk(running) as c:
            c.manual()
            for _ in range(1000):
                c.append(bytes(48_000), 48_000)
            c.sync()
            # Some of it may lie in pages that the process had before.
            grown = resident() - before
            assert grown > 24 * MIB
        until(running, lambda: resident() < before + grown // 3)


def test_nothing_of_a_message_stays_when_it_was_handled() -> None:
    with talking(ScriptedEngine(), realtime_held_mb=1.0) as running, ExitStack() as stack:
        sessions = [stack.enter_context(talk(running)) for _ in range(4)]
        gc.collect()
        heap.trim()
        before = resident()
        for c in sessions:
            c.manual()
            c.append(bytes(9_000_000), 9_000_000)
            assert c.until("error")["error"]["code"] == "input_audio_buffer_full"
        until(running, lambda: resident() < before + 16 * MIB)


def test_unfinished_messages_count_and_are_bounded() -> None:
    """Beyond its half of the memory, a client's connections are closed; those with little in them
    are not."""
    with (
        talking(ScriptedEngine(), realtime_held_mb=8.0, realtime_total_mb=16.0) as running,
        ExitStack() as stack,
    ):
        memory = running.server.service.sessions.memory
        lines = [stack.enter_context(by_hand(running)) for _ in range(4)]
        part = frame(CONTINUED, bytes(60_000), False)
        for s in lines[:2]:
            s.sendall(frame(TEXT, b"{", False) + part * 50)
        until(running, lambda: memory.of(ME) == 2 * (50 * 60_000 + 1))
        lines[3].sendall(frame(TEXT, b"{", False) + frame(CONTINUED, bytes(20_000), False))
        until(running, lambda: memory.of(ME) == 2 * (50 * 60_000 + 1) + 20_001)
        with contextlib.suppress(OSError):
            lines[2].sendall(frame(TEXT, b"{", False) + part * 100)
        assert b"too much of your messages lies here unfinished" in rest_of(lines[2])
        assert memory.of(ME) == 2 * (50 * 60_000 + 1) + 20_001
        with talk(running, source_address=(OTHER, 0)) as other:
            other.manual()
            assert fill(other, 2 * MIB) == ""
        lines[3].sendall(frame(CONTINUED, b"}"))
        read_until(lines[3], b"invalid_json")
        stack.close()
        until(running, lambda: not memory.held)


@contextmanager
def by_hand(running: Running) -> Iterator[socket.socket]:
    with socket.create_connection((ME, running.port), timeout=PATIENCE_S) as s:
        s.sendall(
            b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "
            b"websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        read_until(s, b"session.created")
        yield s


def rest_of(s: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionError):
        while part := s.recv(65536):
            got += part
    return got

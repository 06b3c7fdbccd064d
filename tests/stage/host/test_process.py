"""A host whose loop stands still: new requests are refused while there is still room for the end of
those it has, and a message that finds no room ends the host, loudly."""

import asyncio
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.config.engine import HostSettings
from stretto.engine.local_host import HostProcess
from stretto.messages.hosts import Broken, Quit, Ready
from stretto.messages.requests import Admit, Cancel, Failed, ToHost, encode
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.stage.host import host as hosts
from stretto.stage.host import process
from stretto.stage.host.loop import Loop
from stretto.types import GREEDY, RequestId
from tests.pipeline import STAGES, announcement, configure

PLACES, CONTROL = 8, 3


class Still(Loop):
    """Takes messages when it is told to, and not by itself."""

    def start(self, on_failure: Callable[[], None]) -> None:
        pass


class Host:
    """As far as the process needs one."""

    Loop: type[Loop] = Still

    def __init__(self, *args: Any) -> None:
        self.device = SimpleNamespace(type="cpu")
        self.context = SimpleNamespace(memory={})
        self.loop = self.Loop(self, max_messages=PLACES)
        self.handled: list[ToHost] = []
        self.closed = False

    due_ns: int | None = None

    def poll(self) -> bool:
        return False

    def load(self) -> None:
        pass

    def handle(self, message: ToHost, blob: bytes) -> None:
        self.handled.append(message)

    def close(self) -> None:
        self.loop.stop()
        self.closed = True


def admit(name: str) -> Admit:
    s = GREEDY
    return announcement(RequestId(name), PackedPrompt.of_ids((1,)), True, None, s, s, s, 4, 4)


def serve(
    monkeypatch: pytest.MonkeyPatch, *messages: ToHost, settles: bool = True
) -> tuple[int, Host, list[Any]]:
    """Its exit status, the host, and what it said."""
    made: list[Host] = []

    def make(*args: Any) -> Host:
        made.append(Host())
        return made[-1]

    monkeypatch.setattr(process, "Host", make)
    monkeypatch.setattr(hosts, "RESERVED_PLACES", CONTROL)
    if settles:
        monkeypatch.setattr(process, "settle_down", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (configure("", STAGES, HostSettings().as_dict()), *messages):
            ours.sendall(encode(message))
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(process.serve(theirs)), daemon=True)
        thread.start()
        thread.join(60)
        assert codes, "it goes on"
        reports: asyncio.Queue[Any] = asyncio.Queue()
        HostProcess("h", reports).receive(ours.recv(1 << 20))
        sent = [reports.get_nowait().message for _ in range(reports.qsize())]
    return codes[0], made[0], sent


def test_requests_leave_room_for_the_end_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    admits = [admit(f"r{i}") for i in range(PLACES)]
    cancels = [Cancel(m.request) for m in admits[:CONTROL]]
    code, host, sent = serve(monkeypatch, *admits, *cancels, Quit())
    assert code == 0
    assert isinstance(sent[0], Ready)
    refused = [(m.request, m.kind) for m in sent if isinstance(m, Failed)]
    assert refused == [(m.request, "Busy") for m in admits[PLACES - CONTROL :]]
    assert not any(isinstance(m, Broken) for m in sent)
    host.loop.round()
    assert host.handled == [*admits[: PLACES - CONTROL], *cancels], "what was taken is not lost"


def test_a_message_that_finds_no_room_ends_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    code, host, sent = serve(
        monkeypatch, *[Cancel(RequestId(f"r{i}")) for i in range(PLACES + 1)], Quit()
    )
    assert code == 1
    assert isinstance(sent[-1], Broken)
    assert "8 messages" in sent[-1].message
    assert not host.closed, "that would wait for the loop, which may stand still for good"


def test_a_host_settles_down_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(process, "settle_down", lambda: calls.append("settled"))
    code, _, sent = serve(monkeypatch, Quit(), settles=False)
    assert (code, calls) == (0, ["settled"])
    assert isinstance(sent[0], Ready)

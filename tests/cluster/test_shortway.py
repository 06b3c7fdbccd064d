"""The short way to an application, without Ray: which requests take it, what Serve is told, and when there is none.
`test_serve.py` compares it with Serve's ordinary way in a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.cluster import shortway
from stretto.cluster.shortway import ENTRY, SHAPES, VALUES, ShortWay, Unlike, check, shorten

START = {"type": "http.response.start", "status": 201, "headers": []}
PART = {"type": "http.response.body", "body": b"a", "more_body": True}
LAST = {"type": "http.response.body", "body": b"b"}
GONE = {"type": "http.disconnect"}
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/x",
    "root_path": "",
    "headers": [(b"x-request-id", b"me")],
    "client": ("127.0.0.1", 5),
}


@dataclass
class Replica:
    """As much of Serve's as is used."""

    _event_loop: Any = None
    _route_prefix: str = "/"
    _semaphore: Any = field(default_factory=lambda: SimpleNamespace(locked=lambda: False))
    running: int = 0
    ordinary: list[str] = field(default_factory=list)
    told: list[tuple[Any, ...]] = field(default_factory=list)

    async def _direct_ingress_asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.ordinary.append(scope["path"])

    @asynccontextmanager
    async def _start_request(self, request_metadata: Any) -> AsyncIterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @contextmanager
    def _handle_errors_and_metrics(self, request_metadata: Any) -> Iterator[Callable[[str], None]]:
        statuses, error = [""], None
        try:
            yield statuses.append
        except (ValueError, asyncio.CancelledError) as e:
            error = type(e)
        m = request_metadata
        self.told.append((error, statuses[-1], m.request_id, m.route, m._http_method, m._client, self.running))

    def _parse_request_timeout(self, headers: dict[bytes, bytes]) -> float | None:
        return 1.0 if b"x-request-timeout-seconds" in headers else None

    def _determine_http_route(self, scope: Any) -> str:
        return f"route of {scope['path']}"


async def silent() -> Any:
    raise AssertionError("nobody reads")


async def ask(replica: Replica, app: Any, receive: Any = silent, **scope: Any) -> list[Any]:
    """What the client gets."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    way = ShortWay(replica, app, replica._direct_ingress_asgi, SimpleNamespace, lambda address: f"{address[0]}!")
    await way({**SCOPE, **scope}, receive, send)
    return sent


def told(status: str, error: type[BaseException] | None = None) -> list[tuple[Any, ...]]:
    return [(error, status, "me", "route of /v1/x", "POST", "127.0.0.1!", 0)]


def test_it_passes_all_and_serve_counts_and_is_told() -> None:
    replica = Replica()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert replica.running == 1
        assert not replica.told
        scope["path"] = "as routing may change it"
        for message in (START, PART, LAST):
            await send(message)

    assert asyncio.run(ask(replica, app)) == [START, PART, LAST]
    assert replica.told == told("201")
    assert not replica.ordinary


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a WebSocket": ({}, {"type": "websocket"}),
    "Serve's own path": ({}, {"path": "/-/healthz"}),
    "a time limit": ({}, {"headers": [(b"x-request-timeout-seconds", b"3")]}),
    "a root path": ({}, {"root_path": "/x"}),
    "a prefix": ({"_route_prefix": "/x"}, {}),
    "no free slot": ({"_semaphore": SimpleNamespace(locked=lambda: True)}, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_take_the_ordinary_way(name: str) -> None:
    of_replica, of_scope = OTHERS[name]
    replica = Replica(**of_replica)
    assert asyncio.run(ask(replica, silent, **of_scope)) == []
    assert replica.ordinary == [of_scope.get("path", "/v1/x")]
    assert not replica.told


def leaver(*sent: Any) -> Any:
    """Reads after it has sent so much."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in sent:
            await send(message)
        assert await receive() == GONE

    return app


async def gone() -> Any:
    return GONE


@pytest.mark.parametrize("sent", [(), (START,), (START, PART)])
def test_a_client_that_leaves_is_told_as_one(sent: Any) -> None:
    replica = Replica()
    asyncio.run(ask(replica, leaver(*sent), gone))
    assert replica.told == told("499", asyncio.CancelledError)


def test_one_that_leaves_with_all_of_the_answer_has_not_left() -> None:
    replica = Replica()
    asyncio.run(ask(replica, leaver(START, PART, LAST), gone))
    assert replica.told == told("201")


def test_an_error_of_the_application_is_serves_to_tell() -> None:
    replica = Replica()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        raise ValueError

    asyncio.run(ask(replica, app))
    assert replica.told == told("201", ValueError)


def test_a_client_that_reads_slowly_is_felt() -> None:
    """The application goes on when the server has taken what it sent."""

    async def run() -> None:
        replica, reads, steps = Replica(), asyncio.Event(), []

        async def send(message: Any) -> None:
            await reads.wait()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            steps.append("sends")
            await send(START)
            steps.append("sent")

        way = ShortWay(replica, app, silent, SimpleNamespace, str)
        work = asyncio.create_task(way(dict(SCOPE), silent, send))
        for _ in range(5):
            await asyncio.sleep(0)
        assert steps == ["sends"]
        reads.set()
        await work
        assert steps == ["sends", "sent"]

    asyncio.run(run())


# ---- when there is none


async def checked(replica: Any) -> None:
    replica._event_loop = asyncio.get_running_loop()
    check(replica)


def test_a_replica_as_expected_is_fine() -> None:
    asyncio.run(checked(Replica()))


@pytest.mark.parametrize("name", [*SHAPES, *(name for name in VALUES if name != "_event_loop")])
def test_one_without_a_name_is_not(name: str) -> None:
    names = [n for n in (*SHAPES, *VALUES) if n != name]
    replica = SimpleNamespace(**{n: getattr(Replica(), n) for n in names})
    with pytest.raises(Unlike, match=name):
        asyncio.run(checked(replica))


@pytest.mark.parametrize("name", SHAPES)
def test_nor_is_one_that_takes_something_else(name: str) -> None:
    replica: Any = Replica()
    setattr(replica, name, lambda other: None)
    with pytest.raises(Unlike, match=name):
        asyncio.run(checked(replica))


def test_nor_one_whose_application_has_a_loop_of_its_own() -> None:
    async def run() -> None:
        check(Replica(_event_loop=object()))

    with pytest.raises(Unlike, match="own loop"):
        asyncio.run(run())


class Loops(Replica):
    """As expected, on whatever loop."""

    @property
    def _event_loop(self) -> Any:  # type: ignore[override]
        return asyncio.get_running_loop()

    @_event_loop.setter
    def _event_loop(self, loop: Any) -> None:
        pass


def shortened(monkeypatch: pytest.MonkeyPatch, replica: Any) -> bool:
    async def run() -> bool:
        return shorten(silent)

    monkeypatch.setattr(shortway, "own_replica", lambda: replica)
    return asyncio.run(run())


def told_once(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert (record.name, record.levelno) == (shortway.__name__, logging.WARNING)
    assert "ordinary way" in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize(
    ("replica", "why"), [(None, "no replica was found"), (Replica(_event_loop=object()), "the replica's own loop")]
)
def test_then_nothing_is_replaced_and_one_line_says_so(
    replica: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not shortened(monkeypatch, replica)
    assert why in told_once(caplog)
    assert replica is None or ENTRY not in vars(replica)


@pytest.mark.parametrize("error", [ImportError, TypeError, Unlike])
def test_nor_where_serve_has_no_such_names(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(replica: Any, app: Any) -> Any:
        raise error("another Ray")

    monkeypatch.setattr(shortway, "short_way", fails)
    replica = Loops()
    assert not shortened(monkeypatch, replica)
    assert "another Ray" in told_once(caplog)
    assert ENTRY not in vars(replica)


def test_nor_where_serve_traces(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tracing = pytest.importorskip("ray.serve._private.tracing_utils", reason="needs Ray: `make ray` runs this")
    replica = Loops()
    assert shortened(monkeypatch, replica)
    assert isinstance(vars(replica).pop(ENTRY), ShortWay)
    monkeypatch.setattr(tracing, "is_tracing_enabled", lambda: True)
    assert not shortened(monkeypatch, replica)
    assert "trace" in told_once(caplog)
    assert ENTRY not in vars(replica)

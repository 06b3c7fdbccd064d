"""Runs in a replica: the same requests by Serve's ordinary way and by the short one, and what Serve is told of each.
`test_serve.py` sends it there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEADERS = [(b"host", b"localhost"), (b"x-request-id", b"me"), (b"content-type", b"application/json")]
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "scheme": "http",
    "root_path": "",
    "query_string": b"",
    "headers": HEADERS,
    "client": ("127.0.0.1", 5),
    "server": ("127.0.0.1", 80),
    "state": {},
}


@dataclass
class Case:
    method: str
    path: str
    body: bytes = b""
    leaves: bool = False  # when the answer has begun; else it waits for all of it


@dataclass
class Client:
    case: Case
    sent: bool = False
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    async def receive(self) -> dict[str, Any]:
        if not self.sent:
            self.sent = True
            return {"type": "http.request", "body": self.case.body, "more_body": False}
        await self.enough.wait()
        return {"type": "http.disconnect"}


async def told(replica: Any, entry: Any, case: Case) -> tuple[Any, ...]:
    """All that Serve is told of this request, beside how long it took."""
    seen: list[Any] = []
    client = Client(case)

    def spy(error: Any, status: Any, latency_ms: float, metadata: Any) -> None:
        m = metadata
        about = (m.request_id, m.route, m._http_method, m._client, m.call_method, m.protocol, m.is_direct_ingress)
        seen.append((type(error), status, *map(str, about)))

    async def send(message: dict[str, Any]) -> None:
        client.running.append(replica.get_num_ongoing_requests())
        if message["type"] == "http.response.start":
            client.statuses.append(message["status"])
        elif case.leaves or not message.get("more_body", False):
            client.enough.set()

    replica._record_errors_and_metrics = spy
    try:
        await entry({**SCOPE, "method": case.method, "path": case.path, "headers": list(HEADERS)}, client.receive, send)
    finally:
        del replica._record_errors_and_metrics
    while replica.get_num_ongoing_requests():  # by the ordinary way, one that was left ends a little later
        await asyncio.sleep(0)
    return (*seen, client.statuses, set(client.running))


async def compare(replica: Any, cases: Sequence[Case]) -> list[tuple[Any, Any]]:
    """By the ordinary way and by the short one."""
    short = replica._direct_ingress_asgi
    return [(await told(replica, short.ordinary, case), await told(replica, short, case)) for case in cases]

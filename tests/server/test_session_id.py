"""A client's session reaches the engine, so that its requests go where the last one went; nobody
can name another's."""

from __future__ import annotations

import json
import urllib.request

from tests.server.conftest import PATIENCE_S, serve
from tests.server.scripted_engine import ScriptedEngine

ASK = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


def ask(url: str, key: str, **headers: str) -> None:
    told = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", ASK, told), timeout=PATIENCE_S
    ) as answer:
        assert answer.status == 200


def test_a_session_is_told_to_the_engine() -> None:
    engine = ScriptedEngine()
    with serve(engine, api_key=("one", "two")) as running:
        ask(running.url, "one", **{"x-session-id": "mine"})
        ask(running.url, "one", **{"x-session-id": "mine"})
        ask(running.url, "two", **{"x-session-id": "mine"})
        ask(running.url, "one")
        ask(running.url, "one", **{"x-session-id": "no spaces allowed" + "x" * 200})
    first, again, others, none, wrong = (call["session"] for call in engine.calls)
    assert first == again
    assert first.endswith("/mine")
    assert others != first, "another key's session is another session"
    assert none is wrong is None

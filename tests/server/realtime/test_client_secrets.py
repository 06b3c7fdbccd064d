"""Client secrets: made with an API key, they open realtime sessions with its owner's settings, for
a while, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from websockets.exceptions import InvalidStatus

from stretto.family import ModelInfo
from stretto.server.http.body import ON_THE_LOOP
from stretto.server.openai.error_body import Refused
from stretto.server.realtime.client_secrets import OWN_BYTES, ClientSecrets
from stretto.server.shares import Shares
from tests.server.conftest import Reply, Running
from tests.server.realtime.client import talk
from tests.server.realtime.conftest import talking
from tests.server.scripted_engine import ScriptedEngine

KEY = "server-key"
PATH = "/v1/realtime/client_secrets"
BEARER = {"Authorization": f"Bearer {KEY}"}
SESSION = {
    "type": "realtime",
    "instructions": "Speak like a pirate.",
    "audio": {"output": {"voice": "chelsie"}, "input": {"turn_detection": None}},
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
}


@pytest.fixture
def guarded(engine: ScriptedEngine) -> Iterator[Running]:
    with talking(engine, api_key=(KEY, "other")) as running:
        yield running


def mint(running: Running, body: Any = None, headers: Any = None) -> Reply:
    return running.ask(PATH, body or {}, headers=BEARER if headers is None else headers)


def refused(running: Running, path: str = "/v1/realtime", **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as e, talk(running, path, **options):
        pass
    response = e.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


def test_openais_client_makes_one_and_a_browser_opens_a_session_with_it(
    guarded: Running, engine: ScriptedEngine
) -> None:
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY) as client:
        made = client.realtime.client_secrets.create(
            session=SESSION,  # type: ignore[arg-type]
            expires_after={"anchor": "created_at", "seconds": 60},
        )
    assert made.value.startswith("ek_")
    assert made.session.type == "realtime"
    assert made.session.instructions == "Speak like a pirate."
    clock = guarded.server.service.secrets.clock
    assert 0 < made.expires_at - clock() <= 60

    async def speak() -> None:
        client = AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key=made.value)
        async with client.realtime.connect(model="default") as connection:
            created: Any = await connection.recv()
            assert created.session.instructions == "Speak like a pirate."
            assert created.session.tools[0].name == "look"
            assert created.session.audio.output.voice == made.session.audio.output.voice
            await connection.response.create()
            while (await connection.recv()).type != "response.done":
                pass
        await client.close()

    asyncio.run(speak())
    assert engine.asks[0].given["voice"] == made.session.audio.output.voice
    protocols = ["realtime", f"openai-insecure-api-key.{made.value}"]
    with talk(guarded, subprotocols=protocols, origin="https://page.example") as c:
        assert c.seen[0]["session"]["audio"]["input"]["turn_detection"] is None
        c.update(instructions="Speak plainly.")  # the page may change what it began with
    assert [(s.owner, s.client) for s in engine.sessions] == 2 * [("key1", "key1")]


def test_it_opens_nothing_else(guarded: Running) -> None:
    secret = mint(guarded).json["value"]
    own = {"Authorization": f"Bearer {secret}"}
    for path, body in (("/v1/models", None), (PATH, {}), ("/v1/chat/completions", {})):
        reply = guarded.ask(path, body, headers=own)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert "client secret" in reply.error["message"]
    assert refused(guarded, "/v1/audio/speech/stream", additional_headers=own)[0] == 401
    assert refused(guarded, additional_headers={"api-key": secret[:-1] + "x"})[0] == 401
    assert mint(guarded, headers={}).status == 401


def test_it_expires(guarded: Running) -> None:
    now = [1000.0]
    guarded.server.service.secrets.clock = lambda: now[0]
    made = mint(guarded, {"expires_after": {"seconds": 10}}).json
    own = {"Authorization": f"Bearer {made['value']}"}
    assert made["expires_at"] == 1010
    now[0] = 1009.9
    with talk(guarded, additional_headers=own) as c:
        now[0] = 1010.0
        assert refused(guarded, additional_headers=own) == (401, "invalid_api_key")
        c.update(instructions="A session that is open goes on.")


def test_it_goes_with_the_key_that_made_it(tmp_path: Path, engine: ScriptedEngine) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    now = [0.0]
    with talking(engine, api_key_file=str(file)) as running:
        keys = running.server.service.keys
        now[0] = keys.clock()
        keys.clock = lambda: now[0]
        secret = mint(running, headers={"Authorization": "Bearer second"}).json["value"]
        own = {"Authorization": f"Bearer {secret}"}
        with talk(running, additional_headers=own):
            pass
        file.write_text("first\n")
        now[0] += 2
        assert refused(running, additional_headers=own) == (401, "invalid_api_key")


def test_limits_are_those_of_the_key(engine: ScriptedEngine) -> None:
    with talking(engine, api_key=(KEY,), realtime_sessions_per_key=1) as running:
        one, other = (mint(running).json["value"] for _ in range(2))
        with talk(running, additional_headers={"Authorization": f"Bearer {one}"}):
            assert refused(running, additional_headers={"Authorization": f"Bearer {other}"}) == (
                429,
                "rate_limit_exceeded",
            )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now"}}, "expires_after.anchor"),
        ({"session": 5}, "session"),
        ({"session": {"type": "song"}}, "session.type"),
        ({"session": {"instructions": 5}}, "session.instructions"),
        ({"session": {"truncation": "disabled"}}, "truncation"),
        ({"session": {"model": "gpt-9"}}, "model"),
        ({"life": 5}, "life"),
    ],
)
def test_mistakes_are_told_to_whoever_makes_it(
    guarded: Running, body: dict[str, Any], param: str
) -> None:
    reply = mint(guarded, body)
    assert (reply.status, reply.error["param"]) == (404 if param == "model" else 400, param)


def test_its_settings_have_a_greatest_size_and_the_body_goes(guarded: Running) -> None:
    reply = mint(guarded, {"session": {"tools": ["x" * ON_THE_LOOP]}})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert mint(guarded, {"session": SESSION}).status == 200
    assert guarded.server.service.bodies.held == 0


def test_transcription_sessions(guarded: Running) -> None:
    session = {"type": "transcription", "audio": {"input": {"transcription": {"language": "de"}}}}
    made = mint(guarded, {"session": session}).json
    assert made["session"]["object"] == "realtime.transcription_session"
    own = {"additional_headers": {"Authorization": f"Bearer {made['value']}"}}
    for path in ("/v1/realtime", "/v1/realtime?intent=transcription"):
        with talk(guarded, path, **own) as c:
            session = c.seen[0]["session"]
            assert session["type"] == "transcription"
            assert session["audio"]["input"]["transcription"]["language"] == "de"
    assert refused(guarded, "/v1/realtime?intent=conversation", **own)[0] == 400


def test_a_model_that_cannot_transcribe_says_so_when_it_is_made() -> None:
    class Deaf(ScriptedEngine):
        @property
        def info(self) -> ModelInfo:
            return replace(super().info, transcription=None)

    with talking(Deaf()) as running:
        assert mint(running, {"session": {"type": "transcription"}}, {}).error["param"] == "model"


def test_without_keys_it_still_brings_its_settings(running: Running) -> None:
    made = mint(running, {"session": SESSION}, {}).json
    own = {"Authorization": f"Bearer {made['value']}"}
    with talk(running, additional_headers=own) as c:
        assert c.seen[0]["session"]["instructions"] == "Speak like a pirate."
    with talk(running, additional_headers={"Authorization": "Bearer ek_made_up"}):
        pass  # as with any other key


def test_it_is_never_logged(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        secret = mint(guarded).json["value"]
        with talk(guarded, f"/v1/realtime?api-key={secret}"):
            pass
        guarded.do(guarded.server.service.sessions.idle.wait())
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("stretto")]
    assert any(f"path={PATH}" in line for line in ours)
    assert secret not in "".join(ours)
    assert secret not in repr(guarded.server.service.secrets)


# ---- the store


def test_an_owner_has_half_of_the_memory_until_secrets_expire() -> None:
    now = [0.0]
    store = ClientSecrets(lambda: now[0], Shares(8 * OWN_BYTES))

    def make(owner: str, seconds: int) -> str:
        return store.make(owner, owner, "realtime", b"", seconds)[0]

    first = make("a", 10)
    rest = [make("a", 20) for _ in range(3)]
    with pytest.raises(Refused, match="as many client secrets as fit") as e:
        make("a", 20)
    assert e.value.status == 429
    assert all(store.find(value) for value in (first, *rest))
    now[0] = 10
    assert store.find(first) is None
    assert make("a", 20)
    assert make("b", 20)
    now[0] = 40
    assert store.find(rest[0]) is None
    assert store.shares.held == 0


def test_the_settings_of_a_secret_count_and_expired_ones_make_room() -> None:
    now = [0.0]
    store = ClientSecrets(lambda: now[0], Shares(8 * OWN_BYTES))

    def make(session: bytes) -> None:
        store.make("a", "a", "realtime", session, 10)

    with pytest.raises(Refused, match="as many client secrets as fit"):
        make(bytes(4 * OWN_BYTES))
    make(bytes(3 * OWN_BYTES))
    with pytest.raises(Refused, match="as many client secrets as fit"):
        make(b"")
    now[0] = 10
    make(bytes(3 * OWN_BYTES))
    assert store.shares.held == 4 * OWN_BYTES, "nobody has asked for the first"


def test_only_the_whole_secret_is_found() -> None:
    store = ClientSecrets()
    value, _ = store.make("a", "a", "realtime", b"{}", 60)
    assert store.find(value) is not None
    for wrong in ("", "ek_", value[:-1], value + "0", value[:19] + "0" * 32, value[3:]):
        assert store.find(wrong) is None

"""What the server does around an answer: keys, ids, limits, states, pages, errors, numbers. The
engine is scripted."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from stretto.config.server import ServerConfig
from stretto.engine.events import TimelineSpan
from stretto.engine.protocol import EngineClient
from stretto.errors import Bug, Busy, Invalid, StageDead, WireError
from stretto.params import ChunkSizes
from stretto.server.app import make_app
from tests.server.asks import ALOUD, ASK, CHAT, SOUND, SPEECH
from tests.server.conftest import PATIENCE_S, Running, serve
from tests.server.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(
        packets=SOUND, numbers={'stretto_queue{stage="talker"}': 3.0, "stretto_steps_total": 5.0}
    )


@pytest.fixture(scope="module")
def running(engine: ScriptedEngine) -> Iterator[Running]:
    with serve(engine) as running:
        yield running


# ---- what reaches the engine


def test_fields_become_params(running: Running, engine: ScriptedEngine) -> None:
    body = {
        **ASK, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1, "seed": 3,
        "stop": "END",
        "max_tokens": 9, "logit_bias": {"17": -100}, "ignore_eos": True, "min_tokens": 2,
        "min_audio_frames": 3,
        "max_audio_frames": 8, "greedy_speech": True, "user": "me", "metadata": {"a": "b"},
        "store": False,
        "frequency_penalty": 0, "presence_penalty": 0.0, "n": 1,
        "response_format": {"type": "text"},
    }  # fmt: skip
    assert running.ask(CHAT, body).status == 200
    call = engine.calls[-1]
    params = call["params"]
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (
        0.5,
        0.9,
        0,
        1.1,
    )
    assert (params.seed, params.stop, params.logit_bias) == (3, ("END",), {17: -100})
    assert (params.max_text_tokens, params.max_frames) == (9, 8)
    assert (params.min_text_tokens, params.min_frames) == (2, 3)
    assert params.ignore_eos
    assert params.greedy_speech
    assert call["modalities"] == ("text",)
    assert call["voice"] is None
    running.ask(CHAT, {**ALOUD, "max_tokens": 5, "max_completion_tokens": 7, "stop": ["a", "b"]})
    assert engine.calls[-1]["params"].max_text_tokens == 7
    assert engine.calls[-1]["params"].stop == ("a", "b")
    assert engine.calls[-1]["modalities"] == ("text", "audio")


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("CHELSIE", "Chelsie"),
        ("alloy", "Chelsie"),
        ("onyx", "Ethan"),
        ("Nick", "Aiden"),
        ({"id": "aiden"}, "Aiden"),
        (None, None),
    ],
)
def test_voices_by_any_name(
    asked: Any, given: str | None, running: Running, engine: ScriptedEngine
) -> None:
    assert (
        running.ask(SPEECH, {"input": "Hi", "voice": asked, "response_format": "pcm"}).status == 200
    )
    assert engine.calls[-1]["voice"] == given
    assert running.ask(CHAT, {**ALOUD, "audio": {"voice": asked}}).status == 200
    assert engine.calls[-1]["voice"] == given


def test_speech_fields(running: Running, engine: ScriptedEngine) -> None:
    body = {
        "input": "Hi",
        "model": "scripted",
        "voice": "nova",
        "instructions": None,
        "speed": 1.5,
        "seed": 5,
    }
    assert running.ask(SPEECH, {**body, "min_audio_frames": 2, "max_audio_frames": 6}).status == 200
    params = engine.calls[-1]["params"]
    assert (params.seed, params.min_frames, params.max_frames) == (5, 2, 6)
    assert params.speed == 1.5
    assert engine.calls[-1]["text"] == "Hi"
    assert engine.calls[-1]["client"] == "127.0.0.1", "without keys, addresses take turns"


def test_packets_are_the_servers() -> None:
    engine = ScriptedEngine(packets=SOUND)
    with serve(engine, first_frames=2, each_frames=4, packet_ramp=0) as running:
        assert running.ask(CHAT, ALOUD).status == 200
        assert running.ask(SPEECH, {"input": "Hi", "response_format": "pcm"}).status == 200
    assert [call["params"].packets for call in engine.calls] == [ChunkSizes(2, 4, None)] * 2


@pytest.mark.parametrize("format", ["pcm", "wav", "flac", "mp3", "opus"])
def test_speech_is_sent_as_it_is_made(format: str) -> None:
    """Before the last packet is made, more has come than a header."""
    rest = asyncio.Event()
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, (9, 1920)).astype(np.float32)

    async def gate(event: int) -> None:
        if event == len(noise) - 1:
            await rest.wait()

    engine = ScriptedEngine(pieces=(), packets=list(noise), gate=gate)
    with serve(engine) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
        body = json.dumps({"input": "Hi", "response_format": format})
        connection.request("POST", SPEECH, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert len(answer.read(1000)) == 1000
        assert engine.ledger.running, "it is still being made"
        running.loop.call_soon_threadsafe(rest.set)
        assert answer.read()
        connection.close()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"min_audio_frames": 9, "max_audio_frames": 3}, "min_audio_frames"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"audio": {"format": "ogg"}}, "audio.format"),
        ({"audio": {"pitch": 3}}, "audio.pitch"),
        ({"temprature": 1}, "temprature"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_fields_are_named(
    change: dict[str, Any], param: str, running: Running, engine: ScriptedEngine
) -> None:
    before = engine.ledger.opened
    reply = running.ask(CHAT, {**ASK, **change})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert reply.error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2] in reply.error["message"]
    assert engine.ledger.opened == before


@pytest.mark.parametrize(
    "change",
    [{"speed": 4.5}, {"input": " "}, {"response_format": "amr"}, {"voice": "hal"}, {"x": 1}],
)
def test_bad_speech_is_refused(change: dict[str, Any], running: Running) -> None:
    reply = running.ask(SPEECH, {"input": "Hi", **change})
    assert reply.status == 400
    assert reply.error["param"] == next(iter(change))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [' + b"[" * 5000,
        b"{}",
        b'{"messages": 1e999}',
        b"\x00",
    ],
)
def test_malformed_bodies(body: bytes, running: Running) -> None:
    for path in (CHAT, SPEECH):
        reply = running.ask(path, body)
        assert reply.status == 400
        assert reply.error["type"] == "invalid_request_error"
    assert running.ask("/health").status == 200


# ---- the answer


def test_a_stream_event_by_event(running: Running, engine: ScriptedEngine) -> None:
    reply = running.ask(CHAT, {**ALOUD, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert set(chunks[1]["choices"][0]["delta"]["audio"]) == {"id"}
    data = [
        a["data"] for c in chunks[:-1] if "data" in (a := c["choices"][0]["delta"].get("audio", {}))
    ]
    pcm = b"".join((s * 32767).round().astype("<i2").tobytes() for s in SOUND)
    assert base64.b64decode("".join(data)) == pcm
    assert all(len(base64.b64decode(d, validate=True)) % 6 == 0 for d in data[:-1])
    assert set(chunks[-3]["choices"][0]["delta"]["audio"]) == {"expires_at"}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(engine.pieces) + len(SOUND)


def test_speech_as_events(running: Running) -> None:
    reply = running.ask(
        SPEECH, {"input": "Hi", "response_format": "pcm", "stream_format": "sse", "timeline": True}
    )
    *deltas, done = reply.events
    assert {d["type"] for d in deltas} == {"speech.audio.delta"}
    pcm = b"".join((s * 32767).round().astype("<i2").tobytes() for s in SOUND)
    assert base64.b64decode("".join(d["audio"] for d in deltas)) == pcm
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["output_tokens"] == len(SOUND)
    assert done["usage"]["stretto"]["timeline"] == []


def test_tools_are_called(tmp_path: Path) -> None:
    said = (
        'One moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    )
    pieces = [said[i : i + 5] for i in range(0, len(said), 5)]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    engine = ScriptedEngine(pieces=pieces, packets=SOUND)
    with serve(engine) as running:
        options: Any = {"model": "scripted", "messages": ASK["messages"], "tools": [tool]}
        whole = running.client().chat.completions.create(**options).choices[0]
        assert engine.calls[-1]["tools"] == [tool]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "One moment."
        [call] = whole.message.tool_calls or []
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Köln"}
        with running.client().chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == "One moment."
        [again] = streamed.message.tool_calls or []
        assert (again.function.name, again.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )
        assert again.id.count("call_") == 1
        plain = running.ask(CHAT, {**ASK, "tools": [tool], "tool_choice": "none"}).json["choices"][
            0
        ]
        assert plain["message"]["content"] == said
        assert plain["finish_reason"] == "stop"
        aloud = running.ask(CHAT, {**ALOUD, "tools": [tool]}).json["choices"][0]["message"]
        assert aloud["tool_calls"][0]["function"]["name"] == "weather"
        assert aloud["audio"]["transcript"] == "One moment."


# ---- errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Invalid("bad", "messages"), 400, "invalid_request_error"),
        (Busy("full"), 429, "rate_limit_error"),
        (StageDead("the talker died"), 503, "server_error"),
        (WireError("corrupt"), 502, "server_error"),
        (Bug("invariant"), 500, "server_error"),
        (RuntimeError("secret detail"), 500, "server_error"),
    ],
)
def test_engine_errors(error: Exception, status: int, kind: str) -> None:
    """Before the first event an error has its status; later it is told within the stream."""
    engine = ScriptedEngine(packets=SOUND, error=error)
    with serve(engine) as running:
        for stream in (False, True):
            engine.fail_at = 0
            early = running.ask(CHAT, {**ALOUD, "stream": stream})
            assert early.status == status
            assert early.error["type"] == kind
            assert ("retry-after" in early.headers) == (status in (429, 503))
            assert "secret" not in early.error["message"]
        engine.fail_at = 3
        late = running.ask(CHAT, {**ALOUD, "stream": True})
        assert late.status == 200
        assert late.events[-1]["error"]["type"] == kind
        assert "[DONE]" not in late.events
        assert "secret" not in late.body.decode()
        with pytest.raises(openai.APIError):
            list(running.client().chat.completions.create(model="scripted", stream=True, **ALOUD))
        with pytest.raises(
            (http.client.IncompleteRead, ConnectionError)
        ):  # cut: half a sentence is not the whole
            running.ask(SPEECH, {"input": "Hi", "response_format": "pcm"})
        assert not engine.ledger.running
        assert running.ask("/live").status == 200


def test_errors_become_exceptions() -> None:
    engine = ScriptedEngine(fail_at=0, error=Busy("full"))
    with serve(engine, api_key=("k",)) as running:
        with pytest.raises(openai.AuthenticationError):
            running.client().models.list()
        with pytest.raises(openai.RateLimitError):
            running.client(api_key="k").chat.completions.create(model="scripted", **ASK)
        engine.error = StageDead("gone")
        with pytest.raises(openai.InternalServerError) as caught:
            running.client(api_key="k").chat.completions.create(model="scripted", **ASK)
        assert caught.value.status_code == 503
        assert caught.value.code == "stage_dead"


def test_other_routes_fail_in_the_same_shape() -> None:
    engine = ScriptedEngine(numbers=None)  # type: ignore[arg-type]
    with serve(engine) as running:
        reply = running.ask("/metrics")
        assert reply.status == 500
        assert reply.error["code"] == "internal_error"
        assert running.ask("/health").status == 200


def test_unknown_paths_and_methods(running: Running) -> None:
    assert running.ask("/v1/nothing").error["type"] == "invalid_request_error"
    assert running.ask("/v1/nothing").status == 404
    assert running.ask(CHAT, method="GET").status == 405
    assert running.ask(CHAT, method="GET").error["message"]
    assert running.ask("/v1/models/other").error["code"] == "model_not_found"


# ---- who may come in


def test_keys() -> None:
    with serve(ScriptedEngine(), api_key=("first", "second")) as running:
        for key in ("first", "second"):
            assert (
                running.ask("/v1/models", headers={"Authorization": f"Bearer {key}"}).status == 200
            )
            assert running.ask("/v1/models", headers={"api-key": key}).status == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"Authorization": "Bearer "},
        ):
            reply = running.ask(CHAT, ASK, headers=headers)
            assert reply.status == 401
            assert reply.error["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        for open_path in ("/health", "/live", "/version", "/metrics"):
            assert running.ask(open_path).status == 200
        answer = running.ask(CHAT, ALOUD, headers={"Authorization": "Bearer first"}).json
        said = {
            "role": "assistant",
            "audio": {"id": answer["choices"][0]["message"]["audio"]["id"]},
        }
        body = {"messages": [*ASK["messages"], said, *ASK["messages"]]}
        assert running.ask(CHAT, body, headers={"Authorization": "Bearer first"}).status == 200
        assert (
            running.ask(CHAT, body, headers={"Authorization": "Bearer second"}).status == 400
        )  # not its own


def test_request_ids(running: Running, engine: ScriptedEngine) -> None:
    mine = running.ask(CHAT, ASK, headers={"X-Request-Id": "my-id_1"})
    again = running.ask(CHAT, ASK, headers={"X-Request-Id": "my-id_1"})
    assert mine.headers["x-request-id"] == again.headers["x-request-id"] == "my-id_1"
    inner = [c["request_id"] for c in engine.calls[-2:]]
    assert len(set(inner)) == 2
    assert "my-id_1" not in inner
    for bad in ("", "a b", "x" * 200, "é"):
        out = running.ask(
            "/version", headers={"X-Request-Id": bad.encode().decode("latin-1")}
        ).headers["x-request-id"]
        assert out.startswith("req-")


# ---- numbers, pages, names


def test_metrics(running: Running, engine: ScriptedEngine) -> None:
    running.ask(CHAT, {**ALOUD, "stream": True})
    running.ask(CHAT, b"{")
    reply = running.ask("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = reply.body.decode()
    for name in (
        "time_to_first_token_seconds",
        "time_to_first_audio_seconds",
        "audio_rtf",
        "request_duration_seconds",
    ):
        assert f"# TYPE stretto_{name} histogram" in text
    assert 'stretto_requests_total{route="chat",status="200"}' in text
    assert 'stretto_requests_total{route="chat",status="400"}' in text
    assert 'stretto_queue{stage="talker"} 3.0\n' in text
    assert "# TYPE stretto_steps_total counter\nstretto_steps_total 5.0\n" in text
    from prometheus_client.parser import text_string_to_metric_families

    families = {f.name: f for f in text_string_to_metric_families(text)}
    heard = sum(
        s.value for s in families["stretto_audio_seconds"].samples if s.name.endswith("_total")
    )
    assert heard > 0
    with serve(ScriptedEngine(), metrics=False) as silent:
        assert silent.ask("/metrics").status == 404


def test_names() -> None:
    with serve(ScriptedEngine(), served_model_name=("one", "two")) as running:
        assert [c["id"] for c in running.ask("/v1/models").json["data"]] == ["one", "two"]
        assert running.ask(CHAT, {**ASK, "model": "two"}).json["model"] == "two"
        assert running.ask(CHAT, ASK).json["model"] == "one"
        assert running.ask(CHAT, {**ASK, "model": "scripted"}).status == 404
        assert running.ask("/v1/models/two").json["root"] == "scripted"


def test_the_format_of_quantised_weights_is_listed() -> None:
    with serve(ScriptedEngine(weights="int4, groups of 32")) as running:
        assert running.ask("/v1/models").json["data"][0]["weights"] == "int4, groups of 32"


def test_pages(tmp_path: Path) -> None:
    web = tmp_path / "web"
    (web / "icons").mkdir(parents=True)
    (web / "index.html").write_text("<!doctype html>hello")
    (web / "app.js").write_text("1")
    (web / "icons" / "a.svg").write_text("<svg/>")
    (web / "notes.txt").write_text("not for the web")
    (web / ".hidden.js").write_text("no")
    (tmp_path / "secret.js").write_text("no")
    (web / "link.js").symlink_to(tmp_path / "secret.js")
    engine = ScriptedEngine()

    async def open_engine() -> EngineClient:
        return engine

    async def get(path: str, accept: str = "*/*") -> tuple[int, dict[str, str], bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"accept", accept.encode())],
            "http_version": "1.1", "scheme": "http", "root_path": "",
            "server": ("x", 80), "client": ("y", 1),
        }  # fmt: skip
        await app(scope, receive, send)
        head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return sent[0]["status"], head, b"".join(m.get("body", b"") for m in sent[1:])

    app = make_app(ServerConfig(), open_engine, web)
    for path, kind in (
        ("/", "text/html"),
        ("/app.js", "text/javascript"),
        ("/icons/a.svg", "image/svg+xml"),
    ):
        status, headers, body = asyncio.run(get(path))
        assert status == 200
        assert body
        assert headers["content-type"].startswith(kind)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        policy = dict(
            part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'", "no page may lay itself over this one"
        assert policy["form-action"] == "'self'"
        assert policy["base-uri"] == policy["object-src"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
    for path in (
        "/notes.txt",
        "/.hidden.js",
        "/link.js",
        "/../secret.js",
        "/%2e%2e/secret.js",
        "/icons/",
        "//etc/passwd",
    ):
        assert asyncio.run(get(path))[0] == 404
    status, headers, body = asyncio.run(get("/nowhere", "text/html"))
    assert (status, headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert b"nothing here" in body


def test_root_path_and_timeline() -> None:
    spans = (TimelineSpan("thinker", "step", 0.5, 0.75),)
    with serve(ScriptedEngine(timeline=spans), root_path="/omni", api_key=("k",)) as running:
        assert running.ask("/v1/models").status == 401  # the proxy has taken the prefix off
        assert running.ask("/health").status == 200
        assert running.ask("/").status == 200
        reply = running.ask(CHAT, {**ASK, "timeline": True}, headers={"Authorization": "Bearer k"})
        assert reply.json["stretto"]["timeline"] == [
            {"lane": "thinker", "name": "step", "start": 0.5, "stop": 0.75}
        ]
        assert (
            "timeline"
            not in running.ask(CHAT, ASK, headers={"Authorization": "Bearer k"}).json["stretto"]
        )


def test_nobody_looks_at_a_timeline_that_was_not_asked_for() -> None:
    class Unseen(tuple[TimelineSpan, ...]):
        def __iter__(self) -> Iterator[TimelineSpan]:
            raise AssertionError("it would be made now")

    with serve(ScriptedEngine(timeline=Unseen())) as running:
        assert running.ask(CHAT, ASK).status == 200


def test_the_docs_name_every_number() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    with serve(ScriptedEngine()) as running:
        page = running.ask("/metrics").body.decode()
    types = dict(re.findall(r"^# TYPE (stretto_\w+) (\w+)", page, re.M))
    names = {n for n in types if not n.endswith("_created")}
    assert {n for n in names if f"`{n}`" not in text and f"`{n}{{" not in text} == set()

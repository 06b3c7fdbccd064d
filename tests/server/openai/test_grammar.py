"""Chat answers that must be JSON, follow a schema or call a function. The model's weights are
random: what comes out right is right because of the grammar."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from stretto.config.engine import PoolSettings
from stretto.messages.requests import Admit
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.family import open_grammars
from stretto.params import MAX_GRAMMAR, Params
from tests.engine.common import collect
from tests.server.conftest import HEAD, PATIENCE_S, Running

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["calm", "glad", "cross"]},
        "loudness": {"type": "integer", "minimum": 0, "maximum": 99},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["mood", "loudness", "words"],
    "additionalProperties": False,
}


STRICT = {"type": "json_schema", "json_schema": {"name": "voice", "strict": True, "schema": SCHEMA}}


ASK = [{"role": "user", "content": "How are you?"}]


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "get_time")
]


def create(real_server: Running, **more: Any) -> Any:
    return real_server.client().chat.completions.create(
        model="default", messages=ASK, seed=3, max_tokens=200, **more
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_followed(real_server: Running, temperature: float) -> None:
    answer = create(real_server, response_format=STRICT, temperature=temperature)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_spoken_and_streamed_too(real_server: Running) -> None:
    fields = {
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "stream": True,
    }
    words, sound = "", b""
    for chunk in create(
        real_server, response_format=STRICT, extra_body={"max_audio_frames": 3}, **fields
    ):
        audio = chunk.choices[0].delta.to_dict().get("audio", {})
        words += audio.get("transcript", "")
        sound += base64.b64decode(audio.get("data", ""))
    jsonschema.validate(json.loads(words), SCHEMA)
    assert sound


def test_a_json_object(real_server: Running, tiny_dir: Path) -> None:
    # A random model never comes to an end by itself; this one closes what it may close.
    closing = Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).encode("}").ids
    like = {str(id): 100 for id in closing}
    answer = create(
        real_server, response_format={"type": "json_object"}, temperature=1.0, logit_bias=like
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.message.content), dict)


def test_a_call_is_made_where_one_is_required(real_server: Running) -> None:
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ):
        answer = create(
            real_server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "schema is missing"),
        (
            {
                "response_format": {
                    **STRICT,
                    "json_schema": {"name": "x", "schema": {"type": "strang"}},
                }
            },
            "strang",
        ),
        (
            {"response_format": {**STRICT, "json_schema": {"name": "x", "schema": [1]}}},
            "a JSON schema is an object",
        ),
        ({"response_format": STRICT, "min_tokens": 3}, "leave out min_tokens"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "no function other",
        ),
        ({"tool_choice": "required"}, "tools has no function"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_what_cannot_be_followed_is_a_400(
    real_server: Running, body: dict[str, Any], says: str
) -> None:
    reply = real_server.ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 5, **body})
    assert reply.status == 400
    assert says in reply.error["message"]
    assert str(reply.error["param"]).startswith(tuple(body)), "also where a stage found it"


ENDLESS = {
    "type": "integer",
    "multipleOf": 9_999_991,
}  # compiles for more than a minute, and takes gigabytes


def structured(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": ASK, "max_tokens": 5, "response_format": shape, **more}


def optional(count: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def references(count: int) -> dict[str, Any]:
    """A chain of them: the compiler recurses along it."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (ENDLESS, "it takes more than"),
        (references(3000), "too deeply"),
        (optional(3500), "too big"),
        ({"anyOf": [optional(2) for _ in range(300)]}, "cannot be followed"),
    ],
    ids=["endless", "deep", "large", "ambiguous"],
)
def test_a_hostile_schema_is_a_400_and_the_hosts_never_see_it(
    real_server: Running, schema: dict[str, Any], says: str
) -> None:
    hosts = real_server.server.service.engine().pids
    reply = real_server.ask("/v1/chat/completions", structured(schema))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert says in reply.error["message"]
    assert "thinker" not in reply.error["message"], "it was found out before"
    assert real_server.ask("/v1/chat/completions", structured(SCHEMA)).status == 200
    assert real_server.server.service.engine().pids == hosts


def test_a_schema_that_is_too_long_is_a_400(real_server: Running) -> None:
    def schema(size: int) -> dict[str, Any]:
        return {"type": "object", "description": "x" * size}

    def tool(size: int, name: str = "long") -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": schema(size)}}

    def called(*tools: dict[str, Any]) -> dict[str, Any]:
        return {"messages": ASK, "tools": list(tools), "tool_choice": "required"}

    at = "response_format.json_schema.schema"
    for body, param in (
        (structured(schema(MAX_GRAMMAR)), at),
        (called(tool(MAX_GRAMMAR)), "tools"),
    ):
        reply = real_server.ask("/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert f"more than the {MAX_GRAMMAR:,} that an answer can follow" in reply.error["message"]
    # The schema itself is short enough, and the grammar around it is not.
    around = len(json.dumps([tool(0, "n" * 64)]))
    reply = real_server.ask("/v1/chat/completions", called(tool(MAX_GRAMMAR - around, "n" * 64)))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert f"letters of at most {MAX_GRAMMAR}" in reply.error["message"]


def test_a_check_ends_when_its_client_leaves(real_server: Running) -> None:
    """One that nothing else would end."""
    pool = real_server.server.service.engine().prompts
    within, pool.settings = (
        pool.settings,
        PoolSettings(grammar_cpu_s=3600.0, grammar_memory_mb=1 << 20),
    )

    async def running(count: int) -> None:
        while pool.grammar_queue.running != count:
            await asyncio.sleep(0.001)

    try:
        with socket.create_connection(("127.0.0.1", real_server.port), timeout=PATIENCE_S) as s:
            data = json.dumps(structured({**ENDLESS, "title": "left"})).encode()
            s.sendall(
                f"POST /v1/chat/completions {HEAD}Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            real_server.do(running(1))
        real_server.do(running(0))
    finally:
        pool.settings = within
    assert real_server.ask("/v1/chat/completions", structured(SCHEMA)).status == 200


def test_the_stage_learns_whose_turn_it_is(
    real_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pipeline] = real_server.server.service.engine().pipelines
    [host] = pipeline.stages_by_host(["thinker"])
    sent: list[Any] = []
    send = host.send

    def record(message: Any, blob: Any = b"") -> None:
        sent.append(message)
        send(message, blob)

    monkeypatch.setattr(host, "send", record)
    assert real_server.ask("/v1/chat/completions", structured(SCHEMA)).status == 200
    assert [bool(m.client) for m in sent if isinstance(m, Admit)] == [True]


def test_a_grammar_that_never_binds_changes_no_token_and_no_neighbour(
    real_server: Running, tiny_dir: Path
) -> None:
    """With two steps in flight, beside requests without a grammar."""
    config = OmniConfig.read(tiny_dir)
    tokenizer, vocab = open_grammars(tiny_dir).tokenizer, []
    for id in range(config.thinker.text.vocab_size):
        letters = tokenizer.decode_bytes([id])
        if not letters or any(b > 126 for b in letters) or tokenizer.is_special_token(id):
            vocab.append(
                id
            )  # not text by itself: a grammar of letters forbids it, so nobody is to pick it
    bias = dict.fromkeys((i for i in vocab if i != config.tokens.im_end), -100.0)
    free = Params(temperature=0.9, max_text_tokens=20, logit_bias=bias, seed=5)
    bound = replace(free, grammar=r"start: /(.|\n)*/")

    engine = real_server.server.service.engine()

    async def ask(params: Params) -> list[int]:
        return (await collect(engine.generate(ASK, modalities=["text"], params=params))).ids

    async def work() -> None:
        alone = [await ask(replace(free, seed=5 + i)) for i in range(3)]
        guided, *others = await asyncio.gather(
            ask(bound), *(ask(replace(free, seed=5 + i)) for i in range(3))
        )
        assert len(guided) > 3
        assert guided == alone[0]
        assert others == alone

    real_server.do(work())

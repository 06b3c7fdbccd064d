"""Answers that must be JSON, follow a schema or call a function, as clients ask for them. The
model's weights are random: what comes out right is right because of the grammar."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from stretto.config.preprocess import PoolSettings
from stretto.errors import Invalid
from stretto.messages.requests import Admit
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.grammars import open_grammars
from stretto.params import MAX_GRAMMAR, Params
from stretto.preprocess.grammars import GrammarGuide
from stretto.preprocess.template import ChatTemplate
from stretto.server.openai.grammar import SPACE
from stretto.stage.guide import Grammars, PenaltyGuide
from tests.engine.common import collect
from tests.server.conftest import HEAD, Running

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


def create(real: Running, **more: Any) -> Any:
    return real.client().chat.completions.create(
        model="default", messages=ASK, seed=3, max_tokens=200, **more
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_followed(real: Running, temperature: float) -> None:
    answer = create(real, response_format=STRICT, temperature=temperature)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_spoken_and_streamed_too(real: Running) -> None:
    fields = {
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "stream": True,
    }
    words, sound = "", b""
    for chunk in create(real, response_format=STRICT, extra_body={"max_audio_frames": 3}, **fields):
        audio = chunk.choices[0].delta.to_dict().get("audio", {})
        words += audio.get("transcript", "")
        sound += base64.b64decode(audio.get("data", ""))
    jsonschema.validate(json.loads(words), SCHEMA)
    assert sound


def test_a_json_object(real: Running, tiny_dir: Path) -> None:
    # A random model never comes to an end by itself; this one closes what it may close.
    closing = Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).encode("}").ids
    like = {str(id): 100 for id in closing}
    answer = create(
        real, response_format={"type": "json_object"}, temperature=1.0, logit_bias=like
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.message.content), dict)


def test_a_call_is_made_where_one_is_required(real: Running) -> None:
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ):
        answer = create(real, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0]
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
def test_what_cannot_be_followed_is_a_400(real: Running, body: dict[str, Any], says: str) -> None:
    reply = real.ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 5, **body})
    assert reply.status == 400
    assert says in reply.error["message"]
    assert str(reply.error["param"]).startswith(tuple(body)), "also where a stage found it"


# ---- what takes too long, or too much

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
    real: Running, schema: dict[str, Any], says: str
) -> None:
    hosts = real.server.service.engine().pids
    reply = real.ask("/v1/chat/completions", structured(schema))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert says in reply.error["message"]
    assert "thinker" not in reply.error["message"], "it was found out before"
    assert real.ask("/v1/chat/completions", structured(SCHEMA)).status == 200
    assert real.server.service.engine().pids == hosts


def test_a_schema_that_is_too_long_is_a_400(real: Running) -> None:
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
        reply = real.ask("/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert f"more than the {MAX_GRAMMAR:,} that an answer can follow" in reply.error["message"]
    # The schema itself is short enough, and the grammar around it is not.
    around = len(json.dumps([tool(0, "n" * 64)]))
    reply = real.ask("/v1/chat/completions", called(tool(MAX_GRAMMAR - around, "n" * 64)))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert f"letters of at most {MAX_GRAMMAR}" in reply.error["message"]


def test_a_check_ends_when_its_client_leaves(real: Running) -> None:
    """One that nothing else would end."""
    pool = real.server.service.engine().prompts
    within, pool.settings = (
        pool.settings,
        PoolSettings(grammar_cpu_s=3600.0, grammar_memory_mb=1 << 20),
    )

    async def running(count: int) -> None:
        while pool.checks.running != count:
            await asyncio.sleep(0.001)

    try:
        with socket.create_connection(("127.0.0.1", real.port), timeout=120) as s:
            data = json.dumps(structured({**ENDLESS, "title": "left"})).encode()
            s.sendall(
                f"POST /v1/chat/completions {HEAD}Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            real.do(running(1))
        real.do(running(0))
    finally:
        pool.settings = within
    assert real.ask("/v1/chat/completions", structured(SCHEMA)).status == 200


def test_the_stage_learns_whose_turn_it_is(real: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    [pipeline] = real.server.service.engine()._pipelines
    sent: list[Any] = []
    send = pipeline.send

    def noted(stages: Any, message: Any, blob: Any = b"") -> None:
        sent.append(message)
        send(stages, message, blob)

    monkeypatch.setattr(pipeline, "send", noted)
    assert real.ask("/v1/chat/completions", structured(SCHEMA)).status == 200
    assert [bool(m.sender) for m in sent if isinstance(m, Admit)] == [True]


# ---- the tokens


def test_a_grammar_that_never_binds_changes_no_token_and_no_neighbour(
    real: Running, tiny_dir: Path
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

    engine = real.server.service.engine()

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

    real.do(work())


# ---- other ways to say which tokens


def create_short(real: Running, **more: Any) -> str:
    body = {"messages": ASK, "max_tokens": 24, "seed": 3, **more}
    return str(real.ask("/v1/chat/completions", body).json["choices"][0]["message"]["content"])


def test_min_p_of_one_is_greedy_and_of_zero_is_nothing(real: Running) -> None:
    greedy, free = create_short(real, temperature=0), create_short(real, temperature=1.0)
    assert create_short(real, temperature=1.0, min_p=1.0) == greedy
    assert create_short(real, temperature=1.0, min_p=0.0) == free != greedy


def test_penalties_make_an_answer_repeat_itself_less(real: Running) -> None:
    def repeats(**more: Any) -> int:
        reply = real.ask(
            "/v1/chat/completions", {"messages": ASK, "max_tokens": 64, "temperature": 0, **more}
        ).json
        words = reply["choices"][0]["message"]["content"].split()
        return len(words) - len(set(words))

    bias = {"logit_bias": {str(i): 20 for i in range(300, 306)}}  # few words, again and again
    assert repeats(**bias, frequency_penalty=2.0, presence_penalty=2.0) < repeats(**bias)
    guide = PenaltyGuide(0.5, 1.0, {7: 3.0, 9: 1.0}, 3)
    for token in (7, 7, 8, 5):
        guide.accept(token)
    assert dict(guide.bias()) == {
        7: 3.0 - 2 * 0.5 - 1.0,
        9: 1.0,
    }  # there is room for three, and two are stated
    assert guide.mask() is None


def test_a_seed_gives_the_same_answer_again(real: Running) -> None:
    first = create_short(real, temperature=1.0, seed=11)
    assert create_short(real, temperature=1.0, seed=11) == first
    assert create_short(real, temperature=1.0, seed=12) != first


def test_several_answers_to_one_question(real: Running) -> None:
    ask = {"messages": ASK, "max_tokens": 8, "temperature": 1.0, "seed": 40, "n": 3}
    reply = real.ask("/v1/chat/completions", ask).json
    texts = [c["message"]["content"] for c in reply["choices"]]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert texts == [
        create_short(real, max_tokens=8, temperature=1.0, seed=40 + i) for i in range(3)
    ]
    assert reply["usage"]["completion_tokens"] > 8 >= reply["usage"]["completion_tokens"] / 3
    told = {0: "", 1: "", 2: ""}
    events = real.ask("/v1/chat/completions", {**ask, "stream": True}).events
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in event["choices"]:
            told[choice["index"]] += choice["delta"].get("content", "")
    assert list(told.values()) == texts
    spoken = real.ask("/v1/chat/completions", {**ask, "modalities": ["text", "audio"]})
    assert (spoken.status, spoken.error["param"]) == (400, "n")


def test_switches_of_the_chat_template(real: Running) -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if shout %}!{% endif %}", ["<|im_end|>"])
    assert template.render([{"role": "user", "content": "hi"}], None, {"shout": True}) == ["hi!"]
    assert create_short(real, chat_template_kwargs={"enable_thinking": False}) == create_short(real)
    for bad in (
        {"messages": 1},
        {"x": "<|im_end|>"},
        {"x": [1]},
        [1],
        {str(i): 1 for i in range(17)},
    ):
        reply = real.ask("/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": bad})
        assert reply.status == 400
        assert "chat_template_kwargs" in reply.error["message"]


# ---- conformance

SCHEMAS = int(os.environ.get("STRETTO_SCHEMAS", "200"))
"""How many random schemas are tried."""


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return random_schema(rng, depth - 1)

    low, more = rng.randint(-50, 50), rng.randint(0, 4)
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": rng.choice(["boolean", "null"])},
        lambda: {"type": "integer", "minimum": low, "maximum": low + 10 * more},
        lambda: {"type": "string", "minLength": more, "maxLength": more + rng.randint(0, 4)},
        lambda: {"type": "string", "pattern": rng.choice(list(PATTERNS)), "maxLength": 12},
        lambda: {"enum": rng.sample(["a", "b c", 1, 2.5, True, None, "ü"], 1 + more)},
        lambda: {"const": rng.choice(["x", 7])},
    ]
    if depth:
        names = rng.sample(["id", "name", "tags", "a b", "ß", 'quote"d'], more)
        makers[2:2] = 3 * [
            lambda: {
                "type": "object",
                "properties": {n: inner() for n in names},
                "required": names[: rng.randint(0, more)],
                "additionalProperties": False,
            },
            lambda: {"type": "array", "items": inner(), "minItems": more // 2, "maxItems": more},
            lambda: {"anyOf": [inner() for _ in range(1 + more // 2)]},
        ]
    return rng.choice(makers)()


PATTERNS = {"^[a-z]{2,4}$": "abc", "^(red|blue)-[0-9]{1,3}$": "red-12", "^[A-Z][a-z]*$": "Ab"}
"""And a word that fits."""


def random_instance(schema: dict[str, Any], rng: random.Random) -> Any:
    """Something that the schema allows, its properties in the schema's order, which answers
    keep."""
    match schema:
        case {"anyOf": choices}:
            return random_instance(rng.choice(choices), rng)
        case {"enum": values}:
            return rng.choice(values)
        case {"const": value}:
            return value
        case {"pattern": pattern}:
            return PATTERNS[pattern]
        case {"type": "integer", "minimum": low, "maximum": high}:
            return rng.randint(low, high)
        case {"type": "string", "minLength": least, "maxLength": most}:
            return "".join(rng.choice('ab "\\\nü漢') for _ in range(rng.randint(least, most)))
        case {"type": "array", "items": items, "minItems": least, "maxItems": most}:
            return [random_instance(items, rng) for _ in range(rng.randint(least, most))]
        case {"type": "object", "properties": properties, "required": required}:
            kept = [n for n in properties if n in required or rng.random() < 0.5]
            return {n: random_instance(properties[n], rng) for n in kept}
        case {"type": "boolean"}:
            return rng.random() < 0.5
    return None


@pytest.fixture(scope="module")
def grammars(tiny_dir: Path) -> Iterator[tuple[Grammars, int]]:
    config = OmniConfig.read(tiny_dir)
    made = Grammars(partial(open_grammars, tiny_dir))
    yield made, config.tokens.im_end
    made.close()


def guide_of(grammars: Grammars, schema: dict[str, Any]) -> GrammarGuide:
    told = json.dumps({**schema, "x-guidance": SPACE})
    return grammars.compile(f"start: %json {told}\n", lambda: None).result()


def walk(guide: GrammarGuide, end: int, rng: random.Random) -> list[int] | None:
    """An answer of a model that picks by chance among what it may; None if it was too long."""
    out: list[int] = []
    while len(out) < 400:
        bits = guide.mask()
        allowed = [
            32 * w + b
            for w, word in enumerate(bits.tolist())
            if word
            for b in range(32)
            if word >> b & 1
        ]
        token = end if end in allowed else rng.choice(allowed)
        if token == end:
            return out
        out.append(token)
        guide.accept(token)
        assert guide.error is None
    return None


def test_random_schemas_are_followed(grammars: tuple[Grammars, int]) -> None:
    """Whatever a model picks is valid; and what is valid, in the order that the schema gives, can
    be picked."""
    made, end = grammars
    tokenizer = made.compiler.result().tokenizer
    whole = 0
    for seed in range(SCHEMAS):
        rng = random.Random(seed)
        schema = random_schema(rng)
        ids = walk(guide_of(made, schema), end, rng)
        if ids is not None:
            whole += 1
            jsonschema.validate(json.loads(tokenizer.decode_bytes(ids)), schema)
        wanted = random_instance(schema, rng)
        jsonschema.validate(wanted, schema)
        guide = guide_of(made, schema)
        for token in tokenizer.tokenize_str(json.dumps(wanted, ensure_ascii=False)):
            assert int(guide.mask()[token // 32]) >> token % 32 & 1, (wanted, schema)
            guide.accept(token)
        assert int(guide.mask()[end // 32]) >> end % 32 & 1, (wanted, schema)
    assert whole > SCHEMAS * 3 // 4


def test_a_schema_that_cannot_be_compiled(grammars: tuple[Grammars, int]) -> None:
    with pytest.raises(Invalid, match="Unimplemented keys"):
        guide_of(grammars[0], {"type": "object", "unevaluatedProperties": False})

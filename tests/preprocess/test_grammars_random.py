"""Grammars made of random schemas: whatever a model picks is valid, and what is valid can be
picked."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import Raw

from stretto.errors import Invalid
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.family import open_grammars
from stretto.preprocess.grammars import GrammarGuide
from stretto.server.openai.grammar import of_format
from stretto.server.openai.schema import JsonSchema, ResponseFormat
from stretto.stage.guide import Grammars

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
    form = JsonSchema("answer", Raw(json.dumps(schema).encode()))
    return grammars.compile(of_format(ResponseFormat("json_schema", form)), lambda: None).result()


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
        for token in tokenizer.tokenize_str(
            json.dumps(wanted, ensure_ascii=False, separators=(",", ":"))
        ):
            assert int(guide.mask()[token // 32]) >> token % 32 & 1, (wanted, schema)
            guide.accept(token)
        assert int(guide.mask()[end // 32]) >> end % 32 & 1, (wanted, schema)
    assert whole > SCHEMAS * 3 // 4


def test_a_schema_that_cannot_be_compiled(grammars: tuple[Grammars, int]) -> None:
    with pytest.raises(Invalid, match="Unimplemented keys"):
        guide_of(grammars[0], {"type": "object", "unevaluatedProperties": False})

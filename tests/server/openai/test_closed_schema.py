"""Objects that list their properties have no others, except where that would contradict the
schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.server.openai.closed_schema import MAX_DEPTH, close_objects


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def closed(**properties: Any) -> dict[str, Any]:
    return {**obj(**properties), "additionalProperties": False}


A, B = obj(a={}), obj(b={})


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (A, closed(a={})),
        (obj(a=A, b={"items": B}), closed(a=closed(a={}), b={"items": closed(b={})})),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({"additionalProperties": A}, {"additionalProperties": closed(a={})}),
        ({**A, "patternProperties": {"x": B}}, {**A, "patternProperties": {"x": closed(b={})}}),
        ({"anyOf": [A, B]}, {"anyOf": [closed(a={}), closed(b={})]}),
        ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({"enum": [A], "default": A}, {"enum": [A], "default": A}),
        (
            {"$defs": {"a": A}, **obj(x={"$ref": "#/$defs/a"})},
            {"$defs": {"a": closed(a={})}, **closed(x={"$ref": "#/$defs/a"})},
        ),
        (
            {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]},
            {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]},
        ),
        (True, True),
    ],
)
def test_objects_are_closed_where_they_stand_alone(schema: Any, wanted: Any) -> None:
    assert close_objects(json.dumps(schema).encode(), "schema") == wanted


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 100_000])
def test_deep_schemas_are_refused(depth: int) -> None:
    with pytest.raises(Invalid):
        close_objects(b'{"items":' * depth + b"{}" + b"}" * depth, "schema")

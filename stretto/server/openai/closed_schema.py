"""Closes the objects of a JSON schema: one that lists its properties has no others, unless the
schema says so. Pure; called by `grammar.py`.

By the standard, an absent `additionalProperties` allows any. A model that is free to add fields may
never come to an end, and clients that leave the word out expect the fields that they listed. An
object stays open where closing it could contradict another part of its schema: beside or below
`allOf`, below an `anyOf` whose parent lists properties, or where a definition is merged that way.
An object that lists no properties is a map, and stays one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from stretto._validation import NOT_JSON, not_json, read_json
from stretto.errors import Invalid

MAX_DEPTH = 256
_MERGED = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "dependentSchemas",
    "allOf", "anyOf", "oneOf", "$ref", "not", "if", "then", "else",
}  # fmt: skip
"""Beside one of these, `properties` may not be all that there is."""
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_ONE = (
    "items", "additionalProperties", "unevaluatedProperties", "contains", "not", "if", "then",
    "else",
)  # fmt: skip
_PARTS_OF_ONE = {"allOf", "not", "if", "then", "else", "dependentSchemas"}
# Python's own reading of numbers: it takes 1 us where msgspec takes 8.
_values = msgspec.json.Decoder(float_hook=float)


def close_objects(schema: bytes, at: str) -> dict[str, Any] | bool:
    """The schema, decoded, with its objects closed."""
    try:
        value = read_json(schema, _values.decode)
    except NOT_JSON as e:
        raise Invalid(f"{at}: {not_json(e)}", at) from None
    if isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise Invalid(f"{at}: a JSON schema is an object", at)
    nodes = list(_nodes(value, at))
    merged_references = any("$ref" in node for node, merged, _ in nodes if merged)
    for node, merged, defined in nodes:
        if (
            merged
            or (defined and merged_references)
            or not isinstance(node.get("properties"), dict)
        ):
            continue
        if not _MERGED & node.keys():
            node["additionalProperties"] = False
    return value


def _nodes(root: dict[str, Any], at: str) -> Iterator[tuple[dict[str, Any], bool, bool]]:
    """Each schema in it: whether it is merged with another one, and whether it is a definition."""
    waiting = [(root, False, False, 0)]
    while waiting:
        node, merged, defined, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise Invalid(f"{at}: the schema is nested deeper than {MAX_DEPTH} levels", at)
        lists = merged or isinstance(node.get("properties"), dict) or "$ref" in node
        # beside `properties`, a reference is merged with them
        yield node, merged or ("$ref" in node and "properties" in node), defined
        for key, child in _children(node):
            below = key in _PARTS_OF_ONE or (key in ("anyOf", "oneOf") and lists)
            waiting.append((child, below, key in ("$defs", "definitions"), depth + 1))


def _children(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in _MAPS:
        if isinstance(found := node.get(key), dict):
            yield from ((key, child) for child in found.values() if isinstance(child, dict))
    for key in _LISTS:
        if isinstance(found := node.get(key), list):
            yield from ((key, child) for child in found if isinstance(child, dict))
    for key in _ONE:
        child = node.get(key)
        if isinstance(child, dict):
            yield key, child

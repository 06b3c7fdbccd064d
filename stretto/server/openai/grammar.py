"""The grammar that an answer must follow, made of `response_format`, `text.format` and
`tool_choice`. Called by chat, responses and realtime sessions; pure. With long schemas (`LONG`) it
takes milliseconds, so its callers use a thread.

The grammar is text in llguidance's form of Lark. JSON is compact: it has no white space that a
model could fill its answer with, and objects have the fields that are listed (`closed_schema.py`).
Whether a grammar can be compiled is checked elsewhere (`preprocess/grammars.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, field

from stretto.errors import Invalid
from stretto.server.openai.closed_schema import close_objects
from stretto.server.openai.schema import ABSENT, ChatRequest, ResponseFormat

NONE, AUTO, REQUIRED = Raw(b'"none"'), Raw(b'"auto"'), Raw(b'"required"')
LONG = 16 << 10
"""Bytes of schemas that take a millisecond or two."""
MOST_CALLS = 8
"""In one answer, where a call is required."""
_COMPACT = {"whitespace_flexible": False}
# as chat templates write the calls that models are taught with
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = b'{"type":"object"}'
_NO_FIELDS = b'{"type":"object","properties":{}}'
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_encode = msgspec.json.Encoder().encode


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class FunctionChoice(msgspec.Struct, frozen=True):
    """`tool_choice` that names a function."""

    function: NamedFunction
    type: str = "function"


class FunctionSchema(msgspec.Struct, frozen=True):
    name: str
    parameters: Raw = field(default_factory=lambda: ABSENT)


class FunctionTool(msgspec.Struct, frozen=True):
    function: FunctionSchema


_choice = msgspec.json.Decoder(FunctionChoice)
_tools = msgspec.json.Decoder(list[FunctionTool])


def calls_required(request: ChatRequest) -> bool:
    return request.tool_choice not in (ABSENT, NONE, AUTO)


def grammar_of(request: ChatRequest, tools: bytes | None) -> str:
    """Empty: the text is free. `tools` are the request's, if it has any."""
    shape = request.response_format
    if calls_required(request):
        if shape is not None and shape.type != "text":
            raise Invalid(
                "response_format: a call is required by tool_choice; leave one of them out",
                "response_format",
            )
        return _of_tools(request, tools)
    return "" if shape is None or shape.type == "text" else of_format(shape)


def schema_bytes(request: ChatRequest, tools: bytes | None) -> int:
    """Of all schemas that `grammar_of` reads."""
    if calls_required(request):
        return len(tools or b"")
    shape = request.response_format
    schema = shape.json_schema.schema if shape is not None and shape.json_schema else ABSENT
    return len(memoryview(schema))


def of_format(shape: ResponseFormat) -> str:
    if shape.type == "json_object":
        return f"start: {_json(_ANY_OBJECT, 'response_format', _COMPACT)}\n"
    at = "response_format.json_schema"
    if shape.json_schema is None or shape.json_schema.schema == ABSENT:
        raise Invalid(f"{at}.schema is missing", at)
    return f"start: {_json(bytes(shape.json_schema.schema), at, _COMPACT)}\n"


def _of_tools(request: ChatRequest, tools: bytes | None) -> str:
    try:
        known = {
            t.function.name: bytes(t.function.parameters) for t in _tools.decode(tools or b"[]")
        }
        only = (
            None
            if request.tool_choice == REQUIRED
            else _choice.decode(request.tool_choice).function.name
        )
    except msgspec.MsgspecError as e:
        raise Invalid(
            f"tool_choice: none, auto, required or a function of tools ({e})", "tool_choice"
        ) from None
    return of_calls(known, only, several=request.parallel_tool_calls is not False)


def check_choice(known: Mapping[str, Any], only: str | None) -> list[str]:
    """The functions of which one must be called: `only`, or any of those that are `known`."""
    names = list(known) if only is None else [only]
    if not names or not set(names) <= set(known):
        raise Invalid(f"tool_choice: tools has no function {', '.join(names)[:100]}", "tool_choice")
    return names


def of_calls(known: Mapping[str, bytes], only: str | None, *, several: bool) -> str:
    """One call of the function that is named, or of any that is known, with their schemas; with
    `several`, any number of the latter."""
    rules = []
    names = check_choice(known, only)
    for i, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise Invalid("tools: names of functions are letters, digits, _ . and -", "tools")
        schema = known[name]
        schema = _NO_FIELDS if schema == b"null" else schema
        head = json.dumps(f'\n{{"name": "{name}", "arguments": ')
        rules += [
            f'c{i}: <tool_call> {head} a{i} "}}\\n" </tool_call>',
            f"a{i}: {_json(schema, 'tools', _SPACED)}",
        ]
    any_call = " | ".join(f"c{i}" for i in range(len(names)))
    more = f' ("\\n" call){{0,{MOST_CALLS - 1}}}' if several and only is None else ""
    return "\n".join([f"start: call{more}", f"call: {any_call}", *rules, ""])


def _json(schema: bytes, at: str, spaces: Mapping[str, Any]) -> str:
    closed = close_objects(schema, at)
    if isinstance(closed, dict):
        closed = {**closed, "x-guidance": spaces}
    return f"%json {_encode(closed).decode()}"

"""What a text must look like, as a grammar: of `response_format` and `tool_choice`. Used by chat,
on the event loop.

The grammar is text in llguidance's form of Lark. Schemas go into it as the JSON that the client
wrote, which takes no time on the event loop: the decoder has checked that each is one whole JSON
value, so nothing in it can end the rule of the grammar. Whether a schema can be followed is found
out where it is compiled (`stage/guide.py`)."""

from __future__ import annotations

import json
import re

import msgspec
from msgspec import Raw, field

from stretto.errors import Invalid
from stretto.server.openai.schema import ABSENT, ChatRequest, ResponseFormat

NONE, AUTO, REQUIRED = Raw(b'"none"'), Raw(b'"auto"'), Raw(b'"required"')
SPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{0,8}"}
"""Between the parts of JSON there is room, but not without end: a model that is lost would fill its
answer with it."""
_SPACE = json.dumps(SPACE)
_OBJECT = Raw(b'{"type":"object"}')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """`tool_choice` that names a function."""

    function: NamedFunction
    type: str = "function"


class Function(msgspec.Struct, frozen=True):
    name: str
    parameters: Raw = field(default_factory=lambda: ABSENT)


class Tool(msgspec.Struct, frozen=True):
    function: Function


_choice = msgspec.json.Decoder(NamedTool)
_tools = msgspec.json.Decoder(list[Tool])


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
        return of_calls(request, tools)
    return "" if shape is None or shape.type == "text" else of_format(shape)


def of_format(shape: ResponseFormat) -> str:
    if shape.type == "json_object":
        return f"start: {_json(_OBJECT, 'response_format')}\n"
    at = "response_format.json_schema"
    if shape.json_schema is None or shape.json_schema.schema == ABSENT:
        raise Invalid(f"{at}.schema is missing", at)
    return f"start: {_json(shape.json_schema.schema, at)}\n"


def of_calls(request: ChatRequest, tools: bytes | None) -> str:
    """One call of the function that is named, or of any; several where parallel calls are not
    turned off."""
    try:
        known = {t.function.name: t.function for t in _tools.decode(tools or b"[]")}
        wanted = (
            list(known)
            if request.tool_choice == REQUIRED
            else [_choice.decode(request.tool_choice).function.name]
        )
    except msgspec.MsgspecError as e:
        raise Invalid(
            f"tool_choice: none, auto, required or a function of tools ({e})", "tool_choice"
        ) from None
    if not wanted or not set(wanted) <= set(known):
        raise Invalid(
            f"tool_choice: tools has no function {', '.join(wanted)[:100]}", "tool_choice"
        )
    rules = []
    for i, name in enumerate(wanted):
        if not _NAME.fullmatch(name):
            raise Invalid("tools: names of functions are letters, digits, _ . and -", "tools")
        schema = known[name].parameters
        schema = _OBJECT if schema == ABSENT else schema
        head = json.dumps(f'\n{{"name": "{name}", "arguments": ')
        rules += [
            f'c{i}: <tool_call> {head} a{i} "}}\\n" </tool_call>',
            f"a{i}: {_json(schema, 'tools')}",
        ]
    any_call = " | ".join(f"c{i}" for i in range(len(wanted)))
    several = request.tool_choice == REQUIRED and request.parallel_tool_calls is not False
    more = f' ("\\n" call){{0,{MOST_CALLS - 1}}}' if several else ""
    return "\n".join([f"start: call{more}", f"call: {any_call}", *rules, ""])


MOST_CALLS = 8
"""In one answer, where a call is required."""


def _json(schema: Raw, at: str) -> str:
    try:
        text = str(memoryview(schema), "utf-8")
    except UnicodeDecodeError as e:
        raise Invalid(f"{at}: the schema is not UTF-8 ({e.reason})", at) from None
    if text.startswith("{"):
        fields = text[1:-1].strip()
        # The last of two fields of one name counts: ours.
        text = f'{{{fields}{"," if fields else ""}"x-guidance":{_SPACE}}}'
    elif text not in ("true", "false"):
        raise Invalid(f"{at}: a JSON schema is an object", at)
    return f"%json {text}"

"""The functions that a client lets the model call, and how they are read from its events.

A session has one `ToolReader`, used on the event loop. Tools are read one by one, since long ones
take milliseconds, and a client that sends the same tools again has them read once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from stretto._validation import NOT_JSON, not_json
from stretto.errors import Invalid
from stretto.preprocess.messages import check_tools
from stretto.server.loop_time import LoopTurns
from stretto.server.realtime import client_events as c

MAX_TOOLS, MAX_TOOLS_BYTES, MAX_TOOL_BYTES = 256, 256 << 10, 64 << 10
AT_ONCE = 16 << 10  # bytes of tools that are read before others have a turn
# Python's own reading of numbers: it takes 1 us where msgspec takes 8.
_values = msgspec.json.Decoder(float_hook=float)
_array = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    json: Raw  # as the client wrote it
    chat: dict[str, Any]  # in the format of chats

    @property
    def schema(self) -> bytes:
        """The schema of its arguments, as JSON."""
        return msgspec.json.encode(self.chat["function"].get("parameters"))


def tools_size(tools: Sequence[Function]) -> int:
    """Bytes of the tools in an event."""
    return sum(len(memoryview(t.json)) + 1 for t in tools)


@dataclass(slots=True)
class ToolReader:
    turns: LoopTurns
    _digest: bytes = b""  # of the last ones that were read
    _tools: tuple[Function, ...] = ()

    async def read(self, fields: c.Common) -> tuple[Function, ...] | None:
        """The tools of an update, in turns of the event loop; those of the update before, if they
        are the same. None: the update names no tools."""
        if bytes(fields.tools) in (b"", b"null"):
            return None
        digest = hashlib.blake2b(fields.tools).digest()
        if digest != self._digest:
            tools = []
            size = 0
            for part in _split(fields.tools):
                size += len(memoryview(part))
                if size > AT_ONCE:
                    await self.turns.take()
                    size = len(memoryview(part))
                if (tool := read_tool(part)) is not None:
                    tools.append(tool)
            self._digest = digest
            self._tools = tuple(tools)
        return self._tools


def _split(tools: Raw) -> list[Raw]:
    """The tools one by one, none of them decoded."""
    if len(memoryview(tools)) > MAX_TOOLS_BYTES:
        raise Invalid(f"tools have more than the {MAX_TOOLS_BYTES:,} bytes allowed", "tools")
    try:
        parts = _array.decode(tools)
    except msgspec.ValidationError:
        raise Invalid("tools must be a list", "tools") from None
    except NOT_JSON as e:
        raise Invalid(f"tools: {not_json(e)}", "tools") from None
    if len(parts) > MAX_TOOLS:
        raise Invalid(f"tools has more than {MAX_TOOLS} functions", "tools")
    if any(len(memoryview(tool)) > MAX_TOOL_BYTES for tool in parts):
        raise Invalid(f"a tool has at most {MAX_TOOL_BYTES:,} bytes", "tools")
    return parts


def read_tool(json: Raw) -> Function | None:
    """One tool. None: it is no function. The model could not call it, and strict clients would not
    get it back as they sent it."""
    try:
        tool = _values.decode(json)
    except NOT_JSON as e:
        raise Invalid(f"tools: {not_json(e)}", "tools") from None
    if not isinstance(tool, dict):
        raise Invalid("tools must be objects", "tools")
    if tool.get("type", "function") != "function":
        return None
    names = ("name", "description", "parameters", "strict")
    [chat] = check_tools(
        [{"type": "function", "function": {k: tool[k] for k in names if k in tool}}]
    )
    return Function(chat["function"]["name"], Raw(bytes(json)), chat)

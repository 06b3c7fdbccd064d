"""Reads the tools of a session's updates and responses. One per session, on the event loop."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from stretto.server.loop_time import LoopTurns
from stretto.server.realtime import client_events as c
from stretto.server.realtime.options import Function, read_tool, split_tools

AT_ONCE = 16 << 10  # bytes of tools that are read before others have a turn


@dataclass(slots=True)
class ToolReader:
    turns: LoopTurns
    _digest: bytes = b""  # of the last ones that were read
    _tools: tuple[Function, ...] = ()

    async def read(self, fields: c.Common) -> tuple[Function, ...] | None:
        """The tools of an update, in turns of the event loop; those of the update before, if they
        are the same."""
        if bytes(fields.tools) in (b"", b"null"):
            return None
        digest = hashlib.blake2b(fields.tools).digest()
        if digest != self._digest:
            tools = []
            size = 0
            for part in split_tools(fields.tools):
                size += len(memoryview(part))
                if size > AT_ONCE:
                    await self.turns.take()
                    size = len(memoryview(part))
                if (tool := read_tool(part)) is not None:
                    tools.append(tool)
            self._digest = digest
            self._tools = tuple(tools)
        return self._tools

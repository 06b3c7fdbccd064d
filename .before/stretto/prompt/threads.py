"""Prompts built in threads of this process: for an engine without a prompt worker, whose callers are trusted.

Keeps the promises of `pool.PromptPool`, but for limits of time and memory, and that the event loop goes on meanwhile: a
thread that decodes holds the interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from stretto.prompt import work
from stretto.prompt.build import PromptBuilder
from stretto.prompt.jobs import BuiltPrompt, Conversation, Outlined
from stretto.prompt.packed import pack
from stretto.prompt.spool import Spool
from stretto.prompt.worker import do_outline


class Prompts(Protocol):
    """Makes prompts of what clients send."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def build(self, talk: Conversation, audio_in_video: bool = False) -> BuiltPrompt: ...

    async def read(self, text: str, sender: str = "") -> BuiltPrompt:
        """Of a text that is to be read aloud."""
        ...

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        """Cut a large JSON object into its short fields and the `long` ones; the caller closes the file."""
        ...

    def metrics(self) -> Mapping[str, float]: ...


class InThreads:
    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def build(self, talk: Conversation, audio_in_video: bool = False) -> BuiltPrompt:
        def run() -> BuiltPrompt:
            messages, tools = talk.parts()
            given = work.decode(messages, "messages"), tools, talk.recalled, audio_in_video
            return BuiltPrompt(pack(work.build_conversation(self._builder, *given)))

        return await asyncio.to_thread(run)

    async def build_local(self, *given: Any, allow_paths: bool) -> BuiltPrompt:
        """Of messages that a caller of this process gave: they may hold arrays and, if allowed, name files."""

        def run() -> BuiltPrompt:
            return BuiltPrompt(pack(self._builder.build(*given, allow_paths=allow_paths)))

        return await asyncio.to_thread(run)

    async def read(self, text: str, sender: str = "") -> BuiltPrompt:
        prompt, spoken = await asyncio.to_thread(work.read_aloud, self._builder, text)
        return BuiltPrompt(pack(prompt), spoken)

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        return await asyncio.to_thread(do_outline, body.view(), long, most)

    def metrics(self) -> Mapping[str, float]:
        return {}

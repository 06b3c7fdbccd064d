"""Prompts of sessions, built in threads: who has long ones keeps nobody waiting who has not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.models.qwen3_omni.prompts import open_builder
from stretto.preprocess.pool import threads as module
from stretto.preprocess.pool.threads import LONG_AT_ONCE, SHORT_CHARS, InThreads
from stretto.preprocess.prompt import Prompt

LONG, SHORT = "x" * (SHORT_CHARS + 1), "y"


class Slow:
    """A builder that waits before it has built something long."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.built: list[str] = []

    def build(
        self, messages: Any, tools: Any, audio_in_video: bool, *, allow_paths: bool
    ) -> Prompt:
        text = messages[0]["content"]
        if text != SHORT:
            assert self.go.wait(60)
        self.built.append(text)
        return Prompt((len(text),))


def ask(prompts: InThreads, client: str, text: str) -> Coroutine[Any, Any, Prompt]:
    return prompts.build_for(client, [{"role": "user", "content": text}], None, allow_paths=False)


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    async def run() -> None:
        builder: Any = Slow()
        prompts = InThreads(builder)
        long = [
            asyncio.create_task(ask(prompts, "hostile", LONG)) for _ in range(LONG_AT_ONCE + 50)
        ]
        await asyncio.sleep(0)  # they begin
        assert (await ask(prompts, "somebody", SHORT)).ids == (1,)
        assert builder.built == [SHORT]
        assert prompts.long_queue.running == LONG_AT_ONCE
        builder.go.set()
        assert {p.ids for p in await asyncio.gather(*long)} == {(len(LONG),)}
        assert prompts.long_queue.running == prompts.long_queue.waiting == 0

    asyncio.run(run())


def test_who_leaves_keeps_the_place_until_the_thread_is_done() -> None:
    async def run() -> None:
        builder: Any = Slow()
        prompts = InThreads(builder)
        gone = asyncio.create_task(ask(prompts, "hostile", LONG))
        waiting = asyncio.create_task(ask(prompts, "other", LONG))
        await asyncio.sleep(0)  # they begin
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (prompts.long_queue.running, prompts.long_queue.waiting) == (LONG_AT_ONCE, 1)
        builder.go.set()
        assert (await waiting).ids == (len(LONG),)
        assert len(builder.built) == 2
        assert prompts.long_queue.running == 0

    asyncio.run(run())


def test_what_counts_as_text() -> None:
    parts = [{"type": "text", "text": "abc"}, {"type": "audio", "data": None}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "tool", "content": "de"},
        {"role": "assistant", "content": None},
    ]
    assert module.num_chars(messages, None) == 5
    calls = [{"function": {"name": "f", "arguments": "z" * 100}}]
    assert module.num_chars([{"role": "assistant", "content": "", "tool_calls": calls}], None) > 100
    assert module.num_chars([], [{"function": {"description": "z" * 100}}]) > 100


def test_the_first_prompt_finds_a_thread_and_all_that_it_imports(tiny_dir: Path) -> None:
    async def run() -> None:
        builder = open_builder(tiny_dir)
        built: list[Any] = []
        seen: Any = SimpleNamespace(
            build=lambda messages: built.extend(messages) or builder.build(messages)
        )
        before = set(threading.enumerate())
        await InThreads(seen).start()
        kinds = [part["type"] for message in built for part in message["content"]]
        assert kinds == ["text", "input_audio", "image_url"]
        assert set(threading.enumerate()) - before, "a thread, which the next prompt finds idle"

    asyncio.run(run())

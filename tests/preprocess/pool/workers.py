"""A pool of prompt workers, messages for it, and what it does."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from stretto.preprocess.pool.jobs import (
    Conversation,
)
from stretto.preprocess.pool.pool import PoolSettings, PromptPool
from tests.preprocess.samples import sound_file, tone

BUILDER = "stretto.models.qwen3_omni.prompts:open_builder"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def picture(side: int) -> dict[str, Any]:
    """A small file of a large white picture."""
    file = io.BytesIO()
    Image.new("L", (side, side), 255).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def sound() -> dict[str, Any]:
    data = base64.b64encode(sound_file(tone(3.0))).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def talk(messages: Any, tools: Any = None, **more: Any) -> Conversation:
    return Conversation.of(
        json.dumps(messages).encode(), json.dumps(tools).encode() if tools else None, **more
    )


def heavy(count: int = 8, **more: Any) -> Conversation:
    """Seconds of work with `roomy_dir`: pictures of 36 million pixels."""
    return talk([{"role": "user", "content": [picture(6000)] * count}], **more)


def processes(pool: PromptPool, name: str = "prompt job") -> list[int]:
    """Children of the worker."""
    assert pool.worker.process is not None
    pid = pool.worker.process.pid
    children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [p for p in children if named(p) == name]


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


T = TypeVar("T")


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}},
    }
]


HELLO = [{"role": "user", "content": "Hello"}]


def with_pool(
    directory: Path, test: Callable[[PromptPool], Coroutine[Any, Any, T]], **settings: Any
) -> T:
    async def run() -> T:
        pool = PromptPool(directory, BUILDER, PoolSettings(**settings))
        await pool.start()
        try:
            return await test(pool)
        finally:
            await pool.close()
            assert not pool.queue.running
            assert not pool.queue.waiting

    return asyncio.run(run())

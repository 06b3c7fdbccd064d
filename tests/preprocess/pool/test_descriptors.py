"""Whatever is asked and however it ends, no process keeps a descriptor, a memory file, a socket or
a child of it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError, WireError
from stretto.preprocess.pool import pool as pool_module
from stretto.preprocess.pool import threads
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.pool import PromptPool, wait_readable
from stretto.preprocess.pool.threads import InThreads
from tests.preprocess.pool.files import descriptors, has_two_spares, until_all_are_closed
from tests.preprocess.pool.workers import (
    HELLO,
    TOOLS,
    heavy,
    picture,
    processes,
    sound,
    talk,
    until,
    with_pool,
)
from tests.preprocess.samples import sound_file, tone

MANY = 300


async def census(pool: PromptPool) -> dict[str, Any]:
    """Of this process, the worker and the children that wait for jobs, when nothing is under
    way."""
    await until(lambda: not pool.metrics()["stretto_prompts_running"])
    await until(lambda: len(processes(pool, "prompt spare")) == 2 and not processes(pool))
    await asyncio.to_thread(until_all_are_closed)
    assert pool.worker.process is not None
    pid = pool.worker.process.pid
    await until(lambda: has_two_spares(pid))
    return {
        "server": descriptors("self"),
        "worker": descriptors(pool.worker.process.pid),
        "children": [descriptors(pid) for pid in processes(pool, "prompt spare")],
    }


async def ended(work: Awaitable[Any]) -> None:
    """Whatever came of it; a file that came goes."""
    with suppress(StrettoError):
        result = await work
        if isinstance(result, tuple):
            result[1].close()


async def left(pool: PromptPool, ask: Callable[[], Awaitable[Any]], steps: int) -> None:
    """A caller that waits for so many turns of the event loop and leaves."""
    task = asyncio.ensure_future(ended(ask()))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_no_process_keeps_anything(roomy_dir: Path) -> None:
    body = json.dumps({"messages": HELLO * 800, "tools": TOOLS}).encode()
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    long = heavy(2)
    said = {"role": "assistant", "audio": {"id": "audio_1"}}

    async def test(pool: PromptPool) -> None:
        def media() -> Awaitable[Any]:
            return pool.build(talk([{"role": "user", "content": [sound(), picture(64)]}]))

        async def outlined(data: bytes, most: int = 1000) -> None:
            with MemFile.of(data) as source:
                await ended(pool.outline(source, ("messages", "tools"), most))

        async def windows() -> None:
            with MemFile.of(sound_file(tone(3.0))) as source:
                await ended(pool.cut(source, 1.0))

        async def all_kinds(count: int) -> None:
            for i in range(count):
                await ended(pool.build(talk(HELLO, TOOLS if i % 2 else None)))
                await ended(pool.read("Read me."))
            for i in range(count // 30):
                await ended(pool.build(talk([*HELLO, said], recalled={"audio_1": "Good day."})))
                await ended(pool.build(talk([*HELLO, said])))  # refused
                await ended(pool.build(Conversation.of(b"[")))
                await ended(pool.build(talk([{"role": "user", "content": "long " * 4000}])))
                await ended(media())
                await ended(pool.build(talk([{"role": "user", "content": [bad]}])))
                await outlined(body)
                await outlined(body[:3000])
                await outlined(b'{"messages":[], "x":"' + b"y" * 2000 + b'"}')
                await windows()
                await left(pool, lambda: pool.read("Read me."), i + 1)
                await left(pool, media, 3 * i + 1)
                await left(pool, lambda: pool.build(long), 3 * i + 1)

        await all_kinds(30)  # what is opened once is open then
        before = await census(pool)
        await all_kinds(MANY)
        assert await census(pool) == before
        assert pool.metrics()["stretto_prompt_worker_restarts_total"] == 0

    with_pool(roomy_dir, test)


def test_an_answer_that_comes_as_its_caller_leaves_is_closed(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave_as_it_comes(answers: socket.socket) -> None:
        await wait_readable(answers)
        raise asyncio.CancelledError

    async def test(pool: PromptPool) -> None:
        with MemFile.of(b'{"messages":[]}') as short, MemFile.of(b" " * 20_000 + b"{}") as long:
            await ended(pool.outline(short, ("messages",), 100))
            before = await census(pool)
            with monkeypatch.context() as patch:
                patch.setattr(pool_module, "wait_readable", leave_as_it_comes)
                for source in (short, long):
                    with pytest.raises(asyncio.CancelledError):
                        await pool.outline(source, ("messages",), 100)
            assert await census(pool) == before
            assert pool.metrics()["stretto_prompts_killed_total"] == 1

    with_pool(tiny_dir, test)


def test_a_prompt_of_text_holds_no_file(tiny_dir: Path) -> None:
    """It may wait, prepared ahead, for a listener who leaves."""

    async def test(pool: PromptPool) -> None:
        await pool.read("Hello.")
        before = descriptors("self")
        prompts = [await pool.read("Hello.") for _ in range(3)]
        assert descriptors("self") == before
        assert len(prompts) == 3

    with_pool(tiny_dir, test)


def test_a_caller_in_this_process_that_leaves_gets_no_file(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [MemFile.of(b"{}")]
    monkeypatch.setattr(threads, "do_outline", lambda *given: (None, made[0]))

    async def run() -> None:
        builder: Any = None
        task = asyncio.create_task(InThreads(builder).outline(made[0], (), 10))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await until(lambda: made[0].fd == -1)

    asyncio.run(run())


def test_a_memory_file_that_cannot_be_filled_is_closed() -> None:
    before = descriptors("self")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            MemFile.of(b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reading, writing = os.pipe()
    for fd in (
        MemFile.of(b"soft").fd,
        reading,
    ):  # one that can still change, one that is no memory file
        with pytest.raises(WireError):
            MemFile.received(fd)
    os.close(writing)
    assert descriptors("self") == before

"""The engine on event loops that are not asyncio's own: Ray Serve's replicas run on uvloop, as may
an application that uses the Python API. uvloop refuses what it does not know of starting processes,
so a loop that does the same stands for it where it is not installed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig, PoolSettings
from stretto.engine.engine import PipelineEngine
from stretto.errors import StageDead
from stretto.params import Params
from stretto.preprocess.pool import worker_process as workerprocess
from tests.engine.common import CHATS, collect, run

KNOWN = {
    "stdin", "stdout", "stderr", "universal_newlines", "shell", "bufsize", "preexec_fn",
    "close_fds", "cwd", "env",
    "startupinfo", "creationflags", "restore_signals", "start_new_session", "executable",
    "pass_fds",
}  # fmt: skip
"""What uvloop takes."""


class Strict(asyncio.SelectorEventLoop):
    async def subprocess_exec(self, *words: Any, **options: Any) -> Any:
        if unknown := set(options) - KNOWN:
            raise ValueError(f"unexpected kwargs: {', '.join(unknown)}")
        return await super().subprocess_exec(*words, **options)


def uv() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


@pytest.mark.parametrize("make", [Strict, uv], ids=["strict", "uvloop"])
def test_hosts_and_prompt_workers_start_on_it(
    make: Callable[[], asyncio.AbstractEventLoop], tiny_dir: Path
) -> None:
    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig(prompts=PoolSettings())) as engine:
            params = Params(max_text_tokens=4, max_frames=4)
            answer = await collect(engine.generate(CHATS["text"], params=params))
            assert len(answer.samples)

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(work())


def test_children_have_process_groups_and_prompts_a_low_priority(
    tiny_dir: Path,
) -> None:
    """So a Ctrl-C is not theirs, and their priorities count: sessions share cores out between them
    first."""

    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig(prompts=PoolSettings())) as engine:
            worker = engine.prompts.worker.process.pid
            hosts = [pid for pid in engine.pids if pid is not None]
            for pid in (worker, *hosts):
                assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)
            ours = {os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, *hosts)}
            assert os.getpriority(os.PRIO_PROCESS, worker) == min(
                19, ours.pop() + workerprocess.NICENESS
            )
            assert not ours

    run(work())


def test_a_prompt_worker_that_cannot_be_started_is_told_at_once(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*words: Any, **options: Any) -> None:
        raise OSError("no more processes")

    async def work() -> None:
        it = workerprocess.WorkerProcess(tiny_dir, "any:thing", PoolSettings(start_timeout_s=1e6))
        monkeypatch.setattr(workerprocess.asyncio, "create_subprocess_exec", refuse)
        with pytest.raises(StageDead, match="cannot be started: no more processes"):
            await it.start()
        await it.close()

    run(work())

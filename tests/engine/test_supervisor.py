"""Hosts that die again and again are started again, later and later, by a clock of the test's
own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import NoReturn

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine import local_host as process
from stretto.engine.local_host import HostProcess
from stretto.engine.pipeline import Pipeline
from stretto.errors import StageDead
from stretto.messages.hosts import Ready, Stats
from stretto.models.qwen3_omni.family import PIPELINE
from tests.engine.scripted import ScriptedHost, ScriptedLauncher, read_reports
from tests.pipeline import STAGES
from tests.virtual import Virtual, run_virtual


@asynccontextmanager
async def supervised(launcher: ScriptedLauncher) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline("p", "", PIPELINE, EngineConfig(), launcher=launcher)
    async with read_reports(pipeline):
        yield pipeline
        await pipeline.close()


async def started(launcher: ScriptedLauncher, count: int) -> ScriptedHost:
    """The host of that number, once it is there: nothing but time passes."""
    while len(launcher.hosts) < count or not launcher.hosts[count - 1].started:
        await asyncio.sleep(0.001)
    return launcher.hosts[count - 1]


async def up(host: ScriptedHost) -> None:
    host.say(Ready(STAGES, 0.0))
    host.say(Stats(0, {"a": 1.0}))
    await asyncio.sleep(0.01)


def test_a_host_that_dies_again_and_again_waits_longer_each_time() -> None:
    """Else a card that is out of order, or a full disk, would have processes started as fast as the
    machine can. One that had come back begins anew."""

    async def work(clock: Virtual) -> None:
        launcher = ScriptedLauncher()
        async with supervised(launcher) as pipeline:
            start = asyncio.create_task(pipeline.start())
            await up(await started(launcher, 1))
            await start

            async def dies(count: int) -> float:
                """How long it takes from the death of this host to the start of the next."""
                (await started(launcher, count)).mark_dead("it died young")
                since = clock.now
                await started(launcher, count + 1)
                return clock.now - since

            waits = [await dies(count) for count in range(1, 8)]
            assert waits[0] < 0.1, "at once: most deaths are a single one"
            assert waits == sorted(waits)
            assert all(longer > 2 * shorter for shorter, longer in pairwise(waits[1:5]))
            assert 10 < waits[-1] < 60, "but it is tried for ever"
            assert pipeline.supervisor.trouble is not None
            assert "it died young" in pipeline.supervisor.trouble

            await up(await started(launcher, 8))
            assert pipeline.ready(STAGES)
            assert pipeline.supervisor.trouble is None
            assert await dies(8) < 0.1

    run_virtual(work)


def test_a_host_that_never_comes_up_is_given_up() -> None:
    async def work(clock: Virtual) -> None:
        launcher = ScriptedLauncher()
        async with supervised(launcher) as pipeline:
            start = asyncio.create_task(pipeline.start())
            for count in range(1, 4):
                (await started(launcher, count)).mark_dead("it died young")
            with pytest.raises(StageDead, match=r"it died young .*\(3 tries\)"):
                await start
            assert len(launcher.hosts) == 3

    run_virtual(work)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_a_host_that_cannot_be_started_now_is_started_later(error: Exception) -> None:
    async def work(clock: Virtual) -> None:
        launcher = ScriptedLauncher(failures=[error])
        async with supervised(launcher) as pipeline:
            start = asyncio.create_task(pipeline.start())
            await up(await started(launcher, 2))
            await start
            assert pipeline.ready(STAGES)

    run_virtual(work)


def test_a_process_that_cannot_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*words: object, **options: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process, "start_apart", refuse)

    async def work() -> None:
        host = HostProcess("h", asyncio.Queue())
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(BlockingIOError) as refused:
            await host.start()
        assert set(os.listdir("/proc/self/fd")) == before, "while the error is being told"
        del refused

    asyncio.run(work())

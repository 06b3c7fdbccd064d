"""Who is taken for stalled, by a clock of the test's own: requests, and the hosts that serve
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.pipeline import Pipeline
from stretto.engine.request import RequestState
from stretto.engine.request_manager import RequestManager
from stretto.messages.hosts import Ping, Stats
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.params import RequestOptions
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.registry import open_model
from stretto.types import RequestId
from tests.engine.scripted import ScriptedHost, ScriptedLauncher
from tests.pipeline import STAGES
from tests.virtual import Virtual, run_virtual

STALL_S = 20.0


class Watched:
    """A pipeline whose one host is scripted, and a request that it works at."""

    def __init__(self, model: Path) -> None:
        config, launcher = EngineConfig(stall_s=STALL_S), ScriptedLauncher()
        self.pipeline = Pipeline("p", "", PIPELINE, config, launcher=launcher)
        self.pipeline.supervisor.make_hosts()
        [self.host] = launcher.hosts
        assert isinstance(self.host, ScriptedHost)
        self.host.started, self.host.state = True, "ready"
        opened, nothing = open_model(model), cast(Any, None)
        self.requests = RequestManager(opened, opened.info, [self.pipeline], config, nothing)
        self.request = RequestState(
            RequestId("r"), self.pipeline, opened, STAGES, PackedPrompt.of_ids((1,)),
            RequestOptions("speech"), nothing, 0.0, 1.0
        )  # fmt: skip
        self.request.samples = 100
        self.requests.running[self.request.id] = self.request

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        self.requests.watch()
        try:
            yield
        finally:
            await self.requests.fail_all()

    def hear(self, clock: Virtual) -> None:
        """Read what the host has said: it has answered, and the request has come on."""
        pings = [m.number for m in self.host.heard() if isinstance(m, Ping)]
        self.host.say(Stats(pings[-1] if pings else 0, {}))
        self.request.progressed_at = clock.now


async def watching(
    watched: Watched, clock: Virtual, seconds: float, every: float | None = None
) -> None:
    """So long, in which the host is heard `every` so often (None: never)."""
    end = clock.now + seconds
    while clock.now < end:
        await asyncio.sleep(every or end - clock.now)
        if every is not None:
            watched.hear(clock)


@pytest.mark.parametrize(
    "stood_still", [0.0, 10 * STALL_S], ids=["all the time", "but stood still"]
)
def test_a_loop_that_stood_still_reads_what_came_before_it_judges(
    tiny_dir: Path, stood_still: float
) -> None:
    """A laptop was closed, or the engine's process was stopped: the hosts did answer, and nobody
    has read it yet."""

    async def work(clock: Virtual) -> None:
        watched = Watched(tiny_dir)
        watched.request.progressed_at = clock.now
        async with watched.watched():
            while (
                watched.host.unanswered_since is None
            ):  # then it was asked, and has not answered yet
                await asyncio.sleep(0.01)
            clock.stand_still(stood_still)
            await asyncio.sleep(0.02)  # the late look, and after it what was there to be read
            watched.hear(clock)
            await watching(watched, clock, 5 * STALL_S, every=0.1)
            assert not watched.request.failed
            assert not watched.host.killed

    run_virtual(work)


def test_who_says_nothing_is_taken_for_stalled(tiny_dir: Path) -> None:
    """Also by a loop that stood still, once it has read all that there was."""

    async def work(clock: Virtual) -> None:
        watched = Watched(tiny_dir)
        watched.request.progressed_at = clock.now
        async with watched.watched():
            await watching(watched, clock, 3.0, every=0.1)
            clock.stand_still(10 * STALL_S)
            await watching(watched, clock, 2 * STALL_S)
            assert watched.request.failed
            assert watched.host.killed
            assert "no answer" in str(watched.host.exit_error())

    run_virtual(work)

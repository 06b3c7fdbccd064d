"""Which hosts hear of a request, and when; and whose requests a death ends. The hosts are
scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.errors import StageDead
from stretto.messages.requests import Admit, Ended, Text
from stretto.params import Params
from tests.engine.common import CHATS, collect, run
from tests.engine.scripted import ScriptedLauncher, start
from tests.pipeline import PROCESSES, STAGES

PARAMS = Params(max_text_tokens=4, max_frames=8)
SPOKEN = ["text", "audio"]


@asynccontextmanager
async def serving(
    model: Path, **config: Any
) -> AsyncIterator[tuple[PipelineEngine, ScriptedLauncher]]:
    launcher = ScriptedLauncher()
    engine = PipelineEngine(model, EngineConfig(**config), launcher)
    await start(engine, launcher)
    yield engine, launcher
    await engine.close()


def admitted(launcher: ScriptedLauncher) -> list[list[Admit]]:
    return [[m for m in host.heard() if isinstance(m, Admit)] for host in launcher.hosts]


async def until(fulfilled: Callable[[], object]) -> None:
    """Looks in every turn of the loop."""
    while not fulfilled():
        await asyncio.sleep(0)


@pytest.mark.parametrize("chat", ["text", "audio"])
def test_all_stages_are_told_of_a_request_at_once(chat: str, tiny_dir: Path) -> None:
    """In the same turn of the loop, before any of them has said a word: what comes over a link
    finds its request announced. One that is not spoken is told to the thinker alone."""

    async def work() -> None:
        async with serving(tiny_dir, placement=PROCESSES) as (engine, launcher):
            spoken = asyncio.create_task(collect(engine.generate(CHATS[chat], params=PARAMS)))
            await until(lambda: any(admitted(launcher)))
            told = admitted(launcher)
            assert [[set(m.stages) for m in some] for some in told] == [
                [{stage}] for stage in STAGES
            ]
            assert len({m.request for some in told for m in some}) == 1

            silent = asyncio.create_task(
                collect(engine.generate(CHATS[chat], modalities=["text"], params=PARAMS))
            )
            await until(lambda: len(engine.requests.running) == 2)
            await until(lambda: sum(map(len, admitted(launcher))) > 3)
            assert [len(some) for some in admitted(launcher)] == [2, 1, 1]
            for task in (spoken, silent):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    run(work())


def test_hosts_and_the_router_know_who_sends_a_text_to_be_read(tiny_dir: Path) -> None:
    """Else all texts count as one client's: in queues of hosts, and where pace refuses speech."""

    async def work() -> None:
        async with serving(tiny_dir) as (engine, launcher):
            reading = [
                asyncio.create_task(collect(engine.speak("Hello.", params=PARAMS, client=client)))
                for client in ("a", "b", "a")
            ]
            await until(lambda: len(admitted(launcher)[0]) == len(reading))
            clients = [admit.client for admit in admitted(launcher)[0]]
            assert sorted(map(clients.count, clients)) == [1, 2, 2]
            running = engine.requests.running.values()
            assert sorted(r.options.client for r in running) == ["a", "a", "b"]
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    run(work())


def test_a_death_ends_only_what_needed_the_dead(tiny_dir: Path) -> None:
    """Not the requests of another replica, nor those that do not speak; nor those whose part there
    had ended, unless what it had sent may not have arrived."""

    async def work() -> None:
        async with serving(tiny_dir, placement=PROCESSES, replicas=2) as (engine, launcher):
            asked = {}
            for name, kinds in (("a", SPOKEN), ("b", SPOKEN), ("c", ["text"]), ("d", ["text"])):
                answer = engine.generate(CHATS["text"], modalities=kinds, params=PARAMS)
                asked[name] = asyncio.create_task(collect(answer))
                # One after the other, so that each replica gets one of the spoken.
                await until(lambda: len(engine.requests.running) == len(asked))
            await until(lambda: sum(map(len, admitted(launcher))) == 8)
            talkers = [h for h in launcher.hosts if h.name.endswith(".1")]
            assert len(talkers) == 2
            talkers[0].mark_dead("it was unplugged")
            await until(lambda: any(t.done() for t in asked.values()))
            for _ in range(20):
                await asyncio.sleep(0)
            [failed] = [t for t in asked.values() if t.done()]
            assert failed in (asked["a"], asked["b"]), "one of the two that are spoken"
            assert isinstance(failed.exception(), StageDead)
            for host in launcher.hosts:
                if not host.name.endswith(".0"):
                    continue
                for m in [m for m in host.heard() if isinstance(m, Admit)]:
                    host.say(Text(m.request, (11, 12)))
                    host.say(Ended(m.request, "thinker", "stop", 0.0, (1.0, 2.0)))
            for name in ("c", "d"):
                assert (await asked[name]).ids == [11, 12]
            rest = [t for t in asked.values() if not t.done()]
            assert len(rest) == 1
            rest[0].cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    run(work())

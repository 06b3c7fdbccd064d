"""A client that leaves frees everything at once, whatever its request was doing. The requests here
would go on for minutes: what is free a few steps later was freed by the cancel alone."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from stretto.config.engine import EngineConfig, HostSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event, TextDelta
from stretto.engine.request import RequestState
from stretto.messages.requests import Cancel, Ended, Throttle
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.models.qwen3_omni.stages.thinker import ThinkerStage
from stretto.models.speech.vocoder_stage import VocoderStage
from stretto.params import Params
from stretto.preprocess.packed_prompt import pack
from stretto.types import GREEDY, RequestId, SamplingParams
from tests.engine.common import CHATS, HandDriven, come_to, freed, held
from tests.pipeline import ONE_HOST, PROCESSES, announcement
from tests.solo import CODE0
from tests.stage.pools import num_held

ENDLESS = Params(max_text_tokens=8000, ignore_eos=True, min_frames=8000, max_frames=8000, seed=3)
"""Thousands of tokens and frames beside any prompt, of several milliseconds each."""
LONG = [{"role": "user", "content": "so many words " * 700}]
NARROW = HostSettings(max_rows=1, prefill_chunk=1, lone_prefill_chunk=1, max_step_tokens=2)
"""One request at a time in each stage, and prompts row by row."""
FRAMES = 120  # of the request whose last packets wait
BUFFERED_S = 2.0

How = Literal["task", "rest", "close"]
"""How a client leaves: its task is cancelled while it waits for an event; or while it does
something else, and closes the iterator on its way out (as the server does), with events left in the
engine's queue; or it just closes it."""


class Client:
    """Asks, and reads until an event of a kind comes (if it is to leave in its midst), or for
    ever."""

    def __init__(
        self, engine: PipelineEngine, how: How, until: type[Event], messages: Any = CHATS["text"],
        params: Params = ENDLESS, **given: Any,
    ) -> None:  # fmt: skip
        self.how, self.until, self.there = how, until, asyncio.Event()
        self.events = cast(
            AsyncGenerator[Event, None], engine.generate(messages, params=params, **given)
        )
        self.task = asyncio.create_task(self._rest() if how == "rest" else self._read())

    async def _read(self) -> None:
        async for event in self.events:
            if isinstance(event, self.until):
                self.there.set()
                if self.how != "task":
                    return

    async def _rest(self) -> None:
        async with aclosing(self.events):
            await self._read()
            await asyncio.Event().wait()

    async def leave(self) -> None:
        if self.how == "close":
            await self.task
            await self.events.aclose()
        else:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


class Running:
    """An engine on a loop of its own, for several tests."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        self.runner = asyncio.Runner()
        self.engine = PipelineEngine(model, config)
        self.runner.run(self.engine.start())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(work)

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module", params=[ONE_HOST, PROCESSES], ids=["one", "processes"])
def running(request: pytest.FixtureRequest, tiny_dir: Path) -> Iterator[Running]:
    config = EngineConfig(placement=request.param, host=NARROW, max_buffered_s=BUFFERED_S)
    made = Running(tiny_dir, config)
    yield made
    made.close()


def request_of(engine: PipelineEngine) -> RequestState:
    [found] = engine.requests.running.values()
    return found


def test_queued(running: Running) -> None:
    """The one that runs goes on; all that the other held, in all stages, is free."""

    async def work() -> None:
        engine = running.engine
        first = Client(engine, "task", TextDelta, modalities=["text"])
        await first.there.wait()
        alone = held(await come_to(engine, lambda v: True), NARROW.link_slots)
        second = Client(engine, "task", TextDelta)
        await come_to(engine, lambda v: v['stretto_stage_waiting{stage="thinker"}'] == 1)
        await come_to(engine, lambda v: v['stretto_stage_requests{stage="talker"}'] == 1)
        await second.leave()
        assert not second.there.is_set()
        left = await come_to(engine, lambda v: set(held(v, NARROW.link_slots)) <= set(alone))
        assert left['stretto_stage_requests{stage="thinker"}'] == 1
        await first.leave()
        await freed(engine)

    running.run(work())


def test_prefill(running: Running) -> None:
    async def work() -> None:
        engine = running.engine
        before = await come_to(engine, lambda v: True)
        rows = 'stretto_stage_rows_total{stage="thinker"}'
        client = Client(engine, "task", TextDelta, LONG)
        await come_to(engine, lambda v: v[rows] > before[rows] + 20)
        assert not client.there.is_set()
        assert not request_of(engine).text.num_tokens
        await client.leave()
        await freed(engine)

    running.run(work())


@pytest.mark.parametrize("how", ["task", "rest", "close"])
def test_decode(running: Running, how: How) -> None:
    async def work() -> None:
        engine = running.engine
        client = Client(engine, how, AudioChunk)
        await client.there.wait()
        while how != "task" and request_of(engine).events.empty():
            await asyncio.sleep(0)
        assert request_of(engine).unfinished == {"thinker", "talker", "code2wav"}
        assert how != "task" or not request_of(engine).throttled, (
            "unless it has not read for too long, on a busy machine"
        )
        await client.leave()
        await freed(engine)

    running.run(work())


@pytest.mark.parametrize("how", ["rest", "close"])
def test_throttled(running: Running, how: How) -> None:
    async def work() -> None:
        engine = running.engine
        client = Client(engine, how, TextDelta)
        await come_to(
            engine, lambda v: bool(engine.requests.running) and request_of(engine).throttled
        )
        assert not request_of(engine).events.empty()
        await client.leave()
        await freed(engine)

    running.run(work())


@pytest.mark.parametrize("how", ["rest", "close"])
def test_all_made_and_not_taken(running: Running, how: How) -> None:
    """The last packet and the end lie in the engine's queue: no stage holds anything, and nor does
    the engine then."""

    async def work() -> None:
        engine = running.engine
        short = replace(ENDLESS, max_text_tokens=4, min_frames=5, max_frames=5)
        client = Client(engine, how, TextDelta, params=short)
        await come_to(
            engine, lambda v: bool(engine.requests.running) and not request_of(engine).unfinished
        )
        assert not request_of(engine).events.empty()
        await client.leave()
        await freed(engine)

    running.run(work())


def test_last_packets(running: Running) -> None:
    """Thinker and talker have ended, and the vocoder, which was held up, has many frames to go: it
    makes no more of them."""
    if running.engine.config.placement == ONE_HOST:
        pytest.skip("there the vocoder cannot be held up alone: see test_by_hand")

    async def work() -> None:
        engine = running.engine
        params = replace(ENDLESS, max_text_tokens=4, min_frames=FRAMES, max_frames=FRAMES)
        made = 'stretto_stage_frames_total{stage="code2wav"}'
        before = (await come_to(engine, lambda v: True))[made]
        client = Client(engine, "task", AudioChunk, params=params)
        await client.there.wait()
        pid = engine.pids[2]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await come_to(
                engine, lambda v: request_of(engine).unfinished == {"code2wav"}, hosts=[0, 1]
            )
            await client.leave()
        finally:
            os.kill(pid, signal.SIGCONT)
        await freed(engine)
        after = (await come_to(engine, lambda v: True))[made]
        assert after - before < FRAMES

    running.run(work())


# -- one host in this process, round by round


def greedy() -> list[SamplingParams]:
    return [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]


def kept(driven: HandDriven) -> dict[str, Any]:
    """What a host remembers of requests."""
    left: dict[str, Any] = {}
    links = driven.host.links
    for name, node in driven.host.stages.items():
        stage = node.core
        left[f"{name}: requests"] = len(stage)
        if isinstance(node, VocoderStage):
            left["slots"] = stage.config.slots - stage.num_free
            left["requests"] = len(node.requests)
        else:
            left[f"{name}: blocks"] = num_held(stage.scheduler.pool)
            left[f"{name}: rows"] = len(stage.scheduler.table.allocation.by_row)
            left[f"{name}: waiting"] = stage.scheduler.num_waiting
            left[f"{name}: out"] = sum(link.num_sending for link in links.sent_by(node))
            mine = (
                (node.requests, node.encoders.requests)
                if isinstance(node, ThinkerStage)
                else (node.requests, node.waiting)
            )
            left[f"{name}: records"] = sum(map(len, mine))
        left[f"{name}: in"] = sum(link.num_receiving for link in links.received_by(node))
    return {k: v for k, v in left.items() if v}


def in_prefill(driven: HandDriven) -> bool:
    return any(stage == "thinker" and stop > 20 for stage, _, stop in driven.launched)


def in_decode(driven: HandDriven) -> bool:
    return sum(type(m).__name__ == "Pcm" for m, _ in driven.reports) >= 3


def at_its_last_packet(driven: HandDriven) -> bool:
    """The talker has ended, and its last frames wait in the vocoder."""
    return {m.stage for m, _ in driven.reports if isinstance(m, Ended)} == {"thinker", "talker"}


STATES: dict[str, tuple[int, int, Callable[[HandDriven], bool]]] = {
    "announced": (4000, 4000, lambda driven: True),
    "prefill": (4000, 4000, in_prefill),
    "decode": (4000, 4000, in_decode),
    "throttled": (4000, 4000, in_decode),
    "last packet": (3, 5, at_its_last_packet),
}


@pytest.mark.parametrize("state", STATES)
def test_by_hand(tiny_dir: Path, state: str) -> None:
    """To the last entry of the last table, and nothing is said of the request any more."""
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    packed = pack(builder.build(CHATS["text"]))
    tokens, frames, reached = STATES[state]
    driven = HandDriven(tiny_dir, NARROW)
    id, vocoder = RequestId("r"), driven.host.stages["code2wav"].core
    work = vocoder.launch
    if state == "last packet":
        vocoder.launch = lambda: False  # type: ignore[method-assign]
    try:
        whole = {"min_text_tokens": tokens, "min_frames": frames}
        driven.host.handle(
            announcement(id, packed, True, None, *greedy(), tokens, frames, **whole),
            packed.feature_bytes(),
        )
        while not reached(driven):
            assert driven.host.loop.round()
        if state == "throttled":
            driven.host.handle(Throttle(id, True), b"")
            while driven.host.loop.round():
                pass
        assert len(vocoder) == 1
        driven.host.handle(Cancel(id), b"")
        vocoder.launch = work  # type: ignore[method-assign]
        said, made = len(driven.reports), vocoder.stats.rows
        for _ in range(driven.host.context.settings.overlap_depth):
            driven.host.loop.round()
        assert not kept(driven)
        assert (len(driven.reports), vocoder.stats.rows) == (said, made), (
            "nothing more is made of it"
        )
        assert not driven.host.loop.round(), "there is nothing left to do"
    finally:
        driven.host.close()

"""Hosts in network namespaces of their own, so that each has an address of its own: what 127.0.0.1
would hide (missing addresses, listening on the wrong one) shows. Makes namespaces and a bridge, so
it must be asked for, by root: `make netns` runs it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.invitation import Invitation
from stretto.engine.remote_host import RemoteLauncher
from stretto.errors import Invalid, StageDead
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.transport.registry import connectors
from tests.engine.agents import SECRET, ProcessAgent, ProcessStarter
from tests.engine.answer_recorder import AnswerRecorder
from tests.engine.common import CHATS, collect, expected, run, same
from tests.engine.spoken import Plain, check_realtime, check_session
from tests.pipeline import STAGES
from tests.server.real_engine import served

pytestmark = pytest.mark.netns
BRIDGE, OURS = "strettobr", "10.77.0.1"
NAMES = ("stretto-a", "stretto-b")
SHORT = Params(max_text_tokens=8, max_frames=10, greedy_speech=True, want_codes=True, seed=5)
LONG = Params(max_text_tokens=900, max_frames=3000, min_frames=3000, ignore_eos=True, seed=5)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def address(number: int) -> str:
    return f"10.77.0.{number + 2}"


def take_down() -> None:
    for words in (*(("netns", "del", name) for name in NAMES), ("link", "del", BRIDGE)):
        subprocess.run(["ip", *words], check=False, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    if "STRETTO_NETNS" not in os.environ or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("makes network namespaces: `make netns`, as root")
    take_down()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{OURS}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for i, name in enumerate(NAMES):
            ip("netns", "add", name)
            ip("link", "add", f"stretto{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"stretto{i}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address(i)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        take_down()


@dataclass(slots=True)
class NeedsProcess(ProcessStarter):
    """Each agent in a namespace of its own."""

    numbers: list[int] = field(default_factory=list)

    async def start(self, invitation: Invitation, number: int) -> ProcessAgent:
        self.numbers.append(number)
        self.address, self.prefix = address(number), ("ip", "netns", "exec", NAMES[number])
        return await ProcessStarter.start(self, invitation, number)


@pytest.mark.parametrize("connector", ["tcp", "mooncake"])
def test_hosts_at_other_addresses_answer_exactly(
    connector: str, network: None, tiny_dir: Path, models: Models
) -> None:
    try:
        connectors.get(connector)
    except Invalid as e:
        pytest.skip(str(e))
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))

    async def work() -> None:
        starter = NeedsProcess()
        config = EngineConfig(placement="two", connector=connector)
        it = PipelineEngine(tiny_dir, config, RemoteLauncher(starter, SECRET, OURS))
        await it.start()
        try:
            for chat in CHATS:
                got = await collect(it.generate(CHATS[chat], params=SHORT))
                same(got, expected(models, builder, CHATS[chat], SHORT))
            assert [h.address for h in it.pipelines[0].supervisor.hosts] == [
                address(0),
                address(1),
            ]
            await check_session(it, Plain(models, builder))
            events = it.generate(CHATS["text"], params=LONG)
            async for e in events:
                if type(e).__name__ == "AudioChunk":
                    break
            ip("link", "set", "stretto1", "down")  # the network of a machine is cut
            with pytest.raises(StageDead):
                async for _ in events:
                    pass
            ip("link", "set", "stretto1", "up")
            while not it.pipelines[0].ready(STAGES):
                await asyncio.sleep(0.05)
            got = await collect(it.generate(CHATS["text"], params=SHORT))
            same(got, expected(models, builder, CHATS["text"], SHORT))
        finally:
            await it.close()
        await starter.ended()

    run(work())


def test_realtime_with_stages_at_other_addresses_answers_exactly(
    network: None, tiny_dir: Path, models: Models
) -> None:
    plain = Plain(models, PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))
    starter = NeedsProcess()
    it = AnswerRecorder(
        tiny_dir,
        EngineConfig(placement="two", connector="tcp"),
        RemoteLauncher(starter, SECRET, OURS),
    )
    it.answers = []
    with served(it) as server:
        assert [h.address for h in it.pipelines[0].supervisor.hosts] == [address(0), address(1)]
        check_realtime(server.running, it, plain)
        server.do(it.close())
        server.do(starter.ended())

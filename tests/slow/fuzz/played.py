"""Damaged control messages from hosts to an engine. The hosts are simulated here. For
control.py."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench.harness.host import STAGES
from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.host_handle import HostHandle
from stretto.engine.local_host import HostProcess
from stretto.engine.request import RequestState
from stretto.errors import StageDead, StrettoError
from stretto.messages.hosts import (
    Broken,
    Connect,
    LinkDown,
    Linked,
    Listen,
    Listening,
    Loading,
    Ready,
    Stats,
)
from stretto.messages.requests import (
    PREFIX,
    Ended,
    Failed,
    FromHost,
    decode_from_host,
    decode_to_host,
    encode,
    lengths,
)
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import RequestOptions
from stretto.preprocess.packed_prompt import pack
from tests.slow.fuzz.mutants import (
    IDS,
    LINKS,
    LOOK_EVERY,
    PARAMS,
    Frame,
    Said,
    changed,
    named,
    readable,
)
from tests.slow.harness.leaks import CHATS


class Wire:
    """A channel to a simulated host: it confirms links when told to make them, and ignores the
    rest."""

    def __init__(self, host: HostProcess) -> None:
        self.host = host

    def write(self, data: bytes) -> None:
        if len(data) < PREFIX.size or sum(lengths(data[: PREFIX.size])) == 0:
            return
        header, _ = lengths(data[: PREFIX.size])
        if len(data) != PREFIX.size + header:
            return  # a blob
        match decode_to_host(data[PREFIX.size :]):
            case Listen(link=link, generation=generation):
                self._say(Listening(link, generation, b"here"))
            case Connect(link=link, generation=generation):
                self._say(Linked(link, generation))

    def _say(self, message: FromHost) -> None:
        asyncio.get_running_loop().call_soon(self.host.receive, encode(message))

    def close(self) -> None:
        pass


class Played:
    """An engine with simulated hosts, and some requests that wait for them."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(placement="processes", restart=False, max_buffered_s=0.1)
        self.engine = PipelineEngine(model, config)
        self.builder = PromptBuilder.open(model, OmniConfig.read(model))
        self.prompt = pack(self.builder.build(CHATS["text"]))
        self.pipeline = self.engine.pipelines[0]
        self.engine._up = self.pipeline.supervisor.started = True
        links = self.pipeline.supervisor.links
        links.up = dict.fromkeys(links.up, True)
        self.pipeline.supervisor.make_hosts()
        for host in self.pipeline.supervisor.hosts:
            self.connect(host)
        self.engine.requests.read_reports()

    def connect(self, host: HostHandle) -> None:
        assert isinstance(host, HostProcess)
        host._transport = Wire(host)  # type: ignore[assignment]
        host.state = "ready"

    @property
    def requests(self) -> list[RequestState]:
        return list(self.engine.requests.running.values())

    async def fill(self) -> None:
        """Replace dead hosts and finished requests, so that there is always something to damage."""
        for i, host in enumerate(self.pipeline.supervisor.hosts):
            if host.state == "dead":
                self.connect(self.pipeline.supervisor.replace_host(i))
        while not self.pipeline.ready(STAGES):
            await self.pipeline.supervisor.links.join()
        for request in self.requests:
            failed = False
            while not (failed or request.over or request.events.empty()):
                try:
                    await request.next_event()
                except StrettoError:
                    failed = True
            if failed or request.over:
                self.engine.requests.remove(request)
        while len(self.engine.requests.running) < len(IDS):
            speaks = len(self.engine.requests.running) % 3 > 0
            options = RequestOptions("speech" if speaks else "text", PARAMS)
            self.engine.requests.admit(self.prompt, options, 0.0)

    def look(self) -> None:
        p = self.pipeline
        assert len(self.requests) == len(IDS), len(self.requests)
        assert set(p.supervisor.progress) == set(STAGES), p.supervisor.progress
        assert set(p.supervisor.memory) <= {*STAGES, "allocated"}, p.supervisor.memory
        assert len(p.supervisor._tasks) <= len(LINKS) + 1, p.supervisor._tasks
        assert self.engine.progress.state == "ready"
        assert all(isinstance(v, int | float) for v in self.engine.metrics().values())

    def check_death(self, host: HostHandle, index: int) -> None:
        """A host that talked nonsense is dead, and so are the requests that need it."""
        stages = {STAGES[index]}
        for t in self.requests:
            assert t.failed or not stages & t.unfinished, f"{t.id} waits for a dead host"
        assert isinstance(host.exit_error(), StageDead)


def spoken(reports: Said) -> list[Frame]:
    """Messages of every kind that a host sends."""
    r = IDS[0]
    more: list[FromHost] = [
        Loading("talker", "loading"),
        Ready(("talker",), 1.0, {"talker": 5, "allocated": 7}),
        Broken("StageDead", "it broke"),
        Listening("thinker>talker", 1, b"here"),
        Linked("talker>code2wav", 1),
        LinkDown("thinker>talker", 1, "it broke"),
        LinkDown("talker>code2wav", 1, "it broke"),
        Failed(r, "talker", "Busy", "full"),
        Failed(r, "thinker", "ValueError", "what"),
        Stats(1, {"stretto_x": 1.0, 'stretto_y{stage="talker"}': 2.0}),
        *(Ended(r, stage, "stop", 1.0, (1.5, 2.0), 3, (1.2,)) for stage in STAGES),
    ]
    return [(encode(m)[PREFIX.size :], b) for m, b in [*reports, *((m, b"") for m in more)]]


async def from_host(
    model: Path, reports: Said, inputs: int, seed: int, step: Callable[[], None]
) -> Counter[str]:
    rng, outcomes = random.Random(seed), Counter[str]()
    corpus, played = spoken(reports), Played(model)
    for index in range(inputs):
        await played.fill()
        header, blob = changed(rng, corpus, [t.id for t in played.requests])
        which = rng.randrange(len(STAGES))
        host = played.pipeline.supervisor.hosts[which]
        with named(index, "from a host", header, blob):
            message = readable(decode_from_host, header)
            what = "refused" if message is None else type(message).__name__
            data = PREFIX.pack(len(header), len(blob)) + header + blob
            cut = rng.randrange(len(data))
            host.receive(data[:cut])
            host.receive(data[cut:])
            await asyncio.sleep(0)  # it is read
            await asyncio.sleep(0)
            if host.state == "dead":
                played.check_death(host, which)
            assert message is not None or host.state == "dead", (
                "what cannot be read must end the host"
            )
            outcomes[f"from a host: {what}{', it is killed' if host.state == 'dead' else ''}"] += 1
            if index % LOOK_EVERY == LOOK_EVERY - 1:
                await played.fill()
                await asyncio.sleep(0)
                played.look()
        step()
    for t in played.requests:
        played.engine.requests.remove(t)
    assert not played.engine.requests.running
    await played.engine.close()
    return outcomes

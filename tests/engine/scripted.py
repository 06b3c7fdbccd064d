"""Hosts without a process: they note what they are sent, and report what a test has them report;
and a reader of reports for pipelines without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stretto.engine.engine import PipelineEngine
from stretto.engine.host_handle import HostHandle, HostMessage, HostReports, StagesLost
from stretto.engine.pipeline import Pipeline
from stretto.messages.hosts import Configure, Connect, Linked, Listen, Listening, Ping, Ready, Stats
from stretto.messages.requests import PREFIX as PREFIX
from stretto.messages.requests import (
    Admit,
    Ended,
    FromHost,
    ToHost,
    decode_to_host,
    encode,
    lengths,
)
from stretto.preprocess.packed_prompt import Bytes


class ScriptedHost(HostHandle):
    started = False
    killed = False

    def __init__(
        self,
        name: str,
        reports: HostReports,
        number: int,
        device: str,
        fail: Exception | None,
    ) -> None:
        super().__init__(name, reports, number, device)
        self.sent = bytearray()
        self.answered = 0  # messages of those that it was sent
        self.fail = fail

    @property
    def pid(self) -> int | None:
        return None

    async def start(self) -> None:
        if self.fail is not None:
            raise self.fail
        self.started = True

    async def stop(self, timeout: float = 5.0) -> None:
        self.state = "dead"

    def kill(self) -> None:
        self.killed = True

    def _write(self, data: Bytes) -> None:
        if self.started:
            self.sent += data

    def _close(self) -> None:
        pass

    def say(self, message: FromHost) -> None:
        self.receive(encode(message))

    def live(self, warm_up: bool = False) -> None:
        """Answer what it has been sent of its own life since the last time: it loads, is linked,
        gives signs and, with `warm_up`, ends requests at once."""
        heard = self.heard()
        for message in heard[self.answered :]:
            match message:
                case Configure(stages=stages):
                    self.say(Ready(stages, 0.0))
                case Listen(link=link, generation=generation):
                    self.say(Listening(link, generation, b"somewhere"))
                case Connect(link=link, generation=generation):
                    self.say(Linked(link, generation))
                case Ping(number=number):
                    self.say(Stats(number, {"numbers": 1.0}))
                case Admit(request=request, stages=stages) if warm_up:
                    for stage in stages:
                        self.say(Ended(request, stage, "stop", 0.0, (1.0, 2.0)))
        self.answered = len(heard)

    def forget(self) -> None:
        """What it was sent so far."""
        self.sent.clear()
        self.answered = 0

    def heard(self) -> list[ToHost]:
        """All that it was sent, in order."""
        found, rest = [], bytes(self.sent)
        while rest:
            header, blob = lengths(rest[: PREFIX.size])
            found.append(decode_to_host(rest[PREFIX.size : PREFIX.size + header]))
            rest = rest[PREFIX.size + header + blob :]
        return found


@dataclass(slots=True)
class ScriptedLauncher:
    """`failures` befall the starts of hosts, the first ones first."""

    hosts: list[ScriptedHost] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def host(self, name: str, number: int, device: str, reports: HostReports) -> HostHandle:
        fail = self.failures.pop(0) if self.failures else None
        self.hosts.append(ScriptedHost(name, reports, number, device, fail))
        return self.hosts[-1]


@asynccontextmanager
async def read_reports(*pipelines: Pipeline) -> AsyncIterator[list[HostMessage | StagesLost]]:
    """Reads the reports of pipelines as an engine would; what they pass on."""
    passed_on: list[HostMessage | StagesLost] = []

    async def read(pipeline: Pipeline) -> None:
        async for report in pipeline.reports():
            passed_on.append(report)

    tasks = [asyncio.create_task(read(p)) for p in pipelines]
    try:
        yield passed_on
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def start(engine: PipelineEngine, launcher: ScriptedLauncher) -> None:
    """Until it has sent its warm-up requests; hosts do not remember them."""
    task = asyncio.create_task(engine.start())
    while not task.done():
        await asyncio.sleep(0)
        for host in launcher.hosts:
            host.live(warm_up=True)
    await task
    for host in launcher.hosts:
        host.forget()


async def rest() -> None:
    """Lets the event loop do what is there to be done."""
    for _ in range(20):
        await asyncio.sleep(0)

"""One pipeline: the hosts that hold a set of stages, and the links between them. Keeps them up.

Hosts start in parallel. A link is made by asking the receiving host to listen and handing what it answers to the
sending host, both with a secret that is new each time, by which the ends know each other. When a host dies, or a link
goes down, the requests that it touched are failed at once by the engine; the host is started again and its links are
made anew under a higher generation. Requests that need none of it go on. A host that does not answer is killed, and
then is a dead one."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from stretto.control.messages import (
    Broken,
    Configure,
    Connect,
    Ended,
    Features,
    FromHost,
    LinkDown,
    Linked,
    Listen,
    Listening,
    Loading,
    Ready,
    Stats,
    ToHost,
    Unlink,
)
from stretto.control.settings import EngineConfig, places
from stretto.errors import StageDead, StrettoError, WireError
from stretto.family import LinkSpec, PipelineSpec
from stretto.observe.recorder import labelled
from stretto.observe.trace import TraceWriter
from stretto.orchestrator.cards import Cards
from stretto.orchestrator.hosts import Host, Launcher, Unusable
from stretto.orchestrator.process import LocalLauncher
from stretto.prompt.packed import Bytes
from stretto.prompt.spool import Stored
from stretto.types import SECRET_BYTES, RequestId

log = logging.getLogger(__name__)

RESTART_DELAYS = (0.0, 0.2, 1.0, 5.0, 15.0)
FIRST_STARTS = 3  # of a host that dies before its pipeline was ever up; then it is given up
PIECE = 256 << 10  # bytes of features in one message
TOLD = ("Invalid", "StageDead", "DoesNotFit", "CheckpointError", "CpuError", "StrettoError")
"""Errors whose words say all: their names are for programmers."""
LINK_DELAYS = (0.05, 0.2, 0.5, 1.0)
"""Pauses between tries to make a link."""


class Pipeline:
    def __init__(
        self,
        name: str,
        model: str,
        spec: PipelineSpec,
        config: EngineConfig,
        on_message: Callable[[FromHost, bytes], None],
        on_loss: Callable[[Pipeline, frozenset[str], StrettoError], None],
        trace: TraceWriter | None = None,
        launcher: Launcher | None = None,
        cards: Cards | None = None,
    ) -> None:
        """`on_loss` is told which stages can no longer be reached, and why; `trace` is given what hosts did when.
        `launcher` makes the hosts (default: children of this process); `cards` are those that other pipelines use
        too."""
        self.trace, self._launcher = trace, launcher or LocalLauncher()
        self.name, self.model, self.spec, self.config = name, model, spec, config
        self._places = places(config.placement, spec.names)
        self._on_message, self._on_loss = on_message, on_loss
        self._hosts: list[Host] = []
        self._stages: dict[str, int] = {s: i for i, host in enumerate(self._places) for s in host.stages}
        # Links between hosts; within one, payloads are handed over.
        self._between = {k.name: k for k in spec.links if self._stages[k.sender] != self._stages[k.receiver]}
        self._links: dict[str, bool] = dict.fromkeys(self._between, False)
        self._generations: dict[str, int] = dict.fromkeys(self._between, 0)  # of the latest try to make each link
        self._secrets: dict[str, bytes] = {}  # by which its two ends know each other; of that try too
        self._joining = asyncio.Lock()
        self._making: str | None = None  # the link that is being made
        self._refused: str | None = None  # why it could not be
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths = [0] * len(self._places)
        self._restarts = [0] * len(self._places)  # hosts that came back
        self._loss_at: dict[int, float] = {}  # when a host died that is not back yet
        self._losses: dict[int, str] = {}  # and how
        self._cards = cards or Cards()
        self._seats = [self._cards.seat(self._device(i), place.stages) for i, place in enumerate(self._places)]
        self._closing = False
        self._started = False
        self.memory: dict[str, int] = {}  # bytes by stage, as planned by its host
        self.progress: dict[str, str] = dict.fromkeys(spec.names, "starting")
        self.broken: str | None = None  # why it will not come up at all
        self.active = 0  # requests, counted by the engine

    # -- life

    async def start(self) -> None:
        self._hosts = [self._host(i) for i in range(len(self._places))]
        await asyncio.gather(*(self._launch(h, i) for i, h in enumerate(self._hosts)))
        while not self.ready(self.spec.names):  # again, if a host died between its start and its links
            await self._wait(lambda: all(h.state == "ready" for h in self._hosts))
            await self._join()
        await self._ask_numbers()
        self._started = True

    async def _ask_numbers(self) -> None:
        """Have each host tell its numbers once, so that they are there from the first look at them."""
        self.ping(0)
        await self._wait(lambda: all(h.stats or h.state != "ready" for h in self._hosts))

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(h.stop() for h in self._hosts))

    def ready(self, stages: Sequence[str]) -> bool:
        """Can it take a request now that needs these stages?"""
        if not self._hosts or any(self._hosts[self._stages[s]].state != "ready" for s in stages):
            return False
        return all(self._links.get(link.name, True) for link in self.spec.links_of(stages))

    def send(self, stages: Sequence[str], message: ToHost, blob: Bytes = b"") -> None:
        """To each host that holds one of the stages, once."""
        for i in sorted({self._stages[s] for s in stages}):
            self._hosts[i].send(message, blob)

    async def send_features(self, stages: Sequence[str], request: RequestId, features: Bytes | Stored) -> None:
        """To each host that holds one of the stages, piece by piece, as fast as it takes them."""
        for i in sorted({self._stages[s] for s in stages}):
            host = self._hosts[i]
            for at in range(0, len(features), PIECE):
                await host.writable()
                host.send(Features(request, len(features)), features[at : at + PIECE])

    def hosts_of(self, stages: Sequence[str]) -> list[tuple[str, ...]]:
        return [self._places[i].stages for i in sorted({self._stages[s] for s in stages})]

    def ping(self, number: int) -> None:
        for host in self._hosts:
            host.ping(number)

    def end_silent(self, seconds: float) -> None:
        for host in self._hosts:
            host.end_if_silent(seconds)

    def metrics(self) -> dict[str, float]:
        """What its hosts said last of themselves, and the plan. Stages and links are told apart by their names; what is
        a host's own says which, where there are several. A dead host says nothing, and its successor begins anew."""
        values = {f'stretto_stage_memory_bytes{{stage="{s}"}}': float(self.memory.get(s, 0)) for s in self.spec.names}
        for i, place in enumerate(self._places):
            values[f'stretto_host_restarts_total{{host="{place.name}"}}'] = float(self._restarts[i])
        for place, host in zip(self._places, self._hosts, strict=False):  # none yet, before the start
            if host.state != "dead":
                several = len(self._hosts) > 1
                for name, value in host.stats.items():
                    own = several and "{" not in name
                    values[labelled(name, host=place.name) if own else name] = value
        return values

    @property
    def pids(self) -> list[int | None]:
        return [h.pid for h in self._hosts]

    # -- hosts

    def _device(self, index: int) -> str:
        return self._places[index].device or self.config.host.device

    def _host(self, index: int) -> Host:
        name, device = f"{self.name}.{index}", self._device(index)
        return self._launcher.host(name, device, self._message, lambda h: self._died(h, index))

    async def _launch(self, host: Host, index: int) -> None:
        """Start a host and say what it is, when its card is not being loaded by another. One that cannot be started now
        is a dead one, whose restart tries again; one that never can be ends the pipeline."""
        device, seat = self._device(index), self._seats[index]
        async with self._cards.turn(device, seat) as beside:
            if self._closing:
                return
            try:
                await self._configure(host, index, beside)
            except (Unusable, OSError) as e:
                if isinstance(e, Unusable) and not self._started:
                    self.broken = str(e)
                    self._notify()
                host.lost(str(e))
                return
            if self._cards.shared(device):  # the next may look at what is free only then
                await self._wait(lambda: host.state != "starting")
                seat.loaded = host.state == "ready"

    async def _configure(self, host: Host, index: int, beside: tuple[tuple[str, ...], ...]) -> None:
        await host.start()
        if self._closing:  # while it was being started
            host.kill()
        settings = replace(self.config.host, device=host.device, trace=self.trace is not None)
        host.send(Configure(self.model, self.spec.build, self._places[index].stages, settings.as_dict(), beside))

    def _message(self, host: Host, message: FromHost, blob: bytes) -> None:
        if isinstance(message, Listening | Linked | LinkDown):
            if message.link not in self._between:
                raise WireError(f"it speaks of a link {message.link!r}")
            # Both ends tell of a link's end, one of them maybe late: its successor has nothing to do with it.
            if message.generation == self._generations[message.link]:
                self._link_message(message)
            return
        match message:
            case Loading(stage=stage) | Ended(stage=stage) if stage not in self._stages:
                raise WireError(f"it speaks of a stage {stage!r}")
            case Ready(stages=stages, memory=memory) if not {*stages, *memory} <= {*self._stages, "allocated"}:
                raise WireError(f"it speaks of stages {stages} and memory of {list(memory)}")
            case Loading(stage=stage, what=what):
                self.progress[stage] = what
            case Ready(stages=stages, memory=memory):
                host.state = "ready"
                self.memory.update(memory)
                for stage in stages:
                    self.progress[stage] = "ready"
                self._notify()
            case Broken(kind=kind, message=text):
                host.reason = text if kind in TOLD else f"{kind}: {text}"
                if host.state == "starting" and not self._started:
                    self.broken = host.reason  # later on it is tried again: what it lacked may come back
            case Stats(values=values, spans=spans):
                host.stats = values
                host.told(message)
                if self.trace is not None and spans:
                    ahead = int(1e9 * host.offset)
                    self.trace.write(host.name, [(lane, name, a - ahead, b - ahead) for lane, name, a, b in spans])
                if not self._started:
                    self._notify()
            case Ended():
                self._on_message(by_our_clock(message, host.offset), blob)
            case _:
                self._on_message(message, blob)

    def _died(self, host: Host, index: int) -> None:
        if self._closing:
            return
        stages, self._seats[index].loaded = self._places[index].stages, False
        for stage in stages:
            self.progress[stage] = "dead"
        self._loss_at.setdefault(index, time.monotonic())
        self._losses[index] = self._obituary(host, index)
        self._notify()
        # What was on its way from here is lost too: a stage behind it waits for it, also where this one had ended.
        lost = set(stages)
        for link in self._between.values():
            if link.sender in stages or link.receiver in stages:
                self._links[link.name] = False
            if link.sender in stages:
                lost.add(link.receiver)
        self._on_loss(self, frozenset(lost), host.death())
        self._task(self._after(host, index))

    async def _after(self, host: Host, index: int) -> None:
        """A host died: say how, and start it again unless that is hopeless."""
        await host.buried()
        if self.broken is not None:
            return  # whoever waits for the start tells why
        self._losses[index] = self._obituary(host, index)
        log.warning("%s", self._losses[index])
        if not self._started and (not self.config.restart or self._deaths[index] + 1 >= FIRST_STARTS):
            tries = f" ({self._deaths[index] + 1} tries)" if self._deaths[index] else ""
            self.broken = f"{self._obituary(host, index)}{tries}"
            self._notify()
        elif self.config.restart:
            await self._restart(index)

    def _obituary(self, host: Host, index: int) -> str:
        return f"{host.death()} (stages {', '.join(self._places[index].stages)})"

    @property
    def trouble(self) -> str | None:
        """Why some of its stages are not there now; None: all are, or were never."""
        if self.broken is not None:
            return self.broken
        return "; ".join(self._losses[i] for i in sorted(self._loss_at)) or None

    async def _restart(self, index: int) -> None:
        """Start a host again and make its links anew. Waits a little longer each time it died young."""
        await asyncio.sleep(RESTART_DELAYS[min(self._deaths[index], len(RESTART_DELAYS) - 1)])
        self._deaths[index] += 1
        host = self._hosts[index] = self._host(index)
        try:
            await self._launch(host, index)
            await self._wait(lambda: host.state != "starting")
            await self._join()
            host.ping(0)
        except StageDead:
            host.kill()  # its death begins the next try
            raise
        if host.state == "ready":
            self._deaths[index] = 0
            self._restarts[index] += 1
            self._losses.pop(index, None)
            away = time.monotonic() - self._loss_at.pop(index, time.monotonic())
            log.warning("host %s is back after %.1f s", host.name, away)

    # -- links

    def _link_message(self, message: Listening | Linked | LinkDown) -> None:
        link = message.link
        match message:
            case Listening(generation=generation, endpoint=endpoint):
                sender = self._hosts[self._stages[self._between[link].sender]]
                secret, details = self._secrets[link], self._details(sender)
                sender.send(Connect(link, self.config.connector, endpoint, generation, secret, sender.address, details))
            case Linked():
                if link == self._making:
                    self._links[link] = True
                    self._notify()
            case LinkDown(message=text):
                self._link_down(link, text)

    async def _join(self) -> None:
        """Make the links that are down and whose hosts are up, the last first, so that a stage has somewhere to send
        before it is sent anything. One at a time: two restarts that made the same link would undo each other's."""
        async with self._joining:
            for link in reversed(self._between.values()):
                for delay in LINK_DELAYS:
                    if self._links[link.name] or not self._up(link) or await self._make(link):
                        break
                    log.warning("link %s: %s", link.name, self._refused)
                    await asyncio.sleep(delay)
                else:
                    raise StageDead(f"link {link.name} cannot be made: {self._refused}")

    async def _make(self, link: LinkSpec) -> bool:
        """One try. True: the link is up, or one of its hosts has died, whose restart makes it."""
        name = link.name
        self._generations[name] += 1
        self._making, self._refused = name, None
        for stage in (link.sender, link.receiver):
            self._hosts[self._stages[stage]].send(Unlink(name))
        secret = self._secrets[name] = secrets.token_bytes(SECRET_BYTES)
        receiver = self._hosts[self._stages[link.receiver]]
        generation, details = self._generations[name], self._details(receiver)
        receiver.send(Listen(name, self.config.connector, generation, secret, receiver.address, details))
        try:
            await self._wait(lambda: self._links[name] or self._refused is not None or not self._up(link))
        finally:
            self._making = None
        return self._refused is None

    def _details(self, host: Host) -> dict[str, str]:
        """What a connector is told beside the usual: at which address the others find a host's end of a link."""
        return {**self.config.link_details, "advertise": host.address}

    def _up(self, link: LinkSpec) -> bool:
        return all(self._hosts[self._stages[s]].state == "ready" for s in (link.sender, link.receiver))

    def _link_down(self, link: str, text: str) -> None:
        if self._closing:
            return
        if not self._links[link]:  # known already, or being made
            if link == self._making:
                self._refused = text
                self._notify()
            return
        self._links[link] = False
        self._on_loss(self, frozenset({self._between[link].receiver}), StageDead(f"link {link} is down: {text}"))
        self._task(self._mend())

    async def _mend(self) -> None:
        """A link broke though both ends may live. If one died, its restart makes the link; else we do."""
        await asyncio.sleep(LINK_DELAYS[0])
        await self._join()

    # -- waiting

    def _notify(self) -> None:
        async def tell() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._task(tell())

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._closing:
            log.error("pipeline %s: %s", self.name, task.exception())

    async def _wait(self, fulfilled: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: fulfilled() or self.broken is not None)

        try:
            await asyncio.wait_for(wait(), self.config.start_timeout_s)
        except TimeoutError:
            raise StageDead(f"pipeline {self.name} did not come up in {self.config.start_timeout_s:.0f} s") from None
        if self.broken is not None:
            raise StageDead(self.broken)


def by_our_clock(message: Ended, offset: float) -> Ended:
    """A host's times on this machine's clock, which is `offset` behind its own."""
    if not offset:
        return message
    marks, chunks = (tuple(t - offset for t in times) for times in (message.marks, message.chunks))
    encoded = message.encoded_at - offset if message.encoded_at else 0.0
    return msgspec.structs.replace(
        message, begun=message.begun - offset, marks=marks, chunks=chunks, encoded_at=encoded
    )

"""The hosts of a pipeline: started, told what they are, started again when they die. Asyncio, used
by `pipeline.py`; imports no torch.

Hosts start in parallel; then the links between them are made (`link_setup.py`). When a host dies,
or a link goes down, the requests that it touched are failed at once by the engine; the host is
started again and its links are made anew. Requests that need none of it go on. A host that does not
answer is killed, and then is a dead one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from stretto.config.engine import EngineConfig
from stretto.config.placement import places
from stretto.engine.host_handle import (
    HostHandle,
    HostReports,
    Launcher,
    StagesLost,
    StateChanges,
    Unusable,
)
from stretto.engine.link_setup import LinkRefused, LinkSetup
from stretto.engine.local_host import LocalLauncher
from stretto.errors import StageDead, WireError
from stretto.family import PipelineSpec
from stretto.hardware import card_of
from stretto.messages.hosts import Broken, Configure, LinkDown, Linked, Listening, Loading, Ready

log = logging.getLogger(__name__)

RESTART_DELAYS = (0.0, 0.2, 1.0, 5.0, 15.0)
FIRST_STARTS = 3  # of a host that dies before its pipeline was ever up; then it is given up
PLAIN_ERRORS = ("Invalid", "StageDead", "DoesNotFit", "CheckpointError", "CpuError", "StrettoError")
"""Errors whose message is enough without their name."""


@dataclass(slots=True, eq=False)
class LoadSlot:
    """One host's share of a card."""

    stages: tuple[str, ...]
    loaded: bool = False


class GpuSharing:
    """Which hosts of an engine share a card, over all its pipelines, and whose turn it is to load
    there. Each host has its slot from the beginning.

    A host sizes its KV pools by what is free when it loads. So hosts that share a card load one
    after the other, and each is told which stages are to come after it, so that it leaves room for
    them (see `stage/host/memory_plan.py`)."""

    def __init__(self) -> None:
        self._slots: defaultdict[int, list[LoadSlot]] = defaultdict(list)
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    def add(self, device: str, stages: tuple[str, ...]) -> LoadSlot:
        slot = LoadSlot(stages)
        card = card_of(device)
        if card is not None:
            self._slots[card].append(slot)
        return slot

    def is_shared(self, device: str) -> bool:
        card = card_of(device)
        return card is not None and len(self._slots[card]) > 1

    def set_loaded(self, slot: LoadSlot, loaded: bool) -> None:
        slot.loaded = loaded

    @asynccontextmanager
    async def turn(self, device: str, slot: LoadSlot) -> AsyncIterator[tuple[tuple[str, ...], ...]]:
        """A host's time to load; yields the stages of each host that will load on the same card
        after it."""
        card = card_of(device)
        if card is None or not self.is_shared(device):
            yield ()
            return
        async with self._turns[card]:
            yield tuple(s.stages for s in self._slots[card] if s is not slot and not s.loaded)


class Supervisor:
    def __init__(
        self,
        name: str,
        model: str,
        spec: PipelineSpec,
        config: EngineConfig,
        reports: HostReports,
        traced: bool,
        launcher: Launcher | None,
        sharing: GpuSharing | None,
    ) -> None:
        """`reports`: where its hosts put theirs. `launcher` makes the hosts (default: children of
        this process); `sharing` is one for all pipelines of an engine."""
        self.name = name
        self.model = model
        self.spec = spec
        self.config = config
        self.places = places(config.placement, spec.names)
        self.hosts: list[HostHandle] = []
        self.host_of: dict[str, HostHandle] = {}  # by stage, those of `hosts`
        self.index: dict[str, int] = {
            s: i for i, host in enumerate(self.places) for s in host.stages
        }
        self.memory: dict[str, int] = {}  # bytes by stage, as planned by its host
        self.progress: dict[str, str] = dict.fromkeys(spec.names, "starting")
        self.restarts = [0] * len(self.places)  # hosts that came back
        self.started = False
        # Within one host, payloads are handed over.
        between = [k for k in spec.links if self.index[k.sender] != self.index[k.receiver]]
        self.changes = StateChanges(name, config.start_timeout_s)
        self.links = LinkSetup(between, config, self.host_of, self.changes)
        self.launcher = launcher or LocalLauncher()
        self._reports = reports
        self._traced = traced
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths = [0] * len(self.places)
        self._loss_at: dict[int, float] = {}  # when a host died that is not back yet
        self._losses: dict[int, str] = {}  # and how
        self._sharing = sharing or GpuSharing()
        self._slots = [
            self._sharing.add(self._device(i), place.stages) for i, place in enumerate(self.places)
        ]
        self._closing = False

    async def start(self) -> None:
        self.make_hosts()
        await asyncio.gather(*(self._launch(h, i) for i, h in enumerate(self.hosts)))
        while not all(self.links.up.values()) or any(h.state != "ready" for h in self.hosts):
            await self.changes.wait(lambda: all(h.state == "ready" for h in self.hosts))
            await self.links.join()  # again, if a host died between its start and its links
        await self._ask_numbers()
        self.started = True

    async def _ask_numbers(self) -> None:
        """Have each host tell its numbers once, so that they are there from the first look at
        them."""
        for host in self.hosts:
            host.ping(0)
        await self.changes.wait(
            lambda: all(h.stats is not None or h.state != "ready" for h in self.hosts)
        )

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(h.stop() for h in self.hosts))

    @property
    def trouble(self) -> str | None:
        """Why some of its stages are down now; None: none is, or they have not been up yet."""
        if self.changes.failure is not None:
            return self.changes.failure
        return "; ".join(self._losses[i] for i in sorted(self._loss_at)) or None

    def apply(
        self, host: HostHandle, message: Loading | Ready | Broken | Listening | Linked | LinkDown
    ) -> StagesLost | None:
        """A host's report of itself or of its links; returns the stages that are lost by it.
        `WireError`: it cannot be true."""
        match message:
            case Loading(stage=stage) if stage not in self.index:
                raise WireError(f"it speaks of a stage {stage!r}")
            case Ready(stages=stages, memory=memory) if not {*stages, *memory} <= {
                *self.index,
                "allocated",
            }:
                raise WireError(f"it speaks of stages {stages} and memory of {list(memory)}")
            case Loading(stage=stage, what=what):
                self.progress[stage] = what
            case Ready(stages=stages, memory=memory):
                host.mark_ready()
                self.memory.update(memory)
                for stage in stages:
                    self.progress[stage] = "ready"
                self.changes.notify()
            case Broken(kind=kind, message=text):
                host.note_reason(text if kind in PLAIN_ERRORS else f"{kind}: {text}")
                if host.state != "ready" and not self.started:
                    # later on it is tried again: what it lacked may come back
                    self.changes.fail(host.reason)
            case LinkDown() if self._closing:
                pass
            case _:
                lost = self.links.apply(message)
                if lost is not None:
                    self._task(self._mend())
                return lost
        return None

    # -- hosts

    def _device(self, index: int) -> str:
        return self.places[index].device or self.config.host.device

    def make_hosts(self) -> None:
        self.hosts = [self._make_host(i) for i in range(len(self.places))]

    def replace_host(self, index: int) -> HostHandle:
        """A new host in the place of a dead one; not started yet."""
        self.hosts[index] = self._make_host(index)
        return self.hosts[index]

    def _make_host(self, index: int) -> HostHandle:
        device = self._device(index)
        host = self.launcher.host(f"{self.name}.{index}", index, device, self._reports)
        self.host_of.update(dict.fromkeys(self.places[index].stages, host))
        return host

    async def _launch(self, host: HostHandle, index: int) -> None:
        """Start a host and say what it is, when its card is not being loaded by another. One that
        cannot be started now is a dead one, whose restart tries again; one that never can be ends
        the pipeline."""
        device = self._device(index)
        slot = self._slots[index]
        async with self._sharing.turn(device, slot) as loading_later:
            if self._closing:
                return
            try:
                await self._configure(host, index, loading_later)
            # `RuntimeError`: no thread to wait for the process with
            except (Unusable, OSError, RuntimeError) as e:
                if isinstance(e, Unusable) and not self.started:
                    self.changes.fail(str(e))
                host.mark_dead(str(e))
                return
            if self._sharing.is_shared(device):  # the next may look at what is free only then
                await self.changes.wait(lambda: host.state != "starting")
                self._sharing.set_loaded(slot, host.state == "ready")

    async def _configure(
        self, host: HostHandle, index: int, loading_later: tuple[tuple[str, ...], ...]
    ) -> None:
        await host.start()
        if self._closing:  # while it was being started
            host.kill()
        settings = replace(self.config.host, device=host.device, trace=self._traced)
        stages = self.places[index].stages
        links = tuple((k.sender, k.receiver) for k in self.spec.links)
        host.send(
            Configure(self.model, self.spec.build, stages, settings.as_dict(), links, loading_later)
        )

    def apply_death(self, host: HostHandle) -> StagesLost | None:
        """A host is dead: returns the stages that are lost by it, and starts it again."""
        if self._closing:
            return None
        index = host.number
        stages = self.places[index].stages
        self._sharing.set_loaded(self._slots[index], False)
        for stage in stages:
            self.progress[stage] = "dead"
        self._loss_at.setdefault(index, time.monotonic())
        self._losses[index] = self._death_notice(host, index)
        self.changes.notify()
        self._task(self._recover(host, index))
        # What was on its way from here is lost too: a stage behind it waits for it, also where this
        # one had ended.
        return StagesLost(frozenset({*stages, *self.links.lose(stages)}), host.exit_error())

    async def _recover(self, host: HostHandle, index: int) -> None:
        """A host died: log how, and start it again unless that is hopeless."""
        await host.wait_exit()
        if self.changes.failure is not None:
            return  # the caller of `start` is told why
        self._losses[index] = self._death_notice(host, index)
        log.warning("%s", self._losses[index])
        if not self.started and (
            not self.config.restart or self._deaths[index] + 1 >= FIRST_STARTS
        ):
            tries = f" ({self._deaths[index] + 1} tries)" if self._deaths[index] else ""
            self.changes.fail(f"{self._death_notice(host, index)}{tries}")
        elif self.config.restart:
            await self._restart(index)

    def _death_notice(self, host: HostHandle, index: int) -> str:
        return f"{host.exit_error()} (stages {', '.join(self.places[index].stages)})"

    async def _restart(self, index: int) -> None:
        """Start a host again and make its links anew. Waits a little longer each time it died
        young."""
        await asyncio.sleep(RESTART_DELAYS[min(self._deaths[index], len(RESTART_DELAYS) - 1)])
        self._deaths[index] += 1
        host = self.replace_host(index)
        try:
            await self._launch(host, index)
            await self.changes.wait(lambda: host.state != "starting")
            await self.links.join()
            host.ping(0)
        except StageDead as e:
            host.kill()  # its death begins the next try
            if isinstance(e, LinkRefused) and self._deaths[index] > 1:
                # a new host did not help: the fault may be at the other end
                for stage in (e.link.sender, e.link.receiver):
                    if self.host_of[stage].state == "ready":
                        self.host_of[stage].mark_dead(str(e))
            raise
        if host.state == "ready":
            self._deaths[index] = 0
            self.restarts[index] += 1
            self._losses.pop(index, None)
            away = time.monotonic() - self._loss_at.pop(index, time.monotonic())
            log.warning("host %s is back after %.1f s", host.name, away)

    async def _mend(self) -> None:
        """A link broke. If its hosts live and it cannot be made anew, the receiving host is started
        again: what that had of the link's requests is lost already."""
        try:
            await self.links.mend()
        except LinkRefused as e:
            host = self.host_of[e.link.receiver]
            if host.state == "ready":  # else its restart makes the link
                host.mark_dead(str(e))

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._closing:
            log.error("pipeline %s: %s", self.name, task.exception())

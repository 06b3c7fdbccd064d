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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stretto.errors import StageDead, StrettoError, WireError
from stretto.orchestrator.messages import (
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
from stretto.orchestrator.process import HostProcess
from stretto.orchestrator.settings import LINKS, STAGES, EngineConfig
from stretto.prompt.packed import Bytes
from stretto.types import SECRET_BYTES, RequestId

log = logging.getLogger(__name__)

RESTART_DELAYS = (0.0, 0.2, 1.0, 5.0, 15.0)
PIECE = 256 << 10  # bytes of features in one message
LINK_DELAYS = (0.05, 0.2, 0.5, 1.0)
"""Pauses between tries to make a link."""


class Pipeline:
    def __init__(
        self,
        name: str,
        model: str,
        config: EngineConfig,
        on_message: Callable[[FromHost, bytes], None],
        on_loss: Callable[[Pipeline, frozenset[str], StrettoError], None],
    ) -> None:
        """`on_loss` is told which stages can no longer be reached, and why."""
        self.name, self.model, self.config = name, model, config
        self._on_message, self._on_loss = on_message, on_loss
        self._hosts: list[HostProcess] = []
        self._stages: dict[str, int] = {s: i for i, host in enumerate(config.placement) for s in host}
        self._links: dict[str, bool] = dict.fromkeys(LINKS, False)
        self._generations: dict[str, int] = dict.fromkeys(LINKS, 0)  # of the latest try to make each link
        self._secrets: dict[str, bytes] = {}  # by which its two ends know each other; of that try too
        self._joining = asyncio.Lock()
        self._making: str | None = None  # the link that is being made
        self._refused: str | None = None  # why it could not be
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths = [0] * len(config.placement)
        self._closing = False
        self._started = False
        self.memory: dict[str, int] = {}  # bytes by stage, as planned by its host
        self.progress: dict[str, str] = dict.fromkeys(STAGES, "starting")
        self.broken: str | None = None  # why it will not come up at all
        self.active = 0  # requests, counted by the engine

    # -- life

    async def start(self) -> None:
        self._hosts = [self._host(i) for i in range(len(self.config.placement))]
        await asyncio.gather(*(self._launch(h, i) for i, h in enumerate(self._hosts)))
        while not self.ready(speak=True):  # again, if a host died between its start and its links
            await self._wait(lambda: all(h.state == "ready" for h in self._hosts))
            await self._join()
        self._started = True

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(h.stop() for h in self._hosts))

    def ready(self, speak: bool) -> bool:
        """Can it take a request now?"""
        if not self._hosts or self._hosts[self._stages["thinker"]].state != "ready":
            return False
        return not speak or (all(h.state == "ready" for h in self._hosts) and all(self._links.values()))

    def send(self, stages: Sequence[str], message: ToHost, blob: Bytes = b"") -> None:
        """To each host that holds one of the stages, once."""
        for i in sorted({self._stages[s] for s in stages}):
            self._hosts[i].send(message, blob)

    async def send_features(self, stages: Sequence[str], request: RequestId, features: Bytes) -> None:
        """To each host that holds one of the stages, piece by piece, as fast as it takes them."""
        for i in sorted({self._stages[s] for s in stages}):
            host = self._hosts[i]
            for at in range(0, len(features), PIECE):
                await host.writable()
                host.send(Features(request, len(features)), features[at : at + PIECE])

    def hosts_of(self, stages: Sequence[str]) -> list[tuple[str, ...]]:
        return [self.config.placement[i] for i in sorted({self._stages[s] for s in stages})]

    def ping(self, number: int) -> None:
        for host in self._hosts:
            host.ping(number)

    def end_silent(self, seconds: float) -> None:
        for host in self._hosts:
            host.end_if_silent(seconds)

    def metrics(self) -> dict[str, float]:
        """What its hosts said last of themselves, and the plan. Stages and links are told apart by their names; what is
        a host's own says which, where there are several. A dead host says nothing, and its successor begins anew."""
        values = {f'stretto_stage_memory_bytes{{stage="{s}"}}': float(self.memory.get(s, 0)) for s in STAGES}
        for stages, host in zip(self.config.placement, self._hosts, strict=False):  # none yet, before the start
            if host.state != "dead":
                several = len(self._hosts) > 1
                for name, value in host.stats.items():
                    own = several and "{" not in name
                    values[labelled(name, "host", "+".join(stages)) if own else name] = value
        return values

    @property
    def pids(self) -> list[int | None]:
        return [h.pid for h in self._hosts]

    # -- hosts

    def _host(self, index: int) -> HostProcess:
        return HostProcess(f"{self.name}.{index}", self._message, lambda h, i=index: self._died(h, i))  # type: ignore[misc]

    async def _launch(self, host: HostProcess, index: int) -> None:
        await host.start()
        host.send(Configure(self.model, self.config.placement[index], self.config.host.as_dict()))

    def _message(self, host: HostProcess, message: FromHost, blob: bytes) -> None:
        if isinstance(message, Listening | Linked | LinkDown):
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
                host.reason = f"{kind}: {text}"
                if host.state == "starting" and not self._started:
                    self.broken = host.reason  # later on it is tried again: what it lacked may come back
            case Stats(values=values):
                host.stats = values
            case _:
                self._on_message(message, blob)

    def _died(self, host: HostProcess, index: int) -> None:
        if self._closing:
            return
        stages = self.config.placement[index]
        for stage in stages:
            self.progress[stage] = "dead"
        log.warning("%s", host.death())
        self._notify()
        # What was on its way from here is lost too: a stage behind it waits for it, also where this one had ended.
        lost = set(stages)
        for a, b in LINKS.values():
            if a in stages or b in stages:
                self._links[f"{a}>{b}"] = False
            if a in stages:
                lost.add(b)
        self._on_loss(self, frozenset(lost), host.death())
        if self.config.restart and self.broken is None:
            self._task(self._restart(index))
        elif not self._started and self.broken is None:
            self.broken = str(host.death())

    async def _restart(self, index: int) -> None:
        """Start a host again and make its links anew. Waits a little longer each time it died young."""
        await asyncio.sleep(RESTART_DELAYS[min(self._deaths[index], len(RESTART_DELAYS) - 1)])
        self._deaths[index] += 1
        host = self._hosts[index] = self._host(index)
        try:
            await self._launch(host, index)
            await self._wait(lambda: host.state != "starting")
            await self._join()
        except OSError as e:  # no process to be had
            host.state, host.reason = "dead", str(e)
            self._died(host, index)
        except StageDead:
            host.kill()  # its death begins the next try
            raise
        if host.state == "ready":
            self._deaths[index] = 0

    # -- links

    def _link_message(self, message: Listening | Linked | LinkDown) -> None:
        link = message.link
        match message:
            case Listening(generation=generation, endpoint=endpoint):
                a, _ = link.split(">")
                connect = Connect(link, self._connector(link), endpoint, generation, self._secrets[link])
                self._hosts[self._stages[a]].send(connect)
            case Linked():
                if link == self._making:
                    self._links[link] = True
                    self._notify()
            case LinkDown(message=text):
                self._link_down(link, text)

    def _connector(self, link: str) -> str:
        a, b = link.split(">")
        if self._stages[a] == self._stages[b]:
            return "local"
        return self.config.connector or "shm"

    async def _join(self) -> None:
        """Make the links that are down and whose hosts are up, the last first, so that a stage has somewhere to send
        before it is sent anything. One at a time: two restarts that made the same link would undo each other's."""
        async with self._joining:
            for a, b in reversed(LINKS.values()):
                for delay in LINK_DELAYS:
                    if self._links[f"{a}>{b}"] or not self._up(a, b) or await self._make(a, b):
                        break
                    log.warning("link %s>%s: %s", a, b, self._refused)
                    await asyncio.sleep(delay)
                else:
                    raise StageDead(f"link {a}>{b} cannot be made: {self._refused}")

    async def _make(self, a: str, b: str) -> bool:
        """One try. True: the link is up, or one of its hosts has died, whose restart makes it."""
        name = f"{a}>{b}"
        self._generations[name] += 1
        self._making, self._refused = name, None
        for stage in (a, b):
            self._hosts[self._stages[stage]].send(Unlink(name))
        secret = self._secrets[name] = secrets.token_bytes(SECRET_BYTES)
        self._hosts[self._stages[b]].send(Listen(name, self._connector(name), self._generations[name], secret))
        try:
            await self._wait(lambda: self._links[name] or self._refused is not None or not self._up(a, b))
        finally:
            self._making = None
        return self._refused is None

    def _up(self, a: str, b: str) -> bool:
        return all(self._hosts[self._stages[s]].state == "ready" for s in (a, b))

    def _link_down(self, link: str, text: str) -> None:
        if self._closing:
            return
        if not self._links[link]:  # known already, or being made
            if link == self._making:
                self._refused = text
                self._notify()
            return
        self._links[link] = False
        _, b = link.split(">")
        self._on_loss(self, frozenset({b}), StageDead(f"link {link} is down: {text}"))
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
            raise StageDead(f"pipeline {self.name} cannot start: {self.broken}")


def labelled(name: str, label: str, value: str) -> str:
    """The name of a number with one more label, in Prometheus form."""
    return f'{name[:-1]},{label}="{value}"}}' if name.endswith("}") else f'{name}{{{label}="{value}"}}'

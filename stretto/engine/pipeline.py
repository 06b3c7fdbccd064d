"""One pipeline, as the engine uses it for requests: is it ready, what goes to which of its hosts,
and what they report. How its hosts and the links between them are started and kept up:
`supervisor.py`. Asyncio; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from stretto.config.engine import EngineConfig
from stretto.engine.host_handle import HostDied, HostHandle, HostMessage, Launcher, StagesLost
from stretto.engine.supervisor import GpuSharing, Supervisor
from stretto.errors import WireError
from stretto.family import PipelineSpec
from stretto.messages.hosts import Broken, LinkDown, Linked, Listening, Loading, Ready, Stats
from stretto.messages.requests import Ended, Features, ToHost
from stretto.observe.descriptors import OPEN_FILES
from stretto.observe.recorder import labelled
from stretto.observe.trace import TraceWriter
from stretto.preprocess.packed_prompt import Bytes
from stretto.preprocess.pool.memfile import MemFileSlice
from stretto.types import RequestId

PIECE = 256 << 10  # bytes of features in one message


class Pipeline:
    def __init__(
        self,
        name: str,
        model: str,
        spec: PipelineSpec,
        config: EngineConfig,
        trace: TraceWriter | None = None,
        launcher: Launcher | None = None,
        sharing: GpuSharing | None = None,
    ) -> None:
        """`trace` records what hosts did when. `launcher` and `sharing`: see `Supervisor`."""
        self.name = name
        self.spec = spec
        self.config = config
        self.trace = trace
        self._reports: asyncio.Queue[HostMessage | HostDied] = asyncio.Queue()
        self.supervisor = Supervisor(
            name, model, spec, config, self._reports, trace is not None, launcher, sharing
        )

    async def start(self) -> None:
        """Start its hosts and wait until they are ready. `reports` must be read meanwhile."""
        await self.supervisor.start()

    async def close(self) -> None:
        await self.supervisor.close()

    def ready(self, stages: Sequence[str]) -> bool:
        """Can it take a request now that needs these stages?"""
        up = self.supervisor
        if not up.hosts or any(up.host_of[s].state != "ready" for s in stages):
            return False
        return all(up.links.up.get(link.name, True) for link in self.spec.links_of(stages))

    def send(self, stages: Sequence[str], message: ToHost, blob: Bytes = b"") -> None:
        """To each host that holds one of the stages, once."""
        for host in self.stages_by_host(stages):
            host.send(message, blob)

    async def send_features(
        self, stages: Sequence[str], request: RequestId, features: Bytes | MemFileSlice
    ) -> None:
        """To each host that holds one of the stages, piece by piece, as fast as it takes them."""
        for host in self.stages_by_host(stages):
            for at in range(0, len(features), PIECE):
                await host.writable()
                host.send(Features(request, len(features)), features[at : at + PIECE])

    def stages_by_host(self, stages: Iterable[str]) -> dict[HostHandle, list[str]]:
        """The hosts that hold some of these stages, and which."""
        found: dict[HostHandle, list[str]] = {}
        for stage in stages:
            found.setdefault(self.supervisor.host_of[stage], []).append(stage)
        return found

    # -- what its hosts report

    async def reports(self) -> AsyncIterator[HostMessage | StagesLost]:
        """What its hosts report of requests, and which stages are lost, in the order in which it
        came. One task of the engine reads this for as long as the pipeline is up, since what hosts
        report of themselves is applied on the way. Several reports that have arrived are read in
        one turn of the event loop."""
        while True:
            report = await self._reports.get()
            try:
                passed_on = self._apply(report)
            except Exception as e:  # noqa: BLE001  a bad message ends its host, not the reader
                report.host.reject(e)
            else:
                if passed_on is not None:
                    yield passed_on

    def _apply(self, report: HostMessage | HostDied) -> HostMessage | StagesLost | None:
        """Apply a report to the hosts' and links' state, unless it is about a request."""
        host = report.host
        if isinstance(report, HostDied):
            return self.supervisor.apply_death(host)
        if host.malformed:
            return None
        match report.message:
            case Loading() | Ready() | Broken() | Listening() | Linked() | LinkDown() as message:
                return self.supervisor.apply(host, message)
            case Stats() as stats:
                self._trace(host, stats)
                self.supervisor.changes.notify()
                return None
            case Ended(stage=stage) if stage not in self.supervisor.index:
                raise WireError(f"it speaks of a stage {stage!r}")
            case Ended() as ended if host.offset:
                return HostMessage(host, by_our_clock(ended, host.offset), report.blob)
        return report

    def _trace(self, host: HostHandle, stats: Stats) -> None:
        if self.trace is None or not stats.spans:
            return
        offset_ns = int(1e9 * host.offset)
        self.trace.write(
            host.name,
            [(lane, name, a - offset_ns, b - offset_ns) for lane, name, a, b in stats.spans],
        )

    # -- its state

    def ping(self, number: int) -> None:
        for host in self.supervisor.hosts:
            host.ping(number)

    def kill_silent(self, seconds: float) -> None:
        for host in self.supervisor.hosts:
            host.kill_if_silent(seconds)

    def metrics(self) -> dict[str, float]:
        """The hosts' latest metrics, and the memory plan. Stages and links have their names as
        labels; a host's own metrics have its name, where there are several hosts. A dead host has
        no metrics, and its successor's counters start at zero."""
        up = self.supervisor
        values = {
            f'stretto_stage_memory_bytes{{stage="{s}"}}': float(up.memory.get(s, 0))
            for s in self.spec.names
        }
        for place, restarts in zip(up.places, up.restarts, strict=True):
            values[f'stretto_host_restarts_total{{host="{place.name}"}}'] = float(restarts)
        for place, host in zip(up.places, up.hosts, strict=False):  # none yet, before the start
            if host.state != "dead" and host.stats is not None:
                several = len(up.hosts) > 1
                for name, value in host.stats.values.items():
                    if name == OPEN_FILES:
                        values[labelled(name, process=f"host {place.name}")] = value
                    else:
                        own = several and "{" not in name
                        values[labelled(name, host=place.name) if own else name] = value
        return values

    @property
    def pids(self) -> list[int | None]:
        return [h.pid for h in self.supervisor.hosts]


def by_our_clock(message: Ended, offset: float) -> Ended:
    """A host's times on this machine's clock, which is `offset` behind its own."""
    if not offset:
        return message
    marks, chunks = (tuple(t - offset for t in times) for times in (message.marks, message.chunks))
    encoded = message.encoded_at - offset if message.encoded_at else 0.0
    return msgspec.structs.replace(
        message, begun=message.begun - offset, marks=marks, chunks=chunks, encoded_at=encoded
    )

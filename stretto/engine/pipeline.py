"""One pipeline, as the engine uses it for requests: is it ready, what goes to which of its hosts,
and what they say. How its hosts and the links between them are started and kept up:
`supervisor.py`. Asyncio; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from stretto.config.engine import EngineConfig
from stretto.engine.gpu_sharing import Cards
from stretto.engine.host_handle import HostHandle, Launcher
from stretto.engine.supervisor import Supervisor
from stretto.errors import StrettoError, WireError
from stretto.family import PipelineSpec
from stretto.messages.hosts import Broken, LinkDown, Linked, Listening, Loading, Ready, Stats
from stretto.messages.requests import Ended, Features, FromHost, ToHost
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
        on_message: Callable[[FromHost, bytes], None],
        on_loss: Callable[[Pipeline, frozenset[str], StrettoError], None],
        trace: TraceWriter | None = None,
        launcher: Launcher | None = None,
        cards: Cards | None = None,
    ) -> None:
        """`on_message` is told what hosts say of requests, `on_loss` which stages can no longer be
        reached, and why; `trace` is given what hosts did when. `launcher` and `cards`: see
        `Supervisor`."""
        self.name = name
        self.spec = spec
        self.config = config
        self.trace = trace
        self._on_message = on_message

        def lost(stages: frozenset[str], error: StrettoError) -> None:
            on_loss(self, stages, error)

        self.supervisor = Supervisor(
            name, model, spec, config, self._message, lost, trace is not None, launcher, cards
        )
        self.active = 0  # requests, counted by the engine

    async def start(self) -> None:
        await self.supervisor.start()

    async def close(self) -> None:
        await self.supervisor.close()

    def ready(self, stages: Sequence[str]) -> bool:
        """Can it take a request now that needs these stages?"""
        up = self.supervisor
        if not up.hosts or any(up.host_of(s).state != "ready" for s in stages):
            return False
        return all(up.links.up.get(link.name, True) for link in self.spec.links_of(stages))

    def send(self, stages: Sequence[str], message: ToHost, blob: Bytes = b"") -> None:
        """To each host that holds one of the stages, once."""
        for i in self._holding(stages):
            self.supervisor.hosts[i].send(message, blob)

    async def send_features(
        self, stages: Sequence[str], request: RequestId, features: Bytes | MemFileSlice
    ) -> None:
        """To each host that holds one of the stages, piece by piece, as fast as it takes them."""
        for i in self._holding(stages):
            host = self.supervisor.hosts[i]
            for at in range(0, len(features), PIECE):
                await host.writable()
                host.send(Features(request, len(features)), features[at : at + PIECE])

    def hosts_of(self, stages: Sequence[str]) -> list[tuple[str, ...]]:
        return [self.supervisor.places[i].stages for i in self._holding(stages)]

    def _holding(self, stages: Sequence[str]) -> list[int]:
        """Which hosts hold one of the stages."""
        return sorted({self.supervisor.index[s] for s in stages})

    def _message(self, host: HostHandle, message: FromHost, blob: bytes) -> None:
        match message:
            case Loading() | Ready() | Broken() | Listening() | Linked() | LinkDown():
                self.supervisor.heard(host, message)
            case Stats():
                self._note(host, message)
            case Ended(stage=stage) if stage not in self.supervisor.index:
                raise WireError(f"it speaks of a stage {stage!r}")
            case Ended():
                self._on_message(by_our_clock(message, host.offset), blob)
            case _:
                self._on_message(message, blob)

    def _note(self, host: HostHandle, stats: Stats) -> None:
        host.stats = stats.values
        host.told(stats)
        if self.trace is not None and stats.spans:
            ahead = int(1e9 * host.offset)
            self.trace.write(
                host.name, [(lane, name, a - ahead, b - ahead) for lane, name, a, b in stats.spans]
            )
        if not self.supervisor.started:
            self.supervisor.notify()

    # -- what it says of itself

    def ping(self, number: int) -> None:
        for host in self.supervisor.hosts:
            host.ping(number)

    def end_silent(self, seconds: float) -> None:
        for host in self.supervisor.hosts:
            host.end_if_silent(seconds)

    def metrics(self) -> dict[str, float]:
        """What its hosts said last of themselves, and the plan. Stages and links are told apart by
        their names; what is a host's own says which, where there are several. A dead host says
        nothing, and its successor begins anew."""
        up = self.supervisor
        values = {
            f'stretto_stage_memory_bytes{{stage="{s}"}}': float(up.memory.get(s, 0))
            for s in self.spec.names
        }
        for place, restarts in zip(up.places, up.restarts, strict=True):
            values[f'stretto_host_restarts_total{{host="{place.name}"}}'] = float(restarts)
        for place, host in zip(up.places, up.hosts, strict=False):  # none yet, before the start
            if host.state != "dead":
                several = len(up.hosts) > 1
                for name, value in host.stats.items():
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

"""The ablation with one loaded model: a host in this process whose overlaps are switched off and on while it stands.

Called by bench/ablation.py. Full-size models take a minute to load and to capture, so a new engine per row is out of
the question on a machine that is lent by the minute. Everything that a row switches can be switched on a living host:
what is captured is put aside, not thrown away. There is no server and no orchestrator; times run from the moment that
a request is there, and end when a report would leave for the engine. The requests of a round come all at once, except
where a row is about one that comes while others speak: then they come one by one.

Links are hand-overs inside the host, as in service on one GPU. For the switches of links between processes both links
are laid through shared memory instead, with their couriers, in this one process (so four threads share one interpreter
lock), and prompts carry ten seconds of sound, because text alone has no rows to copy."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.host import Bench
from bench.workload import Workload
from stretto.client.bench import Sample
from stretto.client.player import Packet
from stretto.connector.switches import OverlapSwitches
from stretto.errors import StageDead
from stretto.kernels.fast import dtypes
from stretto.layers.decoder import Decoder
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.orchestrator.messages import (
    Admit,
    Connect,
    Ended,
    FromHost,
    Listen,
    Pcm,
    Sampling,
    Text,
    Unlink,
)
from stretto.orchestrator.settings import LINKS, STAGES, HostSettings
from stretto.prompt.build import PromptBuilder
from stretto.prompt.packed import media_digest, pack_prompt
from stretto.stage.loop import TICK_NS
from stretto.stage.nodes.code2wav import Code2WavNode
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.runner.rows import How
from stretto.stage.runner.talker import TalkerLane
from stretto.types import CODE0, RESIDUAL, SECRET_BYTES, RequestId, SamplingParams, stage_seed

Question = tuple[Admit, bytes]
Change = Callable[["OneHost"], AbstractContextManager[Any]]
LOCAL, APART, SHARED = "all on", "all on, one by one", "all on, shm links"
APART_S = 0.05  # about as often as listeners ask who ask again when they have their answer, 32 of them


class OneHost(Bench):
    """A host that answers rounds of requests and notes when each piece came."""

    def __init__(self, directory: Path, settings: HostSettings) -> None:
        self.heard: dict[RequestId, Sample] = {}
        self.begun = 0.0
        self.generation = 1
        super().__init__(directory, settings, stub=False)

    def _instrument(self, stub: bool) -> None:
        pass  # as in service

    def _report(self, message: FromHost, blob: bytes) -> None:
        super()._report(message, blob)
        now = time.perf_counter() - self.begun
        match message:
            case Text(request=id) if id in self.heard:
                self.heard[id].words.append(now - self.heard[id].sent)
            case Pcm(request=id) if id in self.heard:
                sample = self.heard[id]
                sample.packets.append(Packet(now - sample.sent, len(blob) / 4 / SAMPLE_RATE_OUT))
            case Ended(request=id, stage="code2wav") if id in self.heard:
                self.heard[id].end = now - self.heard[id].sent

    def ask(self, questions: Sequence[Question], apart_s: float = 0.0) -> list[Sample]:
        """All of them, each to its end; at once, or one every so many seconds."""
        host = self.host
        self.ended.clear()
        self.heard = {a.request: Sample(i, i * apart_s) for i, (a, _) in enumerate(questions)}
        self.begun = time.perf_counter()
        arrivals = Arrivals(self, questions, apart_s)
        arrivals.turn()
        with swapped([(host.loop, "stages", [*host.loop.stages, arrivals])]):
            while not all(self.over(stage) for stage in STAGES):
                busy = host.loop.round()
                if self.failed is not None:
                    raise StageDead(self.failed)
                if not busy:
                    host.loop.sleep()
        return list(self.heard.values())

    def over(self, stage: str) -> bool:
        """Whether a stage is done with all requests of this round."""
        return set(self.heard) <= self.ended[stage]

    def lay(self, connector: str, switches: OverlapSwitches) -> None:
        """Take both links up and lay them anew."""
        for link in LINKS:
            self.host.handle(Unlink(link), b"")
        self.host.switches = switches
        self.generation += 1
        for link in reversed(LINKS):
            secret = secrets.token_bytes(SECRET_BYTES)
            self.host.handle(Listen(link, connector, self.generation, secret), b"")
            self.host.handle(Connect(link, connector, self.endpoint, self.generation, secret), b"")

    def runners(self) -> list[Any]:
        return [node.stage.runner for node in self.host.nodes.values() if not isinstance(node, Code2WavNode)]

    def codec(self) -> Any:
        return self.host.nodes["code2wav"].stage


class Arrivals:
    """Questions of a round that come while others are being answered. Has a turn in the loop, like a stage."""

    def __init__(self, host: OneHost, questions: Sequence[Question], apart_s: float) -> None:
        self.host, self.left = host, deque(questions)
        self.apart_ns, self.due_ns = int(1e9 * apart_s), host.host.loop.clock() if questions else None

    def turn(self) -> bool:
        did = False
        while self.due_ns is not None and self.due_ns - self.host.host.loop.clock() < TICK_NS:
            admit, blob = self.left.popleft()
            sample = self.host.heard[admit.request]
            sample.sent = min(sample.sent, time.perf_counter() - self.host.begun)  # up to a tick before its time
            self.host.host.handle(admit, blob)
            self.due_ns = self.due_ns + self.apart_ns if self.left else None
            did = True
        return did


# ---- what a row changes


@contextmanager
def swapped(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes (of what, name, value), for a while."""
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    for thing, name, value in changes:
        setattr(thing, name, value)
    try:
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


def nothing(host: OneHost) -> AbstractContextManager[Any]:
    return nullcontext()


def stage_by_stage(host: OneHost) -> AbstractContextManager[Any]:
    """The talker begins when the last text of the round is there, the vocoder when the last frame is. Their inputs
    wait in their inboxes meanwhile; kernels and graphs are the same."""
    scheduler, codec = host.host.nodes["talker"].stage.scheduler, host.codec()  # type: ignore[union-attr]
    schedule, frames = scheduler.schedule, codec._schedule
    return swapped(
        [
            (scheduler, "schedule", lambda: schedule() if host.over("thinker") else None),
            (codec, "_schedule", lambda: frames() if host.over("talker") else []),
        ]
    )


def depth_one(host: OneHost) -> AbstractContextManager[Any]:
    owners = [host.codec(), *(host.host.nodes[s].stage.scheduler for s in ("thinker", "talker"))]  # type: ignore[union-attr]
    return swapped([(o, "config", replace(o.config, overlap_depth=1)) for o in owners])


def at_once(host: OneHost) -> AbstractContextManager[Any]:
    """A step is launched as soon as the one before it runs."""
    return swapped([(host.host.nodes[s].stage.ahead, "on", False) for s in ("thinker", "talker")])  # type: ignore[union-attr]


def no_graphs(host: OneHost) -> AbstractContextManager[Any]:
    """Every kernel is launched by itself, those of prompts too."""
    runners = host.runners()
    changes = [(r, "graphs", None) for r in runners] + [(r.lane, "prompts", None) for r in runners]
    return swapped([*changes, (host.codec(), "_graphs", {})])


def no_prompt_graphs(host: OneHost) -> AbstractContextManager[Any]:
    return swapped([(r.lane, "prompts", None) for r in host.runners()])


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    """As with STRETTO_KERNELS set so, for a while."""
    before = os.environ.get("STRETTO_KERNELS")
    os.environ["STRETTO_KERNELS"] = mode
    dtypes.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ["STRETTO_KERNELS"]
        else:
            os.environ["STRETTO_KERNELS"] = before
        dtypes.cache_clear()


@contextmanager
def no_kernels(host: OneHost) -> Iterator[None]:
    """Plain PyTorch, in graphs that are captured here: as with STRETTO_KERNELS=off."""
    changes: list[tuple[Any, str, Any]] = []
    for runner in host.runners():
        lane = runner.lane
        changes += [(m, "fused", None) for m in lane.model.modules() if isinstance(m, Decoder)]
        changes += [(lane, "fused", False), (lane, "prompts", None)]
        if isinstance(lane, TalkerLane):
            changes.append((lane, "_frame", None))
    with kernels("off"), swapped(changes):
        captured: list[tuple[Any, str, Any]] = []
        for runner in host.runners():
            if runner.graphs is not None:
                graphs = DecodeGraphs(runner.lane, runner.graphs.sizes, [How(True, True)])
                graphs.capture(runner.stream)
                captured.append((runner, "graphs", graphs))
        with swapped(captured):
            yield


def shared(**off: bool) -> Change:
    """Links through shared memory, with these switches."""

    @contextmanager
    def change(host: OneHost) -> Iterator[None]:
        before = host.host.switches
        host.lay("shm", replace(before, **off))
        try:
            yield
        finally:
            host.lay("local", before)

    return change


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    base: str
    change: Change
    needs_cuda: bool = False  # without a GPU it changes nothing
    apart_s: float = 0.0  # between the requests of a round


ROWS = [
    Row(LOCAL, LOCAL, nothing),
    Row("stage by stage", LOCAL, stage_by_stage),
    Row("no kernels", LOCAL, no_kernels, needs_cuda=True),
    Row("no graphs", LOCAL, no_graphs, needs_cuda=True),
    Row("depth 1", LOCAL, depth_one),
    Row("no prompt graphs", LOCAL, no_prompt_graphs, needs_cuda=True),
    Row("all on, again", LOCAL, nothing),
    Row(APART, APART, nothing, apart_s=APART_S),
    Row("no just_in_time", APART, at_once, needs_cuda=True, apart_s=APART_S),
    Row(SHARED, SHARED, shared()),
    Row("no async_d2h", SHARED, shared(async_d2h=False), needs_cuda=True),
    Row("no async_h2d", SHARED, shared(async_h2d=False), needs_cuda=True),
    Row("no payload_stream", SHARED, shared(payload_stream=False), needs_cuda=True),
    Row("no zero_copy_encode", SHARED, shared(zero_copy_encode=False)),
]


# ---- rounds


@dataclass(slots=True)
class Asker:
    """Makes the questions of a round; no two of a run are alike."""

    builder: PromptBuilder
    local: Workload
    linked: Workload  # with media
    asked: int = 0

    def round(self, base: str, streams: int) -> list[Question]:
        return [self._question(self.linked if base == SHARED else self.local) for _ in range(streams)]

    def _question(self, workload: Workload) -> Question:
        number = self.asked = self.asked + 1
        messages = workload.messages(number, lambda text: len(self.builder.tokenizer.encode(text)) if text else 0)
        prompt = self.builder.build(messages)
        meta, blob = pack_prompt(prompt, features=True)
        p = workload.params(number)
        text = SamplingParams(p.temperature, p.top_k, p.top_p, p.repetition_penalty, stage_seed(number, "thinker"))
        seed = stage_seed(number, "talker")
        admit = Admit(
            request=RequestId(f"a{number}"), prompt=meta, speak=True, voice=None, text=Sampling.of(text),
            code0=Sampling.of(replace(CODE0, seed=seed)), residual=Sampling.of(replace(RESIDUAL, seed=seed)),
            max_text_tokens=workload.text_tokens, max_frames=workload.frames, min_text_tokens=workload.text_tokens,
            min_frames=workload.frames, first_frames=p.packets.first, each_frames=p.packets.each, ramp=p.packets.ramp,
            media=media_digest(prompt),
        )  # fmt: skip
        return admit, blob


def measure_row(host: OneHost, asker: Asker, row: Row, streams: int, rounds: int, seconds: float) -> list[Sample]:
    """At least one round after one to warm up; more until there are enough or time is up."""
    host.ask(asker.round(row.base, streams), row.apart_s)
    found: list[Sample] = []
    start = time.perf_counter()
    for _ in range(rounds):
        questions = asker.round(row.base, streams)
        found += host.ask(questions, row.apart_s)
        if time.perf_counter() - start > seconds:
            break
    return found

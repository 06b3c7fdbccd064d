"""A host in this process, without server and engine: its requests, and when each piece of
their answers came.

Used by the programs `host` and `ablation` and by tests. All stages are in it, so that they hand
payloads over directly, as in service on one GPU. Times run from a request's arrival to when a
report would leave for the engine. What the host reports goes to a process that reads and forgets
it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.workload import Workload
from stretto.config.engine import HostSettings
from stretto.errors import StageDead
from stretto.kernels.triton import dtypes
from stretto.loadtest.player import Packet
from stretto.loadtest.runner import Sample
from stretto.messages.hosts import Configure
from stretto.messages.requests import Admit, Ended, Failed, FromHost, Pcm, Text
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.params import stage_params
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Capability, RequestOptions
from stretto.preprocess.packed_prompt import pack
from stretto.preprocess.prompt import Prompt
from stretto.stage.host.channel import Channel
from stretto.stage.host.host import Host
from stretto.stage.host.loop import TICK_NS
from stretto.types import RequestId

STAGES = PIPELINE.names
VOCODER = "code2wav"
Question = tuple[Admit, bytes]


def configure(model: str, stages: Sequence[str], settings: HostSettings) -> Configure:
    """What a host of these stages is told first."""
    links = tuple((link.sender, link.receiver) for link in PIPELINE.links)
    return Configure(model, PIPELINE.build, tuple(stages), settings.as_dict(), links)


def admission(id: RequestId, prompt: Prompt, options: RequestOptions) -> Question:
    """A request as the engine announces it to a host that has all stages."""
    packed = pack(prompt)
    told = stage_params(options).items()
    stages = {stage: msgspec.Raw(msgspec.msgpack.encode(params)) for stage, params in told}
    return Admit(id, packed.for_host(with_features=True), stages), packed.feature_bytes()


class OneHost:
    """A host that answers rounds of requests and notes when each piece came."""

    def __init__(self, directory: Path, settings: HostSettings) -> None:
        self.heard: dict[RequestId, Sample] = {}
        self.ended: dict[str, set[RequestId]] = defaultdict(set)
        self.begun = 0.0
        self.failed: str | None = None
        ours, theirs = socket.socketpair()
        self._reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        theirs.close()
        self.channel = Channel(ours)
        told = configure(str(directory), STAGES, settings)
        self.host = Host(told, settings, self)  # type: ignore[arg-type]
        start = time.perf_counter()
        self.host.load()
        self.load_s = time.perf_counter() - start

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        """As the host's channel."""
        now = time.perf_counter() - self.begun
        match message:
            case Text(request=id) if id in self.heard:
                self.heard[id].words.append(now - self.heard[id].sent)
            case Pcm(request=id) if id in self.heard:
                sample = self.heard[id]
                sample.packets.append(Packet(now - sample.sent, len(blob) / 4 / SAMPLE_RATE_OUT))
            case Ended(request=id, stage=stage):
                self.ended[stage].add(id)
                if stage == VOCODER and id in self.heard:
                    self.heard[id].end = now - self.heard[id].sent
            case Failed(message=text):
                self.failed = text
        self.channel.post(message, blob)

    def push(self) -> None:
        self.channel.push()

    def send(self, message: FromHost, blob: bytes = b"") -> None:
        self.post(message, blob)
        self.push()

    def ask(self, questions: Sequence[Question], apart_s: float = 0.0) -> list[Sample]:
        """All of them, each to its end; at once, or one every so many seconds."""
        host = self.host
        self.ended.clear()
        self.heard = {a.request: Sample(i, i * apart_s) for i, (a, _) in enumerate(questions)}
        self.begun = time.perf_counter()
        arrivals = Arrivals(self, questions, apart_s)
        stages = {stage for a, _ in questions for stage in a.stages}
        arrivals.ask()
        with swapped([(host.loop, "driven", arrivals)]):
            while not all(self.over(stage) for stage in stages):
                busy = host.loop.round()
                if self.failed is not None:
                    raise StageDead(self.failed)
                if not busy:
                    host.loop.sleep()
        return list(self.heard.values())

    def over(self, stage: str) -> bool:
        """Whether a stage is done with all requests of this round."""
        return set(self.heard) <= self.ended[stage]

    def runners(self) -> list[Any]:
        return [node.core.runner for name, node in self.host.stages.items() if name != VOCODER]  # type: ignore[attr-defined]

    def codec(self) -> Any:
        return self.host.stages[VOCODER].core  # type: ignore[attr-defined]

    def close(self) -> None:
        self.channel.flush()
        self._reader.kill()
        self._reader.wait()
        self.host.close()


class Arrivals:
    """Questions of a round that come while others are being answered. The loop polls it, and it
    polls the host."""

    def __init__(self, host: OneHost, questions: Sequence[Question], apart_s: float) -> None:
        self.host = host
        self.left = deque(questions)
        self.apart_ns = int(1e9 * apart_s)
        self.next_ns = host.host.loop.clock() if questions else None

    @property
    def due_ns(self) -> int | None:
        times = [at for at in (self.next_ns, self.host.host.due_ns) if at is not None]
        return min(times, default=None)

    def poll(self) -> bool:
        asked = self.ask()
        return self.host.host.poll() or asked

    def ask(self) -> bool:
        """Those that are due."""
        did = False
        while self.next_ns is not None and self.next_ns - self.host.host.loop.clock() < TICK_NS:
            admit, blob = self.left.popleft()
            sample = self.host.heard[admit.request]
            # up to a tick before its time
            sample.sent = min(sample.sent, time.perf_counter() - self.host.begun)
            self.host.host.handle(admit, blob)
            self.next_ns = self.next_ns + self.apart_ns if self.left else None
            did = True
        return did


@dataclass(slots=True)
class Asker:
    """Makes requests; no two of a run are alike."""

    builder: PromptBuilder
    asked: int = 0

    def round(
        self, workload: Workload, streams: int, capability: Capability = "speech"
    ) -> list[Question]:
        return [self._question(workload, capability) for _ in range(streams)]

    def _question(self, workload: Workload, capability: Capability) -> Question:
        number = self.asked = self.asked + 1
        messages = workload.messages(
            number, lambda text: len(self.builder.tokenizer.encode(text)) if text else 0
        )
        options = RequestOptions(capability, replace(workload.params(number), seed=number))
        return admission(RequestId(f"a{number}"), self.builder.build(messages), options)


# ---- what is switched while a host stands


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

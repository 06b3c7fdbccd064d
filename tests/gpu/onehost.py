"""Hosts of their own for tests that run a whole pipeline in one process, on a CPU and on a GPU
alike.

On a GPU the tiny model goes through the fused kernels and captured steps, in float32: what is
compared there is exact, whatever was batched with what. (In bfloat16 another batch size could tip a
close call.)"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.config.engine import HostSettings, OverlapSwitches
from stretto.kernels.triton import dtypes
from stretto.messages.hosts import Connect, Listen, Listening, Unlink
from stretto.messages.requests import Admit, Cancel, Codes, Ended, Failed, FromHost, Text, ToHost
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.stages.encoders import EncoderCache
from stretto.preprocess.packed_prompt import pack
from stretto.preprocess.prompt import Prompt
from stretto.stage.host.host import Host
from stretto.types import GREEDY, SECRET_BYTES, RequestId
from tests.pipeline import LINKS, STAGES, announcement, configure
from tests.prompts import Maker
from tests.stage.invariants import check_scheduler
from tests.stage.pools import clear_cache
from tests.stage.stepping import in_flight

TOKENS, FRAMES = 6, 4
SETTINGS = HostSettings(
    dtype="float32",
    block_size=8,
    blocks={"thinker": 96, "talker": 96},
    max_rows=3,
    max_context=256,
    prefill_chunk=24,
    lone_prefill_chunk=24,
    link_slots=2,
    link_slot_bytes=1 << 16,
)
"""Fewer rows and slots than requests, and prompts in several steps."""


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    text: list[int] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    cached: int = 0  # prompt rows that the thinker found
    done: bool = False
    error: str | None = None

    @property
    def output(self) -> tuple[list[int], list[list[int]]]:
        return self.text, self.codes


class Listener:
    """A pipeline in this process whose answers are kept: all stages in one host, or each in one of
    its own. A request that failed is cancelled, as the engine would."""

    def __init__(self, directory: Path, settings: HostSettings, apart: bool = False) -> None:
        self.answers: dict[RequestId, Answer] = defaultdict(Answer)
        self.asked, self.generation, self.endpoint = 0, 0, b""
        groups = [(stage,) for stage in STAGES] if apart else [STAGES]
        self.hosts = [
            Host(configure(str(directory), group, {}), settings, self) for group in groups
        ]
        for host in self.hosts:
            host.load()
        self.stages: dict[str, Any] = {
            name: stage for host in self.hosts for name, stage in host.stages.items()
        }
        self.device = self.hosts[0].device
        if apart:
            self.lay(OverlapSwitches())

    def close(self) -> None:
        for host in self.hosts:
            host.close()

    def lay(self, switches: OverlapSwitches) -> None:
        """Take the links between the hosts up and lay them anew."""
        self.generation += 1
        for host in self.hosts:
            settings = host.endpoints.settings
            host.endpoints.settings = replace(settings, switches=switches)
            for link in LINKS:
                host.handle(Unlink(link), b"")
        where = {name: host for host in self.hosts for name in host.stages}
        for link, (sender, receiver) in reversed(LINKS.items()):
            secret = secrets.token_bytes(SECRET_BYTES)
            where[receiver].handle(Listen(link, "shm", self.generation, secret), b"")
            where[sender].handle(Connect(link, "shm", self.endpoint, self.generation, secret), b"")

    def runners(self) -> list[Any]:
        return [self.stages[name].core.runner for name in ("thinker", "talker")]

    def handle(self, message: ToHost, blob: bytes = b"") -> None:
        for host in self.hosts:
            host.handle(message, blob)

    def push(self) -> None:
        """As the hosts' channel, and so the next two."""

    def send(self, message: FromHost) -> None:
        self.post(message)

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        match message:
            case Listening(endpoint=endpoint):
                self.endpoint = endpoint
            case Text(request=id, ids=tokens):
                self.answers[id].text += tokens
            case Codes(request=id, start=first, width=width):
                answer = self.answers[id]
                assert first == len(answer.codes)
                answer.codes += np.frombuffer(blob, np.int32).reshape(-1, width).tolist()
            case Ended(request=id, stage="thinker", cached=cached):
                self.answers[id].cached = cached
            case Ended(request=id, stage="code2wav"):
                self.answers[id].done = True
            case Failed(request=id, message=text):
                self.answers[id].error = self.answers[id].error or text
                for host in self.hosts:
                    host.loop.post(Cancel(id))

    def admit(self, prompts: Sequence[Prompt]) -> list[RequestId]:
        """No name is ever used twice."""
        ids = []
        for prompt in prompts:
            self.asked += 1
            admit, blob = question(f"q{self.asked}", prompt)
            self.handle(admit, blob)
            ids.append(admit.request)
        return ids

    def step(self) -> bool:
        """One round; if nothing could be done, others (couriers) get the interpreter."""
        did = [host.loop.round() for host in self.hosts]
        if not any(did):
            time.sleep(0)
        return any(did)

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """All of them at once, each to its end."""
        ids = self.admit(prompts)
        while not all(self.answers[id].done or self.answers[id].error for id in ids):
            self.step()
        self.settle()
        return [self.answers.pop(id) for id in ids]

    def settle(self) -> None:
        """Until steps that ran ahead are back; then nothing may be left of any request."""
        while self.step() or any(len(s) or in_flight(s.core) for s in self.stages.values()):
            pass
        for name in ("thinker", "talker"):
            check_scheduler(self.stages[name].core.scheduler)
        for host in self.hosts:
            for stage in host.stages.values():
                assert not any(link.num_sending for link in host.links.sent_by(stage))

    def forget(self) -> None:
        """Nothing that was computed so far will be found."""
        for name in ("thinker", "talker"):
            clear_cache(self.stages[name].core.scheduler.pool)
        self.stages["thinker"].encoders.cache = EncoderCache()


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    """As with STRETTO_KERNELS set so, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_KERNELS", mode)
        dtypes.cache_clear()
        yield
    dtypes.cache_clear()


def question(name: str, prompt: Prompt) -> tuple[Admit, bytes]:
    packed = pack(prompt)
    greedy = GREEDY
    admit = announcement(
        request=RequestId(name), prompt=packed, speak=True, voice=None, text=greedy,
        code0=greedy, residual=greedy,
        max_text_tokens=TOKENS, max_frames=FRAMES, min_text_tokens=TOKENS, min_frames=FRAMES,
        first_frames=1,
        each_frames=2, ramp=None, want_codes=True,
    )  # fmt: skip
    return admit, packed.feature_bytes()


def about(config: OmniConfig, sound: int, words: int) -> Prompt:
    """A sound and some words about it. The same sound is the same opening."""
    maker = Maker(config, seed=sound)
    heard = maker.audio(260)
    maker.rng = np.random.default_rng(1000 + words)
    return maker.turn("user", heard, maker.words(6)).prompt()

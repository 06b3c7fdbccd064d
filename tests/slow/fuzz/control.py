"""Fuzzes the control messages between the engine and its hosts, including valid messages that
make no sense. For wire.py.

The corpus is what a real host receives and sends while it answers one request. Half of the mutants
are blind (bytes are changed). In the other half a value somewhere in the message becomes another
one, mostly of its type. What can still be read goes to a whole host with real stages, driven in
this thread (messages about links also to a host that has only the talker, and so has ends of
links), or to an engine with simulated hosts (played.py).

Only our own errors may be raised, and only where the process is to end. No request may be left, the
host must still answer exactly, and the engine must still serve."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from bench.harness.host import STAGES, admission, configure
from stretto.config.engine import HostSettings
from stretto.engine import link_setup as linking
from stretto.engine import supervisor
from stretto.errors import StrettoError, WireError
from stretto.messages.hosts import Configure, Connect, Listen, Ping, Quit, Unlink
from stretto.messages.requests import (
    PREFIX,
    Admit,
    Cancel,
    Codes,
    Failed,
    Features,
    Finish,
    FromHost,
    MediaData,
    Pcm,
    Text,
    Throttle,
    ToHost,
    decode_from_host,
    decode_to_host,
    encode,
)
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import RequestOptions
from stretto.preprocess.packed_prompt import Bytes, PackedPiece
from stretto.stage.host.channel import Channel
from stretto.stage.host.host import Host
from stretto.testing.qwen3_omni import write_tiny
from stretto.transport.contract import LinkOptions
from stretto.transport.registry import Registry
from stretto.types import SECRET_BYTES, RequestId
from tests.slow.fuzz.mutants import (
    IDS,
    LINKS,
    LOOK_EVERY,
    PARAMS,
    Frame,
    Said,
    changed,
    named,
    prefixes,
    readable,
)
from tests.slow.fuzz.played import from_host
from tests.slow.harness.leaks import CHATS, held
from tests.stage.reports import Reports

# how often a host has a round after a message: a round is a step of the models, and those are slow
ROUND = 0.03
SETTINGS = HostSettings(
    max_rows=4, max_waiting=8, max_context=512, blocks={"thinker": 64, "talker": 64}
)

SECRET = bytes(SECRET_BYTES)
SAID = Text | Codes | Pcm


# -- to a host


class Fed:
    """A socket's other end, as far as the host's channel reads from it."""

    data = memoryview(b"")

    def recv_into(self, view: memoryview) -> int:
        size = min(len(view), len(self.data))
        view[:size], self.data = self.data[:size], self.data[size:]
        return size


@dataclass(slots=True)
class Told:
    """A real host with all stages, one with the talker alone, and what they were told so far."""

    host: Host
    half: Host
    reports: list[tuple[FromHost, bytes]]  # of the first
    admits: list[Frame]
    peer: bytes  # where a link may be connected to
    right: Said = field(default_factory=list)
    seen: set[RequestId] = field(default_factory=set)
    asked: int = 0
    sock: Fed = field(default_factory=lambda: Fed())
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = Channel(self.sock)  # type: ignore[arg-type]

    @classmethod
    def make(cls, model: Path) -> Told:
        reports = Reports()
        host = Host(configure(str(model), STAGES, SETTINGS), SETTINGS, reports)
        half = Host(configure(str(model), ["talker"], SETTINGS), SETTINGS, Reports())
        for each in (host, half):
            each.load()
        receiver = Registry().get("shm").listen("fuzz", LinkOptions(secret=SECRET))
        told = cls(
            host, half, reports.posted, admissions(model), msgspec.msgpack.encode(receiver.endpoint)
        )
        told.right = told.answer()
        return told

    def corpus(self) -> list[Frame]:
        r = IDS[0]
        plain: list[ToHost] = [Cancel(r), Throttle(r, True), Throttle(r, False), Ping(1), Quit()]
        plain += [Finish(r, stage) for stage in STAGES]
        plain += [MediaData(r, stage, (PackedPiece((2, 2), bytes(16), 0),)) for stage in STAGES]
        plain += [Unlink(link) for link in LINKS]
        plain += [Listen(link, "shm", 1, SECRET) for link in LINKS]
        plain += [Connect(link, "shm", self.peer, 1, SECRET) for link in LINKS]
        plain.append(configure("", STAGES, SETTINGS))
        pieces = [(encode(Features(r, 64))[PREFIX.size :], bytes(size)) for size in (16, 64)]
        return self.admits * 3 + pieces + [(encode(m)[PREFIX.size :], b"") for m in plain]

    def take(self, header: bytes, blob: bytes) -> str:
        """Read and handle a message as the host's process does; the outcome's name."""
        self.sock.data = memoryview(PREFIX.pack(len(header), len(blob)) + header + blob)
        try:
            item = self.channel.read()
        except WireError:  # features that do not fit each other
            return "the host ends: WireError"
        assert item is not None
        message, blob = item
        if isinstance(message, Features):
            self.seen.add(message.request)
            return "gathered"
        if isinstance(message, Admit):
            self.seen.add(message.request)
        if isinstance(message, Listen | Connect | Unlink):
            said = [self.handled(host, message, b"") for host in (self.half, self.host)]
            return said[0]
        return self.handled(self.host, message, blob)

    def handled(self, host: Host, message: ToHost, blob: Bytes) -> str:
        try:
            host.handle(message, blob)
            if self.reports and isinstance(failed := self.reports[-1][0], Failed):
                assert "emory" not in failed.message, f"it asked for too much: {failed.message}"
        except StrettoError as error:
            if isinstance(message, Listen | Connect):
                return "link down"
            if isinstance(message, Configure | Quit):
                return f"the host ends: {type(error).__name__}"
            raise
        return "taken"

    def answer(self) -> Said:
        header, blob = self.admits[0]
        self.asked += 1
        id = RequestId(f"asked-{self.asked}")  # links remember those that are over
        self.reports.clear()
        admit = decode_to_host(header)
        assert isinstance(admit, Admit)
        self.host.handle(msgspec.structs.replace(admit, request=id), blob)
        self.run()
        assert not any(isinstance(m, Failed) for m, _ in self.reports), self.reports
        return [
            (msgspec.structs.replace(m, request=IDS[0]), b)
            for m, b in self.reports
            if isinstance(m, SAID)
        ]

    def run(self) -> None:
        for _ in range(500):
            if not self.host.loop.round():
                return
        raise AssertionError("the host does not come to rest")

    def look(self) -> None:
        """Cancel all requests and remove all links: then nothing may be held, and the next answer
        must be right."""
        for id in self.seen:
            self.take(encode(Cancel(id))[PREFIX.size :], b"")
        self.seen.clear()
        for name in (*self.half.ends.ends, *self.host.ends.ends):
            self.take(encode(Unlink(name))[PREFIX.size :], b"")
        assert not self.half.ends.ends, self.half.ends.ends
        assert not self.channel._features._parts, "features of requests that are over"
        self.run()
        for message, _ in self.reports:
            decode_from_host(encode(message)[PREFIX.size :])
        assert same(self.answer(), self.right), "the answer is another one"
        assert not held(self.host.recorder.values()), held(self.host.recorder.values())
        self.reports.clear()


def same(ours: Said, theirs: Said) -> bool:
    """The same text, frames and samples? How they are cut depends on the time that each took."""
    for kind in (Codes, Pcm):
        if [m.start for m, _ in ours if isinstance(m, kind)][:1] != [0]:
            return False
    texts = [[i for m, _ in said if isinstance(m, Text) for i in m.ids] for said in (ours, theirs)]
    codes = [b"".join(b for m, b in said if isinstance(m, Codes)) for said in (ours, theirs)]
    waves = [
        np.frombuffer(b"".join(b for m, b in said if isinstance(m, Pcm)), np.float32)
        for said in (ours, theirs)
    ]
    return (
        texts[0] == texts[1]
        and codes[0] == codes[1]
        and len(waves[0]) == len(waves[1])
        and np.allclose(*waves, rtol=0, atol=1e-5)
    )


def admissions(model: Path) -> list[Frame]:
    """Requests of several kinds, as the engine announces them to a host that has all stages."""
    builder = PromptBuilder.open(model, OmniConfig.read(model))
    kinds: list[tuple[str, RequestOptions]] = [
        ("text", RequestOptions("speech", replace(PARAMS, seed=1))),
        ("audio", RequestOptions("speech", replace(PARAMS, seed=2))),
        ("image", RequestOptions("text", replace(PARAMS, seed=3))),
        ("text", RequestOptions("tts", replace(PARAMS, seed=4), tts_ids=(1, 2))),
    ]
    made = [admission(IDS[0], builder.build(CHATS[name]), options) for name, options in kinds]
    return [(encode(admit)[PREFIX.size :], blob) for admit, blob in made]


def to_host(told: Told, inputs: int, seed: int, step: Callable[[], None]) -> Counter[str]:
    rng, outcomes = random.Random(seed), Counter[str]()
    corpus = told.corpus()
    for index in range(inputs):
        header, blob = changed(rng, corpus, IDS)
        with named(index, "to a host", header, blob):
            message = readable(decode_to_host, header)
            if message is None:
                outcomes["to a host: refused"] += 1
            else:
                outcomes[f"to a host: {type(message).__name__} {told.take(header, blob)}"] += 1
                if rng.random() < ROUND:
                    told.host.loop.round()
            if index % LOOK_EVERY == LOOK_EVERY - 1:
                told.look()
        step()
    told.look()
    return outcomes


def fuzz_control(inputs: int, seed: int, step: Callable[[], None]) -> Counter[str]:
    """Half of the inputs in each direction; a count of the outcomes."""
    for module in (supervisor, linking):  # they warn of each death
        logging.getLogger(module.__name__).setLevel(logging.ERROR)
    linking.LINK_DELAYS = (0.0,) * len(linking.LINK_DELAYS)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny(model)
        outcomes = prefixes(random.Random(seed), inputs // 10)
        told = Told.make(model)
        outcomes += to_host(told, inputs // 2, seed, step)
        return outcomes + asyncio.run(
            from_host(model, told.right, inputs - inputs // 2, seed, step)
        )

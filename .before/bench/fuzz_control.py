"""Fuzzes what the orchestrator and its hosts say to each other, and what each does with a message that looks right and
means nonsense. Run by `fuzz_wire.py`.

The corpus is what a real host is told and says while it answers one request. Half of the mutants are blind (bytes),
half are changed in their meaning: a value somewhere in the message becomes another one, mostly of its type. What can
still be read goes to a whole host with real stages, driven in this thread, or to an engine whose hosts are played here.
Nothing may escape but our own errors where the process is to end; no request may stay; and the host must still answer
exactly, the engine still serve."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pool import ROOT, held

from stretto.errors import StageDead, StrettoError, WireError
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.tiny import write_tiny
from stretto.orchestrator import pipeline as pipelines
from stretto.orchestrator.admission import Ask, announce
from stretto.orchestrator.api import Params
from stretto.orchestrator.engine import PipelineEngine
from stretto.orchestrator.messages import (
    PREFIX,
    Admit,
    Broken,
    Cancel,
    Codes,
    Configure,
    Connect,
    Ended,
    Failed,
    Features,
    FromHost,
    LinkDown,
    Linked,
    Listen,
    Listening,
    Loading,
    Pcm,
    Ping,
    Quit,
    Ready,
    Stats,
    StopText,
    Text,
    Throttle,
    ToHost,
    Unlink,
    decode_from_host,
    decode_to_host,
    encode,
    lengths,
)
from stretto.orchestrator.process import HostProcess
from stretto.orchestrator.settings import LINKS, PROCESSES, STAGES, EngineConfig, HostSettings
from stretto.prompt.build import PromptBuilder
from stretto.prompt.packed import Packed, pack
from stretto.stage.channel import Channel
from stretto.stage.host import Host
from stretto.types import RequestId

sys.path.insert(0, str(ROOT))
from tests.orchestrator.common import CHATS, HandDriven

NUMBERS = [0, 1, 2, 3, 7, 15, 16, 100, 255, 4096, 2**15, 2**31, 2**32, 2**40, 2**53, 2**63 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), -float("inf")]
WORDS = [
    "",
    "thinker",
    "talker",
    "code2wav",
    "host",
    *LINKS,
    "a>b",
    ">",
    "local",
    "none",
    "stop",
    "length",
    "é",
    "x" * 99,
]
IDS = [RequestId(f"r{i}") for i in range(6)]
LOOK_EVERY = 1000  # inputs between two looks at everything
ROUND = 0.03  # how often a host has a round after a message: a round is a step of the models, and those are slow
PARAMS = Params(max_text_tokens=3, max_frames=3, seed=1, temperature=0.0, greedy_speech=True, want_codes=True)
SETTINGS = HostSettings(max_rows=4, max_waiting=8, max_context=512, thinker_blocks=64, talker_blocks=64)

DEEP = encode(Configure("", (), {"": None}))[PREFIX.size : -1] + b"\x81\xa0" * 5000 + b"\xc0"  # maps in maps

SAID = Text | Codes | Pcm

Frame = tuple[bytes, bytes]  # header, blob
Said = list[tuple[Any, bytes]]  # text, frames and samples of one answer


# -- mutants


def changed(rng: random.Random, corpus: list[Frame], ids: list[RequestId]) -> Frame:
    """One of the corpus, with another header, and sometimes another blob."""
    header, blob = rng.choice(corpus)
    if rng.random() < 0.001:
        return DEEP, b""
    if rng.random() < 0.5:
        header = scrambled(rng, header)
    else:
        said = msgspec.msgpack.decode(header)
        if "request" in said and rng.random() < 0.9:
            said["request"] = rng.choice(ids)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            twist(rng, said)
        header = msgspec.msgpack.encode(said)
    if blob and rng.random() < 0.2:
        blob = rng.choice((b"", blob[: rng.randrange(len(blob))], blob + rng.randbytes(rng.randrange(9))))
    return header, blob


def scrambled(rng: random.Random, header: bytes) -> bytes:
    out = bytearray(header)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(5):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
            case _:
                del out[at : at + rng.choice((1, 2, 9))]
    return bytes(out)


def twist(rng: random.Random, said: Any) -> None:
    """Change one value somewhere inside a map or a list."""
    while True:
        places = list(said) if isinstance(said, dict) else list(range(len(said)))
        if not places:
            return
        at = rng.choice(places)
        value = said[at]
        if isinstance(value, dict | list) and value and rng.random() < 0.8:
            said = value
            continue
        match rng.randrange(12):
            case 0 if isinstance(said, dict):
                del said[at]
            case 0:
                said.insert(at, value)
            case 1 if isinstance(said, dict):
                said[rng.choice(WORDS)] = value
            case 1:
                del said[at:]
            case 2:
                said[at] = other(rng, rng.choice((0, 0.0, "", b"", None, True, [], {})))
            case _:
                said[at] = other(rng, value)
        return


def other(rng: random.Random, value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            near = [v for v in (value + 1, value - 1) if -(2**63) <= v < 2**64]  # as far as the encoding goes
            return rng.choice((*near, rng.choice(NUMBERS), -rng.choice(NUMBERS)))
        case float():
            return rng.choice(FLOATS)
        case str():
            return rng.choice(WORDS)
        case bytes():
            return rng.choice((b"", value[:-1], value + b"x", rng.randbytes(16)))
        case list():
            return rng.choice(([], value * 2, value[:1], value[::-1], [rng.choice(NUMBERS) for _ in range(4)]))
        case dict():
            return {}
        case _:
            return rng.choice((0, 0.0, "thinker", b"x", [], True))


def readable(decode: Callable[[bytes], Any], header: bytes) -> Any:
    """The message, which must survive its own encoding; None if it is refused."""
    try:
        message = decode(header)
    except WireError:
        return None
    again = encode(message)[PREFIX.size :]
    assert encode(decode(again))[PREFIX.size :] == again, "a message that is not itself once it is encoded"
    return message


def prefixes(rng: random.Random, inputs: int) -> Counter[str]:
    """Lengths of frames: within the limits, or refused."""
    outcomes: Counter[str] = Counter()
    for _ in range(inputs):
        data = PREFIX.pack(rng.choice(NUMBERS) % 2**32, rng.choice(NUMBERS) % 2**32) if rng.random() < 0.5 else None
        try:
            lengths(data or rng.randbytes(PREFIX.size))
            outcomes["frame: accepted"] += 1
        except WireError:
            outcomes["frame: refused"] += 1
    return outcomes


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
    """A real host with all stages, and what it was told to come so far."""

    host: Host
    reports: list[tuple[FromHost, bytes]]
    links: list[tuple[ToHost, bytes]]  # how its links were laid
    admits: list[Frame]
    right: Said = field(default_factory=list)
    seen: set[RequestId] = field(default_factory=set)
    asked: int = 0
    sock: Fed = field(default_factory=lambda: Fed())
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = Channel(self.sock)  # type: ignore[arg-type]

    @classmethod
    def make(cls, model: Path) -> Told:
        with overheard() as links:
            driven = HandDriven(model, SETTINGS)
        told = cls(driven.host, driven.reports, links, admissions(model))
        told.right = told.answer()
        return told

    def corpus(self) -> list[Frame]:
        r = IDS[0]
        plain: list[ToHost] = [Cancel(r), StopText(r), Throttle(r, True), Throttle(r, False), Ping(1), Quit()]
        plain += [Unlink(link) for link in LINKS]
        plain += [message for message, _ in self.links]
        plain.append(Configure("", STAGES, {"max_rows": 4}))
        pieces = [(encode(Features(r, 64))[PREFIX.size :], bytes(size)) for size in (16, 64)]
        return self.admits * 3 + pieces + [(encode(m)[PREFIX.size :], b"") for m in plain]

    def take(self, header: bytes, blob: bytes) -> str:
        """As the host's process does; what came of it."""
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
        try:
            self.host.handle(message, blob)
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
        """Lay the links anew and ask."""
        header, blob = self.admits[0]
        self.asked += 1
        id = RequestId(f"asked-{self.asked}")  # links remember those that are over
        for link in LINKS:
            self.host.handle(Unlink(link), b"")
        for message, part in self.links:
            if isinstance(message, Connect):  # to where the host listens now
                listens = [m for m, _ in self.reports if isinstance(m, Listening) and m.link == message.link]
                message = msgspec.structs.replace(message, endpoint=listens[-1].endpoint)
            self.host.handle(message, part)
        self.reports.clear()
        admit = decode_to_host(header)
        assert isinstance(admit, Admit)
        self.host.handle(msgspec.structs.replace(admit, request=id), blob)
        self.run()
        assert not any(isinstance(m, Failed) for m, _ in self.reports), self.reports
        return [(msgspec.structs.replace(m, request=IDS[0]), b) for m, b in self.reports if isinstance(m, SAID)]

    def run(self) -> None:
        for _ in range(500):
            if not self.host.loop.round():
                return
        raise AssertionError("the host does not come to rest")

    def look(self) -> None:
        """All requests are cancelled: nothing may be held, and the next answer is the right one."""
        for id in self.seen:
            self.take(encode(Cancel(id))[PREFIX.size :], b"")
        self.seen.clear()
        assert not self.channel._features._parts, "features of requests that are over"
        self.run()
        for message, _ in self.reports:
            decode_from_host(encode(message)[PREFIX.size :])
        left = [what for what in held(self.host.stats()) if not what.startswith("credits")]
        assert not left, left
        assert same(self.answer(), self.right), "the answer is another one"
        assert not held(self.host.stats()), held(self.host.stats())
        self.reports.clear()


def same(ours: Said, theirs: Said) -> bool:
    """The same text, frames and samples? How they are cut depends on the time that each took."""
    for kind in (Codes, Pcm):
        if [m.start for m, _ in ours if isinstance(m, kind)][:1] != [0]:
            return False
    texts = [[i for m, _ in said if isinstance(m, Text) for i in m.ids] for said in (ours, theirs)]
    codes = [b"".join(b for m, b in said if isinstance(m, Codes)) for said in (ours, theirs)]
    waves = [np.frombuffer(b"".join(b for m, b in said if isinstance(m, Pcm)), np.float32) for said in (ours, theirs)]
    return (
        texts[0] == texts[1]
        and codes[0] == codes[1]
        and len(waves[0]) == len(waves[1])
        and np.allclose(*waves, rtol=0, atol=1e-5)
    )


@contextmanager
def overheard() -> Iterator[list[tuple[ToHost, bytes]]]:
    """What hosts are told meanwhile."""
    told: list[tuple[ToHost, bytes]] = []
    handle = Host.handle

    def hear(self: Host, message: ToHost, blob: bytes) -> None:
        told.append((message, blob))
        handle(self, message, blob)

    Host.handle = hear  # type: ignore[method-assign]
    try:
        yield told
    finally:
        Host.handle = handle  # type: ignore[method-assign]


def admissions(model: Path) -> list[Frame]:
    """Requests of several kinds, as the engine announces them to a host that has all stages."""
    played = Played(model, [[*STAGES]])
    sent: list[Frame] = []
    played.engine._pipelines[0]._hosts[0].send = lambda m, b=b"": sent.append((encode(m)[PREFIX.size :], b))  # type: ignore[method-assign]
    for name, speak, spoken in (
        ("text", True, None),
        ("audio", True, None),
        ("image", False, None),
        ("text", True, (1, 2)),
    ):
        ask = Ask(speak, None, PARAMS, None, spoken)
        asyncio.run(announce(played.ticket(pack(played.builder.build(CHATS[name])), ask), ask, shared=True))
    return sent


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


@contextmanager
def named(index: int, what: str, header: bytes, blob: bytes) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SystemExit(f"input {index} {what}: {error!r}\n{header.hex()}\nwith a blob of {len(blob)}") from error


# -- from a host


class Wire:
    """A channel to a host that is played here: it lays links when it is told to, and forgets the rest."""

    def __init__(self, host: HostProcess) -> None:
        self.host = host

    def write(self, data: bytes) -> None:
        if len(data) < PREFIX.size or sum(lengths(data[: PREFIX.size])) == 0:
            return
        header, _ = lengths(data[: PREFIX.size])
        if len(data) != PREFIX.size + header:
            return  # a blob
        match decode_to_host(data[PREFIX.size :]):
            case Listen(link=link, generation=generation):
                self._say(Listening(link, generation, b"here"))
            case Connect(link=link, generation=generation):
                self._say(Linked(link, generation))

    def _say(self, message: FromHost) -> None:
        asyncio.get_running_loop().call_soon(self.host.take, encode(message))

    def close(self) -> None:
        pass


class Played:
    """An engine whose hosts are played here, and some requests that wait for them."""

    def __init__(self, model: Path, placement: Any = PROCESSES) -> None:
        config = EngineConfig(placement=tuple(map(tuple, placement)), restart=False, max_buffered_s=0.1)
        self.engine = PipelineEngine(model, config)
        self.builder = PromptBuilder.open(model, OmniConfig.read(model))
        self.prompt = pack(self.builder.build(CHATS["text"]))
        self.pipeline = self.engine._pipelines[0]
        self.engine._up = self.pipeline._started = True
        self.pipeline._links = dict.fromkeys(LINKS, True)
        self.pipeline._hosts = [self.host(i) for i in range(len(placement))]
        self.deaths = 0

    def host(self, index: int) -> HostProcess:
        host = self.pipeline._host(index)
        host._transport, host.state = Wire(host), "ready"  # type: ignore[assignment]
        return host

    def ticket(self, prompt: Packed, ask: Ask) -> Any:
        return self.engine._admit(prompt, ask, 0.0)

    @property
    def tickets(self) -> list[Any]:
        return list(self.engine._tickets.values())

    async def fill(self) -> None:
        """Bring back what is dead or over, so that there is always something to spoil."""
        for i, host in enumerate(self.pipeline._hosts):
            if host.state == "dead":
                self.deaths += 1
                self.pipeline._hosts[i] = self.host(i)
        while not self.pipeline.ready(speak=True):
            await self.pipeline._join()
        for t in self.tickets:
            while not t.events.empty():
                event = t.events.get_nowait()
                if isinstance(event, StrettoError) or type(event).__name__ == "Finished":
                    t.over = not isinstance(event, StrettoError)
                    self.engine._leave(t)
                elif type(event).__name__ == "AudioChunk":
                    t.take(len(event.samples), self.engine.config.max_buffered_s)
        while len(self.engine._tickets) < len(IDS):
            self.ticket(self.prompt, Ask(len(self.engine._tickets) % 3 > 0, None, PARAMS, None))

    def look(self) -> None:
        p = self.pipeline
        assert len(self.engine._tickets) == p.active == len(IDS), (len(self.engine._tickets), p.active)
        assert set(p.progress) == set(STAGES), p.progress
        assert set(p.memory) <= {*STAGES, "allocated"}, p.memory
        assert len(p._tasks) <= len(LINKS) + 1, p._tasks
        assert self.engine.progress.state == "ready"
        assert all(isinstance(v, int | float) for v in self.engine.metrics().values())

    def check_death(self, host: HostProcess, index: int) -> None:
        """A host that talked nonsense is dead, and so are the requests that need it."""
        stages = set(PROCESSES[index])
        for t in self.tickets:
            assert t.failed or not stages & t.unfinished, f"{t.id} waits for a dead host"
        assert isinstance(host.death(), StageDead)


def spoken(reports: Said) -> list[Frame]:
    """What a host says, of every kind."""
    r = IDS[0]
    more: list[FromHost] = [
        Loading("talker", "loading"),
        Ready(("talker",), 1.0, {"talker": 5, "allocated": 7}),
        Broken("StageDead", "it broke"),
        Listening("thinker>talker", 1, b"here"),
        Linked("talker>code2wav", 1),
        LinkDown("thinker>talker", 1, "it broke"),
        LinkDown("talker>code2wav", 1, "it broke"),
        Failed(r, "talker", "Busy", "full"),
        Failed(r, "thinker", "ValueError", "what"),
        Stats(1, {"stretto_x": 1.0, 'stretto_y{stage="talker"}': 2.0}),
        *(Ended(r, stage, "stop", 1.0, (1.5, 2.0), 3, (1.2,)) for stage in STAGES),
    ]
    return [(encode(m)[PREFIX.size :], b) for m, b in [*reports, *((m, b"") for m in more)]]


async def from_host(model: Path, reports: Said, inputs: int, seed: int, step: Callable[[], None]) -> Counter[str]:
    rng, outcomes = random.Random(seed), Counter[str]()
    corpus, played = spoken(reports), Played(model)
    for index in range(inputs):
        await played.fill()
        header, blob = changed(rng, corpus, [t.id for t in played.tickets])
        which = rng.randrange(len(PROCESSES))
        host = played.pipeline._hosts[which]
        with named(index, "from a host", header, blob):
            message = readable(decode_from_host, header)
            what = "refused" if message is None else type(message).__name__
            data = PREFIX.pack(len(header), len(blob)) + header + blob
            cut = rng.randrange(len(data))
            host.take(data[:cut])
            host.take(data[cut:])
            if host.state == "dead":
                played.check_death(host, which)
            assert message is not None or host.state == "dead", "what cannot be read must end the host"
            outcomes[f"from a host: {what}{', it is killed' if host.state == 'dead' else ''}"] += 1
            if index % LOOK_EVERY == LOOK_EVERY - 1:
                await played.fill()
                await asyncio.sleep(0)
                played.look()
        step()
    for t in played.tickets:
        played.engine._leave(t)
    assert not played.engine._tickets
    assert not played.pipeline.active
    await played.engine.close()
    return outcomes


def fuzz_control(inputs: int, seed: int, step: Callable[[], None]) -> Counter[str]:
    """Half of them each way; what came of them."""
    logging.getLogger(pipelines.__name__).setLevel(logging.ERROR)  # it warns of each death
    pipelines.LINK_DELAYS = (0.0,) * len(pipelines.LINK_DELAYS)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny(model)
        outcomes = prefixes(random.Random(seed), inputs // 10)
        told = Told.make(model)
        outcomes += to_host(told, inputs // 2, seed, step)
        return outcomes + asyncio.run(from_host(model, told.right, inputs - inputs // 2, seed, step))

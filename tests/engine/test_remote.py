"""Hosts behind agents, as on other machines: exact answers, deaths of each part, strangers, wrong
secrets and versions. The agents are processes of this machine; what differs on others (addresses,
clocks) has tests of its own below."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stretto import __version__
from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement
from stretto.engine import remote_host as remote
from stretto.engine.agent import ORPHANED
from stretto.engine.engine import PipelineEngine
from stretto.engine.host_handle import HostMessage
from stretto.engine.invitation import HELLO, Hello, Invitation
from stretto.engine.pipeline import Pipeline, by_our_clock
from stretto.engine.remote_host import DRIFT, ClockOffset, RemoteHost, RemoteLauncher
from stretto.errors import Invalid, StageDead
from stretto.messages.hosts import Configure, Connect, Listen, Listening, Ping, Ready, Stats
from stretto.messages.requests import PREFIX, Ended, decode_to_host, encode
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.transport.zmq_auth import encrypt, key_of
from stretto.types import RequestId
from tests.engine.agents import SECRET, ProcessAgent, ProcessStarter, children, gone
from tests.engine.common import CHATS, collect, expected, run, same
from tests.engine.scripted import ScriptedLauncher, read_reports, rest
from tests.pipeline import STAGES

SHORT = Params(max_text_tokens=8, max_frames=10, greedy_speech=True, want_codes=True, seed=5)
LONG = Params(max_text_tokens=900, max_frames=3000, min_frames=3000, ignore_eos=True, seed=5)
LOCAL = "127.0.0.1"


@pytest.fixture(scope="module")
def builder(tiny_dir: Path) -> PromptBuilder:
    return PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))


def engine(model: Path, starter: ProcessStarter, placement: Placement = "two") -> PipelineEngine:
    config = EngineConfig(placement=placement, connector="tcp")
    return PipelineEngine(model, config, RemoteLauncher(starter, SECRET, LOCAL))


@dataclass(slots=True)
class Impatient(ProcessStarter):
    """While an agent is being started, its engine asks for signs of life; and strangers dial."""

    pipelines: list[Pipeline] = field(default_factory=list)

    async def start(self, invitation: Invitation, number: int) -> ProcessAgent:
        self.pipelines[0].ping(7)
        for hello in (
            b"",
            b"nonsense",
            msgspec.msgpack.encode(Hello(__version__, LOCAL, 1, b"x" * 32)),
        ):
            await stranger(invitation, hello)
        return await ProcessStarter.start(self, invitation, number)


async def stranger(invitation: Invitation, hello: bytes) -> None:
    """Somebody who has the key, say from a leaked file, and not the secret; he is shown the
    door."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        encrypt(dealer, key_of(SECRET, invitation.purpose))
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.LINGER, 0)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://{invitation.address}")
        dealer.send_multipart([HELLO, hello])
        while not monitor.poll(0):
            await asyncio.sleep(0.01)
        dealer.disable_monitor()
        monitor.close(0)


class NoAgent:
    def on_end(self, callback: Callable[[StageDead], None]) -> None:
        pass

    def kill(self) -> None:
        pass


class NoStarter:
    """Starts no agent: a test dials in its place."""

    def __init__(self) -> None:
        self.invited: asyncio.Future[Invitation] = asyncio.get_running_loop().create_future()

    async def start(self, invitation: Invitation, number: int) -> NoAgent:
        self.invited.set_result(invitation)
        return NoAgent()


@asynccontextmanager
async def dialled(
    host: RemoteHost, starter: NoStarter, before: Callable[[], None] = lambda: None
) -> AsyncIterator[zmq.Socket[bytes]]:
    """The socket of an agent that the host was started with. `before` is called while the host
    waits for it."""
    starting = asyncio.create_task(host.start())
    invitation = await starter.invited
    before()
    hello = Hello.make(invitation, SECRET, LOCAL, 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        encrypt(dealer, key_of(SECRET, invitation.purpose))
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{invitation.address}")
        dealer.send_multipart([HELLO, msgspec.msgpack.encode(hello)])
        await starting
        try:
            yield dealer
        finally:
            await host.stop()


def remote_host() -> RemoteHost:
    return RemoteHost("p0.0", asyncio.Queue(), 0, "cpu", ProcessStarter(), SECRET, LOCAL)


async def dies(engine: PipelineEngine, *pids: int) -> str:
    """Kill these while somebody listens; what he is told."""
    events = engine.generate(CHATS["text"], params=LONG)
    async for e in events:
        if type(e).__name__ == "AudioChunk":
            break
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(StageDead) as told:
        async for _ in events:
            pass
    return str(told.value)


async def ready(engine: PipelineEngine) -> None:
    while not engine.pipelines[0].ready(STAGES):
        await asyncio.sleep(0.02)


def test_exact_far_away_and_after_every_death(
    tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    async def check(it: PipelineEngine, chat: str) -> None:
        same(
            await collect(it.generate(CHATS[chat], params=SHORT)),
            expected(models, builder, CHATS[chat], SHORT),
        )

    async def work() -> None:
        starter = Impatient(
            [OSError("the node has just died")]
        )  # the first start fails, and is tried again
        it = engine(tiny_dir, starter)
        starter.pipelines = it.pipelines
        await it.start()
        try:
            for chat in ("text", "audio", "image"):
                await check(it, chat)
            agents = [a.process.pid for a in starter.agents]
            hosts = [children(pid)[0] for pid in agents]
            told = await dies(it, hosts[0])
            reasons = ("ended by signal 9", "the other end died", "is down: it ended")
            assert any(r in told for r in reasons), "its agent says so, or its link"
            await gone(agents[0])
            await ready(it)
            await check(it, "text")
            await dies(it, agents[1])
            await gone(hosts[1])
            await ready(it)
            await check(it, "text")
            live = [a.process.pid for a in starter.agents if a.process.returncode is None]
            left = [pid for agent in live for pid in (agent, *children(agent))]
            assert len(left) == 4
        finally:
            await it.close()
        await gone(*left)
        await starter.ended()

    run(work())


def test_hosts_end_with_the_process_that_keeps_them(tiny_dir: Path) -> None:
    """A node's raylet: Ray ends what it started seconds later."""

    async def work() -> None:
        keeper = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
        )
        starter = ProcessStarter(keeper=keeper.pid)
        it = engine(tiny_dir, starter, "one")
        await it.start()
        try:
            [host] = children(starter.agents[0].process.pid)
            assert ORPHANED in await dies(it, keeper.pid)
            await gone(host, starter.agents[0].process.pid)
            await keeper.wait()
        finally:
            await it.close()
        await starter.ended()

    run(work())


def test_hosts_end_with_their_engine(tiny_dir: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from tests.engine.test_remote import *\n"
        "async def work():\n"
        "    starter = Free()\n"
        f"    it = engine(Path({str(tiny_dir)!r}), starter, 'one')\n"
        "    await it.start()\n"
        "    print(*(p for a in starter.agents for p in (a.process.pid, "
        "*children(a.process.pid))), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(work())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(p) for p in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    run(gone(*pids))


class Free(ProcessStarter):
    """Its agents outlive it: only the connection's end can end them."""

    async def start(self, invitation: Invitation, number: int) -> ProcessAgent:
        os.environ["AGENT_OUTLIVES"] = "1"
        return await ProcessStarter.start(self, invitation, number)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((secrets.token_bytes(32), None), "the cluster's secrets differ"),
        ((SECRET, "0.0.9"), f"runs stretto 0.0.9, but this is {__version__}"),
    ],
    ids=["secret", "version"],
)
def test_who_does_not_belong_is_one_clear_error(
    wrong: tuple[bytes, str | None], words: str, tiny_dir: Path
) -> None:
    async def work() -> None:
        starter = ProcessStarter(wrong={1: wrong})
        it = engine(tiny_dir, starter)
        with pytest.raises(StageDead, match=words):
            await it.start()
        await it.close()
        await starter.ended()
        assert len(starter.agents) <= 2, "it is not tried again and again"

    run(work())


def test_an_agent_that_never_dials_is_given_up(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "START_S", 0.2)

    class Silent(ProcessStarter):
        async def start(self, invitation: Invitation, number: int) -> ProcessAgent:
            process = await asyncio.create_subprocess_exec(
                "sleep", "600", stdout=asyncio.subprocess.PIPE
            )
            self.agents.append(ProcessAgent(process))
            return self.agents[-1]

    async def work() -> None:
        starter = Silent()
        host = RemoteHost("p0.0", asyncio.Queue(), 0, "cpu", starter, SECRET, LOCAL)
        with pytest.raises(OSError, match="did not dial"):
            await host.start()
        await starter.ended()

    run(work())


# ---- addresses and clocks


def test_links_are_told_the_hosts_addresses_and_the_connectors_details() -> None:
    async def work() -> None:
        launcher = ScriptedLauncher()
        config = EngineConfig(
            placement="two",
            connector="mooncake",
            link_details={"protocol": "rdma", "device": "mlx"},
        )
        p = Pipeline("p0", "", PIPELINE, config, launcher=launcher)
        async with read_reports(p):
            start = asyncio.create_task(p.start())
            while len(launcher.hosts) < 2 or not all(h.started for h in launcher.hosts):
                await asyncio.sleep(0)
            front, back = launcher.hosts
            front.address, back.address = "10.0.0.1", "10.0.0.2"
            for host in launcher.hosts:
                [told] = host.heard()
                assert isinstance(told, Configure)
                host.say(Ready(told.stages, 0.0))
            while not any(isinstance(m, Listen) for m in back.heard()):
                await asyncio.sleep(0)
            [listen] = [m for m in back.heard() if isinstance(m, Listen)]
            assert (listen.host, listen.details) == (
                "10.0.0.2", {"protocol": "rdma", "device": "mlx", "advertise": "10.0.0.2"},
            )  # fmt: skip
            back.say(Listening(listen.link, listen.generation, b"there"))
            await rest()
            [connect] = [m for m in front.heard() if isinstance(m, Connect)]
            assert (connect.host, connect.details["advertise"]) == ("10.0.0.1", "10.0.0.1")
            assert connect.secret == listen.secret
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    run(work())


@pytest.mark.parametrize(
    ("connector", "details"),
    [
        ("tcp", {"protocol": "rdma"}),
        ("mooncake", {"protocol": "udp"}),
        ("mooncake", {"secret": "x"}),
    ],
)
def test_details_of_links_are_checked(connector: str, details: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="link_details"):
        EngineConfig(connector=connector, link_details=details)


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.2)), min_size=1, max_size=30),
    st.floats(-1e6, 1e6),
)
def test_an_offset_is_within_its_error(ways: list[tuple[float, float]], truth: float) -> None:
    """However long the way there and back: the estimate is as true as it says, and never worse than
    the best ask."""
    clock, now = ClockOffset(), 100.0
    for there, back in ways:
        clock.add(now, now + there + back, now + there + truth)
        now += 1.0
        assert abs(clock.offset - truth) <= clock.error + 1e-6
    assert (
        clock.error <= min(there + back for there, back in ways) / 2 + DRIFT * len(ways) * 2 + 1e-9
    )


def test_an_old_offset_gives_way() -> None:
    clock = ClockOffset()
    clock.add(0.0, 0.001, 50.0)
    clock.add(1.0, 1.010, 51.0)
    assert clock.error == pytest.approx(0.0005), "a slower answer is not believed"
    clock.add(3600.0, 3600.010, 3650.3)
    assert clock.offset == pytest.approx(50.295), "but after an hour it is: clocks drift"


def test_times_of_a_host_come_by_our_clock() -> None:
    told = Ended(RequestId("r"), "talker", "stop", 105.0, (106.0, 107.5), 0, (105.5,))
    assert by_our_clock(told, 100.0) == Ended(
        RequestId("r"), "talker", "stop", 5.0, (6.0, 7.5), 0, (5.5,)
    )
    assert by_our_clock(told, 0.0) is told

    async def work() -> None:
        starter = NoStarter()
        launcher = RemoteLauncher(starter, SECRET, LOCAL)
        p = Pipeline("p0", "", PIPELINE, EngineConfig(), launcher=launcher)
        p.supervisor.make_hosts()
        [host] = p.supervisor.hosts
        assert isinstance(host, RemoteHost)
        async with dialled(host, starter), read_reports(p) as reports:
            host.ping(3)
            asked = time.monotonic()
            host.receive(encode(Stats(3, {}, asked + 1000.0)))
            assert host.offset == pytest.approx(1000.0, abs=1.0)
            host.receive(encode(told))
            await rest()
        [report] = reports
        assert isinstance(report, HostMessage)
        assert isinstance(report.message, Ended)
        assert report.message.begun == pytest.approx(105.0 - host.offset)

    run(work())


def test_a_peer_whose_coming_is_told_after_its_hello_stays() -> None:
    """Messages are read before events of connections: the peer is known when its own coming is
    heard of."""

    async def work() -> None:
        host = remote_host()
        wire = remote._Wire(host, "nonce", SECRET, LOCAL)
        hello = Hello.make(wire.invitation, SECRET, LOCAL, 1)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            encrypt(dealer, key_of(SECRET, wire.invitation.purpose))
            dealer.setsockopt(zmq.LINGER, 0)
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(f"tcp://{wire.invitation.address}")
            dealer.send_multipart([HELLO, msgspec.msgpack.encode(hello)])
            while not (
                wire._socket_ready() and wire._monitor_readable()
            ):  # the event loop does not run meanwhile
                pass
            wire._poll()
            assert host._hello.result() == hello
            assert not wire._pending
            assert not monitor.poll(200), "it was not shown the door"
            dealer.disable_monitor()
            monitor.close(0)
        wire.close()

    run(work())


def test_nothing_goes_before_the_agents_hello() -> None:
    """What is asked of a host that is being started must not come before `Configure`, nor count as
    unanswered."""

    async def work() -> None:
        starter = NoStarter()
        host = RemoteHost("p0.0", asyncio.Queue(), 0, "cpu", starter, SECRET, LOCAL)

        def send_too_soon() -> None:
            host.ping(1)
            host.send(Ping(2))
            assert host.unanswered_since is None

        async with dialled(host, starter, send_too_soon) as dealer:
            host.send(Ping(3))
            _, frame = await asyncio.to_thread(dealer.recv_multipart)
            assert decode_to_host(frame[PREFIX.size :]) == Ping(3)

    run(work())


@pytest.mark.parametrize("lacks", ["socket", "monitor"])
def test_a_machine_without_sockets_is_tried_again_later(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OSError`, as of anything that may be had later; and what there was by then is closed."""
    made: list[zmq.Socket[bytes]] = []
    context = zmq.Context.instance()

    def socket(kind: int) -> zmq.Socket[bytes]:
        if lacks == "socket":
            raise zmq.ZMQError(24)
        made.append(zmq.Socket(context, kind))
        return made[-1]

    def refuse(*given: object) -> None:
        raise zmq.ZMQError(24)

    monkeypatch.setattr(zmq.Context, "instance", lambda: SimpleNamespace(socket=socket))
    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", refuse)

    async def work() -> None:
        host = remote_host()
        with pytest.raises(OSError, match="Too many open files"):
            await host.start()
        await host.stop()
        assert [s.closed for s in made] == [True] * len(made)

    run(work())

"""Links as the engine makes them, with hosts that are played by hand: what is said late of a
link never touches its successor, and each has a secret of its own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine import link_setup as linking
from stretto.engine.host_handle import HostMessage, StagesLost
from stretto.engine.pipeline import Pipeline
from stretto.errors import WireError
from stretto.messages.hosts import Connect, LinkDown, Linked, Listen, Listening, Ready
from stretto.messages.requests import PREFIX, decode_to_host, encode
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.types import SECRET_BYTES
from tests.engine.common import run
from tests.engine.scripted import ScriptedHost, ScriptedLauncher, read_reports, rest
from tests.pipeline import PROCESSES, STAGES
from tests.virtual import Virtual, run_virtual

LINK = "talker>code2wav"
TALKER, VOCODER = 1, 2


class Play:
    """A pipeline whose thinker>talker link is up, and whose other link is in our hands."""

    def __init__(self) -> None:
        self.reports: list[HostMessage | StagesLost] = []
        config = EngineConfig(placement=PROCESSES)
        launcher = ScriptedLauncher()
        self.pipeline = Pipeline("p", "", PIPELINE, config, launcher=launcher)
        self.pipeline.supervisor.make_hosts()
        self.hosts = launcher.hosts
        for host in self.hosts:
            host.started, host.state = True, "ready"
        self.pipeline.supervisor.links.up["thinker>talker"] = True

    @property
    def lost(self) -> list[frozenset[str]]:
        return [r.stages for r in self.reports if isinstance(r, StagesLost)]

    async def say(self, host: int, message: Any) -> None:
        self.hosts[host].say(message)
        await rest()

    async def asked(self, kind: type[Any], host: int, count: int) -> Any:
        """Wait until a host was told the `count`th message of a kind."""
        while len(found := [m for m in self.hosts[host].heard() if isinstance(m, kind)]) < count:
            await asyncio.sleep(0)
        assert len(found) == count
        return found[-1]

    async def make(self, count: int) -> int:
        """Make the link, for the `count`th time; its generation."""
        listen = await self.asked(Listen, VOCODER, count)
        await self.say(VOCODER, Listening(LINK, listen.generation, b"%d" % count))
        connect = await self.asked(Connect, TALKER, count)
        assert (connect.endpoint, connect.generation) == (b"%d" % count, listen.generation)
        await self.say(TALKER, Linked(LINK, listen.generation))
        assert self.pipeline.ready(STAGES)
        return int(listen.generation)


def play(work: Callable[[Play], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        p = Play()
        async with read_reports(p.pipeline) as p.reports:
            joining = asyncio.create_task(p.pipeline.supervisor.links.join())
            await work(p)
            await joining
            await p.pipeline.close()

    run(whole())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "LINK_DELAYS", (0.0, 0.0))


def test_a_late_report_does_not_take_down_the_successor() -> None:
    async def work(p: Play) -> None:
        first = await p.make(1)
        await p.say(TALKER, LinkDown(LINK, first, "it broke"))
        assert p.lost == [{"code2wav"}]
        second = await p.make(2)
        assert second > first
        await p.say(VOCODER, LinkDown(LINK, first, "it broke, as seen from here"))
        assert p.pipeline.ready(STAGES)
        assert p.lost == [{"code2wav"}]
        await p.say(VOCODER, LinkDown(LINK, second, "again"))
        assert not p.pipeline.ready(STAGES)
        await p.make(3)

    play(work)


def test_a_late_report_does_not_refuse_the_successor_that_is_being_made() -> None:
    async def work(p: Play) -> None:
        first = await p.make(1)
        await p.say(TALKER, LinkDown(LINK, first, "it broke"))
        await p.asked(Listen, VOCODER, 2)
        await p.say(VOCODER, LinkDown(LINK, first, "it broke, as seen from here"))
        await p.say(TALKER, Linked(LINK, first))
        await rest()
        assert not p.pipeline.ready(STAGES)
        await p.make(2)

    play(work)


def test_the_last_try_counts() -> None:
    async def work(p: Play) -> None:
        listen = await p.asked(Listen, VOCODER, 1)
        await p.say(VOCODER, LinkDown(LINK, listen.generation, "no room"))
        listen = await p.asked(Listen, VOCODER, len(linking.LINK_DELAYS))
        await p.say(TALKER, Linked(LINK, listen.generation))
        await rest()

    play(work)


def test_a_late_answer_is_not_taken_for_that_of_the_next_try() -> None:
    async def work(p: Play) -> None:
        listen = await p.asked(Listen, VOCODER, 1)
        await p.say(VOCODER, LinkDown(LINK, listen.generation, "no room"))
        await p.asked(Listen, VOCODER, 2)
        await p.say(VOCODER, Listening(LINK, listen.generation, b"old"))
        await rest()
        assert not any(isinstance(m, Connect) for m in p.hosts[TALKER].heard())
        # From here on the second try is the first that is answered.
        listen = await p.asked(Listen, VOCODER, 2)
        await p.say(VOCODER, Listening(LINK, listen.generation, b"new"))
        assert (await p.asked(Connect, TALKER, 1)).endpoint == b"new"
        await p.say(TALKER, Linked(LINK, listen.generation))
        assert p.pipeline.ready(STAGES)

    play(work)


def test_each_generation_of_each_link_has_a_secret_of_its_own() -> None:
    """Both ends of a link are told the same, and nothing else is ever told the same."""
    other, rounds = "thinker>talker", 3
    ends = {LINK: (TALKER, VOCODER), other: (0, TALKER)}

    async def work(p: Play) -> None:
        p.pipeline.supervisor.links.up[other] = False
        told: list[bytes] = []
        for count in range(1, rounds + 1):
            for link, (sender, receiver) in ends.items():  # in the order in which they are made
                while not (
                    listen := [m for m in p.hosts[receiver].heard() if is_about(m, Listen, link)]
                )[count - 1 :]:
                    await asyncio.sleep(0)
                assert listen[-1].connector == "shm"
                await p.say(receiver, Listening(link, listen[-1].generation, b"here"))
                connect = next(
                    m for m in reversed(p.hosts[sender].heard()) if is_about(m, Connect, link)
                )
                assert connect.secret == listen[-1].secret
                told.append(listen[-1].secret)
                await p.say(sender, Linked(link, listen[-1].generation))
            await rest()
            assert p.pipeline.ready(STAGES)
            if count < rounds:
                for link in ends:
                    await p.say(
                        VOCODER,
                        LinkDown(link, p.pipeline.supervisor.links.generations[link], "it broke"),
                    )
        assert [len(secret) for secret in told] == [SECRET_BYTES] * rounds * len(ends)
        assert len(set(told)) == len(told)

    play(work)


async def refuse_links(host: ScriptedHost) -> None:
    """Load, and listen for no link, until it is killed."""
    refused = 0
    while not host.killed:
        if host.state == "starting" and host.started:
            host.say(Ready(("code2wav",), 0.0))
        listens = [m for m in host.heard() if isinstance(m, Listen)]
        for listen in listens[refused:]:
            host.say(LinkDown(LINK, listen.generation, "no room"))
        refused = len(listens)
        await asyncio.sleep(0.1)


def test_hosts_that_live_are_restarted_if_their_link_cannot_be_made_again() -> None:
    """The receiving one first, whose requests are lost already; then both."""

    async def work(_: Virtual) -> None:
        p = Play()
        supervisor = p.pipeline.supervisor
        async with read_reports(p.pipeline) as p.reports:
            joining = asyncio.create_task(supervisor.links.join())
            generation = await p.make(1)
            await joining
            supervisor.started = True

            p.hosts[TALKER].say(LinkDown(LINK, generation, "it broke"))
            await refuse_links(p.hosts[VOCODER])
            assert "link talker>code2wav cannot be made: no room" in p.hosts[VOCODER].reason
            assert p.hosts[TALKER].state == "ready"

            for count in (4, 5):  # hosts of code2wav that take its place
                while len(p.hosts) < count:
                    await asyncio.sleep(0.1)
                assert not p.hosts[TALKER].killed
                host = p.hosts[count - 1]
                await refuse_links(host)
                host.mark_dead()
            while len(p.hosts) < 7:
                await asyncio.sleep(0.1)
            assert p.hosts[TALKER].killed
            assert sorted(host.number for host in p.hosts[5:]) == [TALKER, VOCODER]
            assert p.hosts[0].state == "ready", "the thinker answers in text all the while"
            await p.pipeline.close()

    run_virtual(work)


def is_about(message: object, kind: type[Listen] | type[Connect], link: str) -> bool:
    return isinstance(message, kind) and message.link == link


@pytest.mark.parametrize("secret", [b"", bytes(SECRET_BYTES - 1), bytes(SECRET_BYTES + 1)], ids=len)
def test_a_host_understands_no_link_without_a_secret(secret: bytes) -> None:
    for good, bad in (
        (Listen(LINK, "local", 1, bytes(SECRET_BYTES)), Listen(LINK, "local", 1, secret)),
        (Connect(LINK, "shm", b"", 1, bytes(SECRET_BYTES)), Connect(LINK, "shm", b"", 1, secret)),
    ):
        assert decode_to_host(encode(good)[PREFIX.size :]) == good
        with pytest.raises(WireError, match="secret"):
            decode_to_host(encode(bad)[PREFIX.size :])

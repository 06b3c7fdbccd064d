"""One seeded murder of a link's process, at a random point, and what the survivor must see.

`scenario` raises AssertionError where the contract is broken, and tells how long the death took to
be noticed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from stretto.transport.contract import Chunk, Endpoint, PeerDead, Receiver, Sender
from tests.transport.contract.links import LONG_S, Kit, check_numbered, listening, numbered, take
from tests.transport.contract.peer import Nursery, Peer

VICTIMS = ("sender", "receiver", "both")
MOMENTS = ("setup", "busy", "blocked", "idle")


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    victim: str
    moment: str
    noticed_ms: (
        float | None
    )  # from the kill to PeerDead; None when both were killed, or before they had met
    chunks: int  # that crossed the link


def scenario(kit: Kit, nursery: Nursery, seed: int) -> Outcome:
    chance = random.Random(seed)
    # All pairs come round, whatever the number of seeds; the chance is in the rest.
    victim, moment = VICTIMS[seed % 3], MOMENTS[seed // 3 % 4]
    size = chance.choice((0, 100, 4096, 60_000))
    if victim == "both":
        return Outcome(seed, victim, moment, None, _kill_both(kit, nursery, chance, size))
    play = _kill_sender if victim == "sender" else _kill_receiver
    noticed, chunks = play(kit, nursery, chance, moment, size)
    _restart(kit, nursery)
    return Outcome(seed, victim, moment, noticed and noticed * 1000, chunks)


def _spin(chance: random.Random, most: float) -> None:
    """Let up to `most` seconds pass without giving the processor away: a kill then lands between
    any two steps."""
    until = time.perf_counter() + chance.random() * most
    while time.perf_counter() < until:
        pass


def listen(kit: Kit, generation: int = 0) -> tuple[Receiver, str]:
    receiver = kit.connector.listen("test-link.0", replace(kit.options, generation=generation))
    return receiver, msgspec.json.encode(receiver.endpoint).decode()


def _kill_sender(
    kit: Kit, nursery: Nursery, chance: random.Random, moment: str, size: int
) -> tuple[float | None, int]:
    receiver, endpoint = listen(kit)
    count = {"count": chance.randrange(4)} if moment == "idle" else {}
    peer = nursery.peer(kit.label, "send", endpoint=endpoint, size=size, **count)
    unreleased: list[Chunk] = []
    number = 0

    def take_one(timeout: float) -> bool:
        nonlocal number
        chunk = receiver.take(timeout)
        if chunk is None:
            return False
        check_numbered(chunk, number, size)
        number += 1
        unreleased.append(chunk)
        while len(unreleased) > chance.randrange(4):
            unreleased.pop(chance.randrange(len(unreleased))).release()
        return True

    if moment == "setup":
        _spin(chance, 0.01)
    else:
        assert peer.lines.receive() == {"ready": True}
    if moment == "busy":
        for _ in range(chance.randrange(60)):
            assert take_one(LONG_S)
        _spin(chance, 0.001)
    elif moment == "blocked":
        _until(lambda: receiver.credits() == 0)
    elif moment == "idle":
        assert peer.lines.receive() == {"done": True}
    peer.kill()
    killed = time.perf_counter()
    noticed = _death_of(
        lambda: take_one(0.05 if moment == "setup" else LONG_S), killed, moment == "setup"
    )
    peer.wait_gone()
    if noticed is not None:
        assert _death_of(receiver.check, killed, False) is not None, "death is for ever"
    for chunk in unreleased:
        chunk.release()
    receiver.close()
    return noticed, number


def _kill_receiver(
    kit: Kit, nursery: Nursery, chance: random.Random, moment: str, size: int
) -> tuple[float | None, int]:
    peer = nursery.peer(
        kit.label, "receive", size=size, hold=9 if moment == "blocked" else chance.randrange(4)
    )
    endpoint = msgspec.json.decode(peer.lines.receive()["endpoint"], type=Endpoint)
    if moment == "setup":
        _spin(chance, 0.002)
        peer.kill()
        killed = time.perf_counter()
        try:
            sender = kit.connector.connect(endpoint, kit.options)
        except PeerDead:
            peer.wait_gone()
            return time.perf_counter() - killed, 0
    else:
        sender = kit.connector.connect(endpoint, kit.options)
    noticed, number = _put_until_dead(sender, peer, chance, moment, size)
    peer.wait_gone()
    assert _death_of(sender.check, 0.0, False) is not None, "death is for ever"
    sender.close()
    return noticed, number


def _put_until_dead(
    sender: Sender, peer: Peer, chance: random.Random, moment: str, size: int
) -> tuple[float | None, int]:
    number = 0

    def put_one() -> bool:
        nonlocal number
        put = sender.put(numbered(number, size), LONG_S)
        number += put
        return put

    killed = time.perf_counter()
    if moment == "blocked":
        for _ in range(4):
            assert put_one()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(_death_of, put_one, killed, False)
            _spin(chance, 0.002)
            peer.kill()
            killed = time.perf_counter()
            assert waiting.result() is not None
        return time.perf_counter() - killed, number
    if moment != "setup":
        for _ in range(chance.randrange(60)):
            assert put_one()
        _spin(chance, 0.001)
        peer.kill()
        killed = time.perf_counter()
    if moment == "idle":
        _until(lambda: _death_of(sender.check, killed, True) is not None)
    return _death_of(put_one, killed, False), number


def _death_of(call: Callable[[], object], killed: float, may_live: bool) -> float | None:
    """Seconds from the kill to `PeerDead`; calls again while the call goes well, unless it may
    live."""
    deadline = time.perf_counter() + LONG_S
    while time.perf_counter() < deadline:
        try:
            went_on = call()
        except PeerDead:
            return time.perf_counter() - killed
        if may_live and not went_on:
            return None
    raise AssertionError("the death was not noticed")


def _until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(LONG_S / 0.001)):
        if holds():
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")


def _kill_both(kit: Kit, nursery: Nursery, chance: random.Random, size: int) -> int:
    taker = nursery.peer(kit.label, "receive", size=size)
    endpoint = taker.lines.receive()["endpoint"]
    giver = nursery.peer(kit.label, "send", endpoint=endpoint, size=size)
    if chance.random() < 0.7:
        assert giver.lines.receive() == {"ready": True}
    _spin(chance, 0.005)
    victims = [taker, giver]
    chance.shuffle(victims)
    for victim in victims:
        with suppress(ProcessLookupError):  # one whose peer has died may have ended by itself
            victim.kill()
    for victim in victims:
        victim.wait_gone()
    if kit.name == "shm":
        address = msgspec.json.decode(endpoint, type=Endpoint).address
        assert not listening(address), "the kernel still knows the address"
    return 0


def _restart(kit: Kit, nursery: Nursery) -> None:
    """A new peer joins the link's next generation, and all is as before."""
    receiver, endpoint = listen(kit, generation=1)
    peer = nursery.peer(kit.label, "send", endpoint=endpoint, size=500, count=6, generation=1)
    for i in range(6):
        chunk = take(receiver)
        check_numbered(chunk, i, 500)
        chunk.release()
    assert peer.lines.receive() == {"ready": True}
    assert peer.lines.receive() == {"done": True}
    peer.kill()
    peer.wait_gone()
    receiver.close()

"""Other processes: what the survivor of a kill sees, what stays behind (nothing), that the link
comes back.

`STRETTO_KILL_SEEDS` sets the number of seeds for shm. `STRETTO_KILL_RESULTS` names a file for what
was seen."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from itertools import count
from pathlib import Path

import msgspec
import pytest

from stretto.transport.contract import Endpoint, LinkClosed, PeerDead, Sender
from tests.transport.contract.kills import listen, scenario
from tests.transport.contract.links import KITS, LONG_S, Kit, missing, numbered, take
from tests.transport.contract.peer import Nursery

SEEDS = int(os.environ.get("STRETTO_KILL_SEEDS", "12"))
RESULTS = os.environ.get("STRETTO_KILL_RESULTS")


def record(label: str, **fields: object) -> None:
    if RESULTS:
        with Path(RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"connector": label, **fields}) + "\n")


def put_for_ever(sender: Sender) -> None:
    for number in count():
        sender.put(numbered(number), LONG_S)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_at_a_random_point(nursery: Nursery, seed: int) -> None:
    record("shm", **asdict(scenario(KITS["shm"], nursery, seed)))


@pytest.mark.parametrize("label", ["tcp", "mooncake"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7, 10])
def test_killed_over_a_network(nursery: Nursery, label: str, seed: int) -> None:
    kit = KITS[label]
    if why := missing(kit.name):
        pytest.skip(why)
    record(label, **asdict(scenario(kit, nursery, seed)))


def test_a_frozen_peer_is_a_dead_one_on_a_network(nursery: Nursery) -> None:
    """No end of a connection tells of it, only the missing heartbeat. (In one machine nothing can
    freeze a process but its owner, who may thaw it; a stall of the stage is the supervisor's to
    see.)"""
    receiver, endpoint = listen(KITS["tcp"])
    peer = nursery.peer("tcp", "send", endpoint=endpoint, size=100, count=1)
    take(receiver).release()
    os.kill(peer.pid, signal.SIGSTOP)
    with pytest.raises(PeerDead):
        receiver.take(LONG_S)
    peer.kill()
    peer.wait_gone()
    receiver.close()


def test_an_old_generation_does_not_disturb_the_new_one(kit: Kit, nursery: Nursery) -> None:
    """A sender that outlives its receiver is told, and its address leads nowhere, while the
    successor works."""
    old, old_endpoint = listen(kit)
    survivor = nursery.peer(kit.label, "send", endpoint=old_endpoint, size=100)
    take(old).release()
    new, new_endpoint = listen(kit, generation=1)
    old.close()
    newcomer = nursery.peer(
        kit.label, "send", endpoint=new_endpoint, size=100, count=3, generation=1
    )
    for i in range(3):
        chunk = take(new)
        assert chunk.header.seq == i
        chunk.release()
    assert survivor.lines.receive() == {"ready": True}
    assert survivor.lines.receive()["error"] == "LinkClosed"
    late = nursery.peer(kit.label, "send", endpoint=old_endpoint, size=100)
    assert late.lines.receive()["error"] == "PeerDead"
    newcomer.kill()
    for peer in (survivor, newcomer, late):
        peer.wait_gone()
    new.close()


def test_a_peer_that_closes_is_not_a_dead_one(kit: Kit, nursery: Nursery) -> None:
    peer = nursery.peer(kit.label, "receive", size=1000, count=3)
    endpoint = msgspec.json.decode(peer.lines.receive()["endpoint"], type=Endpoint)
    sender = kit.connector.connect(endpoint, kit.options)
    for i in range(3):
        assert sender.put(numbered(i), LONG_S)
    assert peer.lines.receive() == {"done": True}
    peer.lines.send(close=True)
    peer.wait_gone()
    with pytest.raises(LinkClosed):
        put_for_ever(sender)
    sender.close()


def test_what_links_share_goes_with_the_last(kit: Kit, nursery: Nursery) -> None:
    """In a process of its own, where no other link keeps a context or an engine alive."""
    peer = nursery.peer(kit.label, "audit")
    assert peer.lines.receive() == {"left": ""}
    peer.wait_gone()

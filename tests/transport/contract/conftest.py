"""Fixtures of the contract suite."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest

from tests.transport.contract.links import KITS, LONG_S, Footprint, Kit, missing, numbered, take
from tests.transport.contract.peer import Nursery

# The engine keeps a pool of connections that grows with use, up to this; a growing pool looks like
# a leak.
os.environ.setdefault("MC_TCP_LANES_PER_PEER", "1")


@pytest.fixture(params=list(KITS))
def kit(request: pytest.FixtureRequest, warm: None) -> Kit:
    """Every way to set a link up."""
    kit = KITS[request.param]
    if why := missing(kit.name):
        pytest.skip(why)
    return kit


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Let libraries start what they keep for the life of the process (a collector thread, log
    files), once.

    One idle listener of each kind stays, so that what links share (a ZeroMQ context, a transfer
    engine that takes a second to stop) is not started and stopped by every test. That these go too
    is a test of its own."""
    receivers = []
    for kit in KITS.values():
        if not missing(kit.name):
            receivers.append(kit.connector.listen("kept.0", kit.options))
            sender, receiver = kit.pair(slot_bytes=1 << 20)
            assert sender.put(numbered(0, 500_000), LONG_S)
            take(receiver).release()
            sender.close()
            receiver.close()
    yield
    for receiver in receivers:
        receiver.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, warm: None) -> Iterator[None]:
    """Every test ends with no more descriptors, threads and segments than it began with."""
    if "nursery" in request.fixturenames:
        request.getfixturevalue("nursery")
    before = Footprint.now()
    yield
    deadline = time.monotonic() + LONG_S
    # Mooncake's engine keeps its connection to a process that died until the engine itself stops.
    # ZeroMQ closes sockets on a thread of its own, and on a busy machine now and then one is still
    # open long after: not a leak as long as it does not add up, which
    # `test_links_one_after_the_other_leave_nothing` looks at.
    spare = next((n for kind, n in (("mooncake", 2), ("tcp", 2)) if kind in request.node.name), 0)
    while (leaked := Footprint.now().beyond(before, spare)) and time.monotonic() < deadline:
        gc.collect()
    assert not leaked

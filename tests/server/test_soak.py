"""The server in its own processes is visited by clients of every kind, and by clients that leave at
any moment: when they have gone, each process has as many descriptors as before, and there are as
many processes, memory files and segments.

Cheap visits and leaving clients come 300 times, those that take the tiny model some time 50 or 20
times: counts are exact, so that one descriptor left by one of them is seen. `make slow` makes about
300 of each kind; more: `python -m tests.slow faults --parts server`."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.proctree import Tree
from bench.harness.serving import Server, serving
from tests.slow.faults.visitors import KINDS, LEAVING, SESSIONS, Visitor, visits

PATIENCE_S = 60.0  # only what is never given back takes this long
POLL_S = 0.2
AT_ONCE = 6
POOLS = 8  # threads by which a process's pools may still grow, whatever they are asked
CALM = 3  # looks at the processes that show the same
OFTEN, MORE, SOME = 300, 50, 20
COUNTS = {
    **dict.fromkeys(("text", "looks", "voices", "refused", *LEAVING), OFTEN),
    **dict.fromkeys(("left_session", "left_live"), OFTEN),
    **dict.fromkeys(("spoken", "streamed_spoken", "recalled", "large_sound", "video_in"), SOME),
}
GROUPS = {
    "whole": [name for name in KINDS if name not in (*LEAVING, *SESSIONS)],
    "leaving": LEAVING,
    "sessions": SESSIONS,
}


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stages in two hosts, so that there are links with segments. Every kind has been there
    before."""
    settings = argparse.Namespace(
        device="cpu", model="tiny", max_rows=32, serve=["--api-key", "k", "--placement", "two"]
    )
    with serving(settings, tiny_dir, tmp_path_factory.mktemp("server")) as server:
        server.wait(300)
        visited(server, [name for name in KINDS for _ in range(2)], seed=0)
        yield server


def visited(server: Server, kinds: list[str], seed: int) -> None:
    random.Random(seed).shuffle(kinds)

    def visitor(index: int) -> Visitor:
        return Visitor(server.port, "k", random.Random(f"{seed}, {index}"))

    came = asyncio.run(visits(visitor, kinds, AT_ONCE))
    failures = [failure for v in came for failure in v.failures]
    assert not failures, server.tail()
    assert sum(v.ended.total() for v in came) == len(kinds)


def calm(server: Server) -> Tree:
    """The processes once nobody is served any more: several looks show the same."""
    same, last, until = 0, Tree.of(server.process.pid), time.monotonic() + PATIENCE_S
    while same < CALM and time.monotonic() < until:
        time.sleep(POLL_S)
        now = Tree.of(server.process.pid)
        same = same + 1 if now.counts() == last.counts() else 0
        last = now
    return last


def given_back(server: Server, before: Tree) -> list[str]:
    """What is more than before, and stays."""
    until = time.monotonic() + PATIENCE_S
    while True:
        now = Tree.of(server.process.pid)
        left = before.growth(now)
        threads = before.by_name("threads")
        left += [
            f"{name}: {threads.get(name, 0)} threads, then {count}"
            for name, count in now.by_name("threads").items()
            if count > threads.get(name, 0) + POOLS
        ]
        if not left or time.monotonic() > until:
            return left
        time.sleep(POLL_S)


@pytest.mark.parametrize("group", GROUPS)
def test_every_visit_gives_back_all_that_it_took(server: Server, group: str) -> None:
    before = calm(server)
    visited(server, [name for name in GROUPS[group] for _ in range(COUNTS.get(name, MORE))], seed=1)
    left = given_back(server, before)
    assert not left, "; ".join(left)
    assert server.process.poll() is None

"""Memory that was freed goes back to the system without stopping the event loop."""

from __future__ import annotations

import subprocess
import sys

FREED = """
import asyncio, os
from stretto.config.server import ServerConfig
from stretto.server.service import Service

BLOCK, COUNT = 1 << 20, 100

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def never():
    await asyncio.Event().wait()

async def main():
    service = Service.of(ServerConfig(), never)
    service.start()
    pins, before = [], resident()
    for _ in range(3):  # the C library learns from what is freed
        blocks = []
        for _ in range(COUNT):
            blocks.append(b"x" * BLOCK)
            pins.append(bytearray(20_000))  # above it in the heap: nothing goes back by itself
        most = resident()
        del blocks
        # The event loop had no turn since: nobody has trimmed the heap.
        print(most - before, resident() - before)
    await service.close()

asyncio.run(main())
"""


def test_large_blocks_go_back_when_they_are_freed() -> None:
    told = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True
    ).stdout
    rounds = [tuple(map(int, line.split())) for line in told.splitlines()]
    assert len(rounds) == 3
    for most, left in rounds:
        assert most > 90 << 20
        assert left < 32 << 20

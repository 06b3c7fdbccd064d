"""Memory files and other descriptors of this process."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

from stretto.preprocess.pool.memfile import SMALL_BYTES, MemFile


def until_all_are_closed() -> None:
    """They are closed in their order, and so is the pipe's end behind them."""
    reading, writing = os.pipe()
    MemFile(writing, SMALL_BYTES + 1).close_in_thread()
    assert os.read(reading, 1) == b""
    os.close(reading)


def descriptors(pid: int | str) -> Counter[str]:
    """By what they are: memory files, sockets, and so on."""
    kinds: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            kinds[os.readlink(entry.path).partition(":")[0].partition(" ")[0]] += 1
    return kinds


def has_two_spares(pid: int) -> bool:
    """Whether a worker is done with forking: it has a selector and a pidfd of each spare, and the
    server's socket and one to each spare."""
    own = descriptors(pid)
    return own["anon_inode"] == own["socket"] == 3

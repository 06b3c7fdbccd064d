"""How many files, sockets and the like a process holds open. Imports nothing of ours."""

from __future__ import annotations

import os

OPEN_FILES = "stretto_process_open_fds"
"""The name of the number, by `process`."""


def open_descriptors(pid: int | str = "self") -> int | None:
    """Of a process of this user's; None: it has ended, or is not ours to look at."""
    folder = f"/proc/{pid}/fd"
    try:
        # Linux 6.2 and later say it as the folder's size; before, that is 0, and the entries are
        # counted.
        return os.stat(folder).st_size or len(os.listdir(folder))
    except OSError:
        return None

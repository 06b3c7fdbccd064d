"""What the child processes of a server have in common. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio.subprocess import Process

HOST_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of stage hosts, unless the server's own differs. Numpy multiplies small matrices
there (`layers/numpy_decoder.py`): waking a second thread takes longer than such a product."""
_PR_SET_PDEATHSIG = 1


async def start_apart(*words: str, **options: Any) -> Process:
    """Start a child that does not get the terminal's Ctrl-C, which is ours to handle, also while it
    still imports. In a process group rather than a session where the event loop can: Linux shares
    cores out between sessions first (autogroup), so the children would take theirs from each other
    and from the server, whatever their priorities."""
    import asyncio

    try:
        return await asyncio.create_subprocess_exec(*words, process_group=0, **options)
    except ValueError:  # uvloop knows no process groups
        return await asyncio.create_subprocess_exec(*words, start_new_session=True, **options)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to end this process when the one that started it ends, however that happens.
    `parent`: its number, if known: it may have ended before the kernel was asked."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def seen_end(pid: int) -> str | None:
    """How a child ended, in words, if it has; its status is left to whoever waits for it. None:
    nothing is known."""
    with suppress(ChildProcessError):  # its status was taken already
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is not None:
            return end_of(seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status)
    return None


def end_of(status: int) -> str | None:
    """An exit status in words, as `subprocess` gives it: negative for a signal. None: all was
    well."""
    if status < 0:
        name = (
            signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        )
        why = " (the system may have run out of memory)" if -status == signal.SIGKILL else ""
        return f"it was killed by {name}{why}"
    return f"it ended with status {status}" if status else None

"""A short time slice for the thread that answers everybody.

Linux (from 6.12 on) lets a thread ask for one without any right to do so: it gets no more of the CPU, but gets it
sooner after it wakes. Without it, an event loop that wakes on a full machine waits until those before it have used up
theirs. Elsewhere nothing happens. Called by `stretto serve` for its event loop's thread; processes and threads that it
starts have the ordinary slice."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SLICE_NS = 100_000  # the least that the kernel takes
RESET_ON_FORK = 1
ATTR = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime (here: slice), deadline, period
NUMBERS = {"x86_64": 314, "aarch64": 274}  # of the system call sched_setattr


def shorten(slice_ns: int = SLICE_NS) -> bool:
    """Of the calling thread. False: this system cannot."""
    number = NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # as it is: only the slice is to change
    attr = ATTR.pack(ATTR.size, os.SCHED_OTHER, RESET_ON_FORK, nice, 0, slice_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attr, 0) == 0)

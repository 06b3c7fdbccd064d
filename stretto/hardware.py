"""Which devices there are, and how large. Imports nothing heavy: asking torch takes seconds."""

from __future__ import annotations

import ctypes
import os
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def find_device() -> str:
    """A GPU if there is one, without the seconds that asking torch takes."""
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) and cards() else "cpu"


def cards() -> tuple[str, ...]:
    """The GPUs of this machine that we may use, as CUDA_VISIBLE_DEVICES calls them: card number i
    is what CUDA would call `cuda:i` in this process."""
    return visible(
        os.environ.get(VISIBLE),
        len(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/dev/dxg").exists(),
    )


def visible(variable: str | None, count: int) -> tuple[str, ...]:
    """The cards, of `count` that the machine has, that the variable leaves visible. As CUDA reads
    it, the list ends at the first name that is no card."""
    if not count:
        return ()
    if variable is None:
        return tuple(str(i) for i in range(count))
    return tuple(
        takewhile(
            lambda name: name not in ("", "-1"), (part.strip() for part in variable.split(","))
        )
    )


def card_of(device: str) -> int | None:
    """The number of a device's card: `cuda` is the first. None: it is no GPU."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def card_memory(device: str) -> int | None:
    """Bytes of a GPU's memory, all of it, as its driver says; None where there is no such GPU or no
    driver."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, size = ctypes.c_int(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(handle), int(number or 0))
        or driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    )
    return None if failed else size.value

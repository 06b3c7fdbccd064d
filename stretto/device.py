"""Which device there is, and how large. Imports nothing heavy: asking torch takes seconds."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def find_device() -> str:
    """A GPU if there is one."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def card_memory(device: str) -> int | None:
    """Bytes of a GPU's memory, all of it, as its driver says; None where there is no such GPU or no driver."""
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

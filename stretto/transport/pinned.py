"""Page-locked shared mappings, which a GPU copies to and from at full speed. Used by the shm
connector for its slots.

In a process that uses CUDA the pages are locked and registered for as long as the mapping lives;
elsewhere this is a plain `mmap`. Without it a device copy goes through the driver's staging buffer,
at a fraction of the speed, and blocks the calling thread."""

from __future__ import annotations

import logging
import mmap
from typing import Any

import torch

log = logging.getLogger(__name__)


class SharedMap(mmap.mmap):
    """A shared mapping of a file. Views of it (a slot, a taken chunk's tensors) keep it, and its
    registration."""

    _address: int | None = None  # where it is registered, if it is

    def register(self) -> bool:
        """Lock and register the pages if this process uses CUDA. False: it does not, or the driver
        refused."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        error = int(_driver().cudaHostRegister(address, len(self), 0))
        if error:
            # Copies still work, slower: a limit on locked memory must not fail a request.
            log.warning("could not page-lock %d bytes of a link: CUDA error %d", len(self), error)
            return False
        self._address = address
        return True

    def __del__(self) -> None:
        # Before the pages are unmapped: the address may soon belong to another mapping.
        if self._address is not None:
            _driver().cudaHostUnregister(self._address)
            self._address = None


def map_shared(fd: int, size: int) -> SharedMap:
    """Map `size` bytes of `fd`, ready for device copies where there is a device."""
    mapping = SharedMap(fd, size)
    mapping.register()
    return mapping


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

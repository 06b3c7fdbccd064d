"""What launches depend on of a device: whether a kernel can be launched before the one in front has
ended, and how much shared memory one block may have. Called at every launch, on any thread; imports
no triton.

STRETTO_KERNELS_CARD=sm_86 (or another name of `CARDS`) takes launch parameters of that card on a
later one, so that a machine with one card can test what others run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from stretto.errors import Invalid

DEPENDENT_LAUNCH = (9, 0)
"""Compute capability from which a kernel can be launched before the one in front has ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    capability: tuple[int, int]
    shared_bytes: int  # of one block

    @property
    def dependent_launch(self) -> bool:
        return self.capability >= DEPENDENT_LAUNCH


CARDS = {
    "sm_80": Limits((8, 0), 163 << 10),
    "sm_86": Limits((8, 6), 99 << 10),
    "sm_89": Limits((8, 9), 99 << 10),
    "sm_90": Limits((9, 0), 227 << 10),
    "sm_100": Limits((10, 0), 227 << 10),
    "sm_120": Limits((12, 0), 99 << 10),
}
"""As the vendor's programming guide has them. A device is asked for its own."""


@cache
def limits(device: torch.device) -> Limits:
    """Of a device as it launches kernels: a CPU's are those of the card that they are made for."""
    card = os.environ.get("STRETTO_KERNELS_CARD", "")
    if card and card not in CARDS:
        raise Invalid(f"STRETTO_KERNELS_CARD must be one of {', '.join(CARDS)}, got {card!r}")
    if card or device.type != "cuda":
        return CARDS[card or "sm_90"]
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Limits((found.major, found.minor), shared)


def pdl(x: torch.Tensor) -> bool:
    """Dependent launch needs a device that has it."""
    return x.is_cuda and limits(x.device).dependent_launch


def protocol(x: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that waits for the one in front: what it is told, and how it is
    launched."""
    return {"PDL": True, "launch_pdl": True} if pdl(x) else {"PDL": False}


def fitting(stages: int, x: torch.Tensor, rows: int, w: torch.Tensor, columns: int, k: int) -> int:
    """Stages of a pipelined loop over K, as many of `stages` as fit the device's shared memory, of
    which each holds tiles [rows, k] of x and [columns, k] of w. Two at least."""
    found = limits(x.device)
    stage_bytes = (rows * x.element_size() + columns * w.element_size()) * k
    # Where products do not read shared memory by themselves, one stage is in registers.
    in_registers = 0 if found.capability[0] in (9, 10) else 1
    return max(2, min(stages, found.shared_bytes // stage_bytes + in_registers))

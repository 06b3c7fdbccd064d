"""What launches depend on of a device: whether a kernel can be launched before the one in front has
ended, how much shared memory one block may have, and how many multiprocessors there are. Called at
every launch, on any thread; imports no triton.

STRETTO_KERNELS_CARD=sm_86 (or another name of `CARDS`) takes launch parameters of that card on a
later one, so that a machine with one card can test what others run;
STRETTO_KERNELS_DEPENDENT_LAUNCH=off lets kernels wait for the one in front alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import torch

from stretto.errors import Invalid

DEPENDENT_LAUNCH = (9, 0)
"""Compute capability from which a kernel can be launched before the one in front has ended."""
IN_REGISTERS = (8, 12)
"""Major numbers of those whose products take numbers from registers. Others, unknown ones too, are
taken for ones that read shared memory by themselves, which need more of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    capability: tuple[int, int]
    shared_bytes: int  # of one block
    multiprocessors: int
    dependent_launch: bool = True
    # Products read shared memory by themselves; else one stage of a loop is in registers.
    direct: bool = True


CARDS = {
    "sm_80": Limits((8, 0), 163 << 10, 108, dependent_launch=False, direct=False),
    "sm_86": Limits((8, 6), 99 << 10, 82, dependent_launch=False, direct=False),
    "sm_89": Limits((8, 9), 99 << 10, 128, dependent_launch=False, direct=False),
    "sm_90": Limits((9, 0), 227 << 10, 132),
    "sm_100": Limits((10, 0), 227 << 10, 148),
    "sm_120": Limits((12, 0), 99 << 10, 170, direct=False),
}
"""As the vendor's programming guide has them, with the multiprocessors of an A100, RTX 3090, RTX
4090, H200, B200, and RTX 5090. A device is asked for its own."""


@cache
def limits(device: torch.device) -> Limits:
    """Of a device as it launches kernels: a CPU's are those of the card that they are made for."""
    card = os.environ.get("STRETTO_KERNELS_CARD", "")
    if card and card not in CARDS:
        raise Invalid(f"STRETTO_KERNELS_CARD must be one of {', '.join(CARDS)}, got {card!r}")
    if device.type != "cuda":
        return _switched(CARDS[card or "sm_90"])
    found = torch.cuda.get_device_properties(device)
    direct = found.major not in IN_REGISTERS
    if card:  # products are compiled for the device that there is
        return _switched(replace(CARDS[card], direct=direct))
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    capability = found.major, found.minor
    there = capability >= DEPENDENT_LAUNCH
    return _switched(Limits(capability, shared, found.multi_processor_count, there, direct))


def _switched(found: Limits) -> Limits:
    mode = os.environ.get("STRETTO_KERNELS_DEPENDENT_LAUNCH", "on").lower()
    if mode not in ("on", "off"):
        raise Invalid(f"STRETTO_KERNELS_DEPENDENT_LAUNCH must be on or off, got {mode!r}")
    return replace(found, dependent_launch=found.dependent_launch and mode == "on")


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
    return stages_within(stages, x, (rows * x.element_size() + columns * w.element_size()) * k)


def stages_within(stages: int, x: torch.Tensor, stage_bytes: int, beside: int = 0) -> int:
    """The same of stages of so many bytes, where `beside` more are in shared memory."""
    found = limits(x.device)
    in_registers = 0 if beside or found.direct else 1
    return max(2, min(stages, (found.shared_bytes - beside) // stage_bytes + in_registers))

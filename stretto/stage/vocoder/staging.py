"""Host memory of a vocoder's steps. Used by `core.py`, on the loop thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stretto.stage.vocoder.config import CodecConfig

Numbers = npt.NDArray[np.int64]


class Staging:
    """Host memory that steps read their frames from and write their samples to, pinned where there
    is a GPU. Buffers are used in turn: one comes up again when the step that used it has long been
    retired."""

    def __init__(self, config: CodecConfig, groups: int, rate: int, device: torch.device) -> None:
        self._groups = groups
        self._pin = device.type == "cuda"
        self._count = config.overlap_depth + 2
        frames = config.slots * max(config.frame_sizes)
        size = frames * groups + 2 * config.slots
        self._in = [
            torch.zeros(size, dtype=torch.int64, pin_memory=self._pin) for _ in range(self._count)
        ]
        # At once: to pin so much takes milliseconds, and a stream's first packets would wait for
        # that.
        out = rate * max(streams * size for streams, size in config.shapes()) if self._pin else 0
        self._out = [torch.empty(out, pin_memory=self._pin) for _ in range(self._count)]
        self._next = 0

    def inputs(self, streams: int, size: int) -> tuple[Numbers, Numbers, Numbers]:
        """The next buffer: codes [streams, groups, size] to be filled in, counts [streams], all 0,
        and slots [streams], all -1. (What older steps left in the codes is never used, and is
        always a valid index of a table.)"""
        self._next = (self._next + 1) % self._count
        codes, counts, slots = split(self.host(streams, size), streams, size)
        counts.zero_()
        slots.fill_(-1)
        return codes.numpy(), counts.numpy(), slots.numpy()

    def host(self, streams: int, size: int) -> torch.Tensor:
        """The buffer as one piece, for one copy."""
        return self._in[self._next][: numbers(streams, self._groups, size)]

    def output(self, wav: torch.Tensor) -> torch.Tensor:
        """Where the step's samples go."""
        return self._out[self._next][: wav.numel()].view(wav.shape)


def numbers(streams: int, groups: int, size: int) -> int:
    """Of the inputs of a step."""
    return streams * (groups * size + 2)


def split(
    packed: torch.Tensor, streams: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [streams, groups, size], counts [streams] and slots [streams] in one piece of memory,
    as views."""
    codes = packed.numel() - 2 * streams
    return (
        packed[:codes].view(streams, -1, size),
        packed[codes : codes + streams],
        packed[codes + streams :],
    )

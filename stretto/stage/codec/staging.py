"""Host memory of a vocoder's steps. Used by `stage.py`, on the loop thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stretto.stage.codec.config import CodecConfig


class Staging:
    """Host memory that steps read their frames from and write their samples to, pinned where there is a GPU. It goes
    round: a place comes up again when the step that used it has long been retired."""

    def __init__(self, config: CodecConfig, groups: int, rate: int, device: torch.device) -> None:
        self._groups, self._pin = groups, device.type == "cuda"
        self._places = config.overlap_depth + 2
        frames = config.slots * max(config.frame_sizes)
        size = frames * groups + config.slots
        self._in = [torch.zeros(size, dtype=torch.int64, pin_memory=self._pin) for _ in range(self._places)]
        # At once: to pin so much takes milliseconds, and a stream's first packets would wait for that.
        out = rate * max(slots * size for slots, size in config.shapes()) if self._pin else 0
        self._out = [torch.empty(out, pin_memory=self._pin) for _ in range(self._places)]
        self._turn = 0

    def inputs(self, slots: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The next place: codes [slots, groups, size] to be filled in, and counts [slots], all 0. (What older steps
        left in the codes is never used, and is always a valid index of a table.)"""
        self._turn = (self._turn + 1) % self._places
        codes, counts = split(self.host(slots, size), slots, size)
        counts.zero_()
        return codes.numpy(), counts.numpy()

    def host(self, slots: int, size: int) -> torch.Tensor:
        """The place as one piece, for one copy."""
        return self._in[self._turn][: slots * (self._groups * size + 1)]

    def output(self, wav: torch.Tensor) -> torch.Tensor:
        """Where the step's samples go."""
        return self._out[self._turn][: wav.numel()].view(wav.shape)


def split(given: torch.Tensor, slots: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [slots, groups, size] and counts [slots] in one piece of memory, as views."""
    codes = given.numel() - slots
    return given[:codes].view(slots, -1, size), given[codes:]

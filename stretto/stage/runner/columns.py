"""Columns of the device rows that choose tokens: sampling parameters, and what some requests ask
of their logits beside them (a grammar's masks, a least likelihood, biases). Written as a request
joins, or before each of a guided one's steps; applied by every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stretto.kernels.reference.masks import bias_rows, floor_rows, mask_rows
from stretto.kernels.reference.sampling import SamplingRows, signed
from stretto.layers.upload import to_device
from stretto.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """Which sampling kernels the picks of a batch need, known on the host. It chooses the captured
    graph too."""

    # some row draws
    sampled: bool
    # some row has a repetition penalty
    penalty: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingMode:
        return cls(
            any(not p.greedy for p in params), any(p.repetition_penalty != 1.0 for p in params)
        )


class SamplingColumns:
    """Sampling parameters by row."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # temperature, top_p, repetition penalty
        self.floats = torch.ones(3, rows, device=device)
        # top_k, seed
        self.ints = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.floats[0] = 0.0

    def write(self, row: int, p: SamplingParams) -> None:
        device = self.floats.device
        values = np.array([p.temperature, p.top_p, p.repetition_penalty], np.float32)
        self.floats[:, row] = to_device(values, device, torch.float32)
        self.ints[:, row] = to_device([p.top_k, signed(p.seed)], device, torch.int64)

    def pick(self, rows: torch.Tensor, mode: SamplingMode) -> SamplingRows:
        temperature, top_p, penalty = self.floats[:, rows]
        top_k, seed = self.ints[:, rows]
        return SamplingRows(
            temperature, top_k, top_p, penalty, seed, not mode.sampled, mode.penalty
        )


class MaskColumns:
    """Which tokens guided requests may pick next, by row: written before each of their steps,
    applied by every step of a captured graph, where rows without a mask cost nothing."""

    def __init__(self, num_rows: int, vocab: int, device: torch.device, fused: bool) -> None:
        self.bits = torch.zeros(num_rows, -(-vocab // 32), dtype=torch.int32, device=device)
        self.masked = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._fused = fused
        # rows with a mask
        self._used: set[int] = set()

    def clear(self, row: int) -> None:
        """For a new request, which has none."""
        if row in self._used:
            self._used.discard(row)
            self.masked[row].fill_(False)

    def write(self, row: int, bits: npt.NDArray[np.int32]) -> None:
        # a guide writes over its own
        self.bits[row] = to_device(bits.copy(), self.bits.device, torch.int32)
        if row not in self._used:
            self._used.add(row)
            self.masked[row].fill_(True)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """To the logits of these rows, in place. On a CPU, where nothing is captured, only if there
        is any."""
        if self._fused:
            from stretto.kernels.triton.masks import mask_rows as fast

            fast(logits, rows, self.masked, self.bits)
        elif self.bits.device.type != "cpu":
            mask_rows(logits, rows, self.masked, self.bits)
        elif self._used and len(some := self.masked[rows].nonzero()[:, 0]):
            part = logits[some]
            mask_rows(part, rows[some], self.masked, self.bits)
            logits[some] = part


class MinPColumns:
    """How likely a token must be at least, as a share of the best one's likelihood (min_p), by row.
    Where a row has none it costs a captured step nothing but the launch."""

    def __init__(self, num_rows: int, device: torch.device, fused: bool) -> None:
        self.least = torch.zeros(num_rows, device=device)
        self._fused = fused
        self._used: set[int] = set()

    def write(self, row: int, least: float) -> None:
        if least or row in self._used:
            self.least[row].fill_(least)
        if least:
            self._used.add(row)
        else:
            self._used.discard(row)

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        params: SamplingColumns,
        seen: torch.Tensor,
        ends: tuple[torch.Tensor, int],
    ) -> None:
        """To the logits of these rows, in place. `seen`: the tokens that count for a repetition
        penalty, by row. `ends`: from which position on each row may end, and the end token, which
        is held back before. On a CPU, where nothing is captured, only if there is any."""
        columns = self.least, params.floats[0], params.floats[2], seen
        if self._fused:
            from stretto.kernels.triton.masks import floor_rows as fast

            fast(logits, rows, *columns, (positions, *ends))
        elif self._used or self.least.device.type != "cpu":
            floor_rows(logits, rows, *columns)


class BiasColumns:
    """What requests add to the logits of some tokens, by row; a row without any costs a captured
    step nothing but the launch."""

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device, fused: bool) -> None:
        self.counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.ids = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        self.values = torch.zeros(num_rows, max_tokens, device=device)
        self._fused = fused
        # rows with a bias
        self._used: set[int] = set()

    def write(self, row: int, bias: Sequence[tuple[int, float]]) -> None:
        """Each token once."""
        if bias:
            ids = np.array([i for i, _ in bias])
            values = np.array([v for _, v in bias], dtype=np.float32)
            self.ids[row, : len(bias)] = to_device(ids, self.ids.device, torch.int64)
            self.values[row, : len(bias)] = to_device(values, self.values.device, torch.float32)
        if bias or row in self._used:
            self.counts[row].fill_(len(bias))
        if bias:
            self._used.add(row)
        else:
            self._used.discard(row)

    def add(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """To the logits of these rows, in place. On a CPU, where nothing is captured, only if there
        is any."""
        columns = self.counts, self.ids, self.values
        if self._fused:
            from stretto.kernels.triton.masks import bias_rows as fast

            fast(logits, rows, *columns)
        elif self._used or self.ids.device.type != "cpu":
            bias_rows(logits, rows, *columns)

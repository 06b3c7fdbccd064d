"""How the tensors of quantised matrices get to their places: as they are, where the model keeps
them packed in the same way, or widened as they land.

Called by the loader (`models/weights.py`), on the stage's main thread. What can be wrong with the
small tensors beside the codes is found on the host before a weight is read; numbers that are not
finite, on the device when all are there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import CheckpointError
from stretto.kernels.reference.packed import PackedWeight, unpack, widen
from stretto.layers.targets import Float8Rows
from stretto.models.checkpoint import StoredTensor
from stretto.models.quantised.recognise import QuantisedTensor

HOST_DTYPES = {"I32": np.int32, "I64": np.int64, "F32": np.float32, "F16": np.float16}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}


def refuse(t: StoredTensor, why: str) -> CheckpointError:
    return CheckpointError(f"{t.file}: tensor {t.name}: {why}")


def read_small(t: StoredTensor) -> npt.NDArray[Any]:
    """The numbers of a tensor, on the host; bfloat16 as float32."""
    try:
        with open(t.file, "rb") as f:
            raw = os.pread(f.fileno(), t.nbytes, t.start)
    except OSError as e:
        raise refuse(t, f"cannot be read ({e.strerror})") from None
    if len(raw) != t.nbytes:
        raise refuse(t, "cannot be read (the file ended early)")
    if t.dtype == "BF16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(t.shape)
    return np.frombuffer(raw, HOST_DTYPES[t.dtype]).reshape(t.shape)


def check_small(q: QuantisedTensor) -> None:
    """What the tensors beside the codes must say."""
    outputs, inputs = q.shape
    if q.stated_shape is not None and read_small(q.stated_shape).tolist() != [outputs, inputs]:
        found = read_small(q.stated_shape).tolist()
        raise refuse(q.stated_shape, f"says {found}, but the codes are of {[outputs, inputs]}")
    if q.order is not None:
        order = read_small(q.order)
        if not np.array_equal(order, np.arange(inputs) // q.format.group):
            raise refuse(q.order, "puts inputs into another order, which is not supported")
    if q.zeros is not None:
        words = read_small(q.zeros).view(np.uint32)
        if (words != q.zeros_must_be).any():
            raise refuse(q.zeros, "has zero points: GPTQ weights must be symmetric")


def check_float8_scales(quantised: Iterable[QuantisedTensor]) -> set[str]:
    """Check the scales of float8 matrices. Returns the names of those whose scales are stored as
    what a weight is divided by.

    Scales of blocks are either: weights are small, so all of a checkpoint's scales are below one,
    or all reciprocals above. (A block of zeros has 1 either way.)"""
    blocks: list[QuantisedTensor] = []
    below: StoredTensor | None = None
    above: StoredTensor | None = None
    for q in quantised:
        if q.format.kind != "float8":
            continue
        scale = read_small(q.scale)
        if not np.isfinite(scale).all():
            raise refuse(q.scale, "holds infinities or NaN")
        if (scale == 0).any():
            raise refuse(q.scale, "holds a scale of 0")
        if not q.format.per_row:
            blocks.append(q)
            below = q.scale if (scale < 1).any() else below
            above = q.scale if (scale > 1).any() else above
    if below is not None and above is not None:
        raise refuse(above, f"has scales above 1, {below.name} below: which kind is meant?")
    return {q.name for q in blocks} if above is not None else set()


@dataclass(slots=True, eq=False)
class Widening:
    """A place for the codes of one matrix, which is filled with what they stand for."""

    source: QuantisedTensor
    into: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    reciprocal: bool
    checks: NumberChecks

    @property
    def shape(self) -> torch.Size:
        """Of the codes."""
        return torch.Size(self.source.codes.shape)

    @property
    def device(self) -> torch.device:
        return self.into.device

    def numel(self) -> int:
        return self.shape.numel()

    def fill(self, codes: torch.Tensor) -> None:
        q, scale, zero = self.source, self.scale, None
        if self.reciprocal:
            scale = 1 / scale.float()
        if q.layout == "columns":
            codes, scale = codes.T.contiguous(), scale.T
        if q.format.per_row:
            scale = scale.flatten()
        if self.zero is not None:
            zero = zero_points(self.zero, q)
        packed = PackedWeight(q.format, codes, scale, zero)
        self.checks.add(q, packed)
        self.into.copy_(widen(packed, self.into.dtype))


def zero_points(words: torch.Tensor, q: QuantisedTensor) -> torch.Tensor:
    """Packed along the outputs: [outputs, groups] int8."""
    bits = q.format.bits
    unpacked = unpack(words.T.contiguous(), bits).T[: q.shape[0]]
    return (unpacked.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


@dataclass(slots=True, eq=False)
class ZeroPoints:
    """A place for a packed matrix's zero points, which have a byte each in memory."""

    source: QuantisedTensor
    into: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        assert self.source.zero is not None
        return torch.Size(self.source.zero.shape)

    @property
    def device(self) -> torch.device:
        return self.into.device

    def numel(self) -> int:
        return self.shape.numel()

    def fill(self, words: torch.Tensor) -> None:
        self.into.copy_(zero_points(words, self.source))


Landing = torch.Tensor | Float8Rows | Widening | ZeroPoints
"""What can be filled with (a piece of) one tensor of a file."""


@dataclass(slots=True, eq=False)
class NumberChecks:
    """Which matrices hold what no number is: decided on the device, asked for once."""

    names: list[QuantisedTensor] = field(default_factory=list)
    bad: list[torch.Tensor] = field(default_factory=list)

    def add(self, q: QuantisedTensor, w: PackedWeight) -> None:
        bad = ~w.scale.isfinite().all()
        if q.format.kind == "float8":
            bad = bad | ((w.codes.view(torch.uint8) & 0x7F) == 0x7F).any()
        self.names.append(q)
        self.bad.append(bad)

    def wait(self) -> None:
        """Raises for the first of them."""
        if not self.bad:
            return
        found = torch.stack(self.bad).nonzero()
        if len(found):
            q = self.names[int(found[0])]
            what = "NaN" if q.format.kind == "float8" else "scales that are infinite or NaN"
            name = q.codes if q.format.kind == "float8" else q.scale
            raise refuse(name, f"holds {what}")


@dataclass(slots=True, eq=False)
class WideningBatch:
    """Tensors of one file that are read together, after `first`, which their filling needs."""

    first: dict[str, Landing] = field(default_factory=dict)
    then: dict[str, Landing] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class QuantisedLoad:
    """What is to be read for the quantised matrices among some destinations."""

    checks: NumberChecks = field(default_factory=NumberChecks)
    # tensor name -> place, for matrices that stay as they are
    direct: dict[str, Landing] = field(default_factory=dict)
    # those that are widened, by the file of their codes
    widened: dict[Path, list[tuple[QuantisedTensor, torch.Tensor]]] = field(default_factory=dict)
    reciprocal: set[str] = field(default_factory=set)
    _packed: list[tuple[QuantisedTensor, PackedWeight]] = field(default_factory=list)

    @classmethod
    def of(
        cls, pairs: Mapping[str, tuple[QuantisedTensor, torch.Tensor | Float8Rows | PackedWeight]]
    ) -> QuantisedLoad:
        self = cls()
        sources = [q for q, _ in pairs.values()]
        for q in sources:
            check_small(q)
        self.reciprocal = check_float8_scales(sources)
        for q, into in pairs.values():
            if isinstance(into, torch.Tensor):
                self.widened.setdefault(q.codes.file, []).append((q, into))
            elif isinstance(into, Float8Rows):
                rows = PackedWeight(q.format, into.weight, into.scale)
                self._keep(q, rows)
            else:
                self._keep(q, into)
        return self

    def _keep(self, q: QuantisedTensor, into: PackedWeight) -> None:
        if q.format != into.format:
            raise refuse(q.codes, f"is {q.format}, and cannot be made {into.format}")
        turned = q.layout == "columns"
        self.direct[q.codes.name] = into.codes.T if turned else into.codes
        scale = into.scale.T if turned else into.scale
        self.direct[q.scale.name] = scale[:, None] if q.format.per_row else scale
        if q.zero is not None:
            assert into.zero is not None
            self.direct[q.zero.name] = ZeroPoints(q, into.zero)
        self._packed.append((q, into))

    def batches(self) -> Iterable[WideningBatch]:
        """One for each file, so that the scales of few are held."""
        for pairs in self.widened.values():
            batch = WideningBatch()
            for q, into in pairs:
                scale = self._room(q.scale, batch, into.device)
                zero = None if q.zero is None else self._room(q.zero, batch, into.device)
                inverse = q.name in self.reciprocal
                landing = Widening(q, into, scale, zero, inverse, self.checks)
                batch.then[q.codes.name] = landing
            yield batch

    def _room(self, t: StoredTensor, batch: WideningBatch, device: torch.device) -> torch.Tensor:
        room = torch.empty(t.shape, dtype=DTYPES[t.dtype], device=device)
        batch.first[t.name] = room
        return room

    def finish(self) -> None:
        """When all is read; waits."""
        for q, into in self._packed:
            if q.name in self.reciprocal:
                into.scale.copy_(1 / into.scale)
            self.checks.add(q, into)
        self.checks.wait()

"""Rounding wide matrices to few bits, and widening them again."""

from __future__ import annotations

import pytest
import torch

from stretto.kernels.formats import WeightFormat
from stretto.kernels.reference import packed
from stretto.kernels.reference.packed import PackedWeight, empty, widen

INT4 = WeightFormat("int4", 32, scale_dtype="bfloat16")
ZEROS = WeightFormat("int4", 32, symmetric=False, scale_dtype="bfloat16")
FORMATS = {
    "int4": INT4,
    "int4 with zero points": ZEROS,
    "int8": WeightFormat("int8", 32),
    "blocks": WeightFormat("float8", 32, 32),
    "rows": WeightFormat("float8", 0),
}


def rounded(form: WeightFormat, wide: torch.Tensor) -> PackedWeight:
    w = empty(form, *wide.shape)
    w.fill(wide)
    return w


def errors(w: PackedWeight, wide: torch.Tensor) -> torch.Tensor:
    """Squared, of each group."""
    return (widen(w, torch.float32) - wide).square().unflatten(-1, (-1, 32)).sum(-1)


def noise(outputs: int = 48, inputs: int = 96) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(5))


def test_no_group_is_worse_than_with_the_largest_number_at_the_end_of_the_range() -> None:
    wide = noise()
    groups = wide.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 8).bfloat16().float()
    sign = torch.where(groups.amax(-1, keepdim=True) > -groups.amin(-1, keepdim=True), -1, 1)
    scale = scale * sign
    plain = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1)
    found = errors(rounded(INT4, wide), wide)
    assert (found <= plain * 1.0001).all()
    assert found.sum() < 0.95 * plain.sum()


def test_scales_are_negative_where_the_largest_number_is_positive() -> None:
    """The range has one number more below zero."""
    wide = noise()
    groups = wide.unflatten(-1, (-1, 32))
    positive = groups.amax(-1) > -groups.amin(-1)
    assert torch.equal(rounded(INT4, wide).scale < 0, positive)


def test_zero_points_are_for_groups_to_one_side() -> None:
    wide = noise() + 3
    with_zeros, without = rounded(ZEROS, wide), rounded(INT4, wide)
    assert errors(with_zeros, wide).sum() < errors(without, wide).sum() / 2
    assert with_zeros.zero is not None
    assert -8 <= int(with_zeros.zero.min()) <= int(with_zeros.zero.max()) <= 7


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_as_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = noise()
    whole = rounded(FORMATS[name], wide)
    monkeypatch.setattr(packed, "CACHED_PART", 32 * 96)
    for a, b in zip(rounded(FORMATS[name], wide).tensors, whole.tensors, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name: str) -> None:
    wide = noise()
    wide[:, :32] = 0
    wide[32:] = 0
    w = rounded(FORMATS[name], wide)
    assert not widen(w, torch.float32)[wide == 0].any()
    assert w.scale.isfinite().all()
    assert (w.scale != 0).all()


def test_the_last_blocks_may_be_partial() -> None:
    wide = noise(40, 72)
    w = rounded(FORMATS["blocks"], wide)
    assert w.scale.shape == (2, 3)
    assert (widen(w, torch.float32) - wide).norm() < 0.04 * wide.norm()

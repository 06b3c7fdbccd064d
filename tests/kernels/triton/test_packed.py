"""Kernels that read packed weights: the numbers are those of the widened model, whatever the
format, one row or several, alone or in whole layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stretto.kernels.formats import WeightFormat
from stretto.kernels.reference.packed import PackedWeight, empty, widen
from stretto.kernels.triton import packed, packed_experts
from stretto.layers import fused
from stretto.layers.config import DecoderConfig, MoeConfig
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.linear import PackedMatrix
from stretto.layers.prefill import Ragged
from stretto.models.weights import build
from tests.kernels.triton.layers import MOE, close, filled

INT4 = WeightFormat("int4", 32, scale_dtype="bfloat16")
FORMATS = {
    "int4": INT4,
    "int4 with zero points": dataclasses.replace(INT4, symmetric=False),
    "int4, float16 scales": dataclasses.replace(INT4, scale_dtype="float16"),
    "int8": WeightFormat("int8", 32, scale_dtype="bfloat16"),
    "float8 blocks": WeightFormat("float8", 32, 32),
    "float8 rows": WeightFormat("float8", 0),
}


def random_weight(form: WeightFormat, *shape: int, seed: int, device: torch.device) -> PackedWeight:
    w = empty(form, *shape, device=device)
    fill(w, seed)
    return w


def fill(w: PackedWeight, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(w.shape, generator=g) * w.shape[-1] ** -0.5
    flat = w.flat() if len(w.shape) > 2 else w
    flat.fill(wide.flatten(0, -2).to(w.device))
    if w.zero is not None:
        w.zero.copy_(torch.randint(-8, 8, w.zero.shape, generator=g))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unit_rows_read_the_widened_numbers(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """To the bit, but for float8, whose scale comes after the sum."""
    w = random_weight(FORMATS[name], 32, 64, seed=1, device=device)
    rows = torch.eye(64, dtype=dtype, device=device)[[0, 1, 2, 7, 8, 31, 32, 63]]
    found = packed.project(rows, w)
    wanted = widen(w, dtype).T[[0, 1, 2, 7, 8, 31, 32, 63]]
    assert torch.equal(found, wanted)
    assert torch.equal(packed_experts.widen_matrix(w, dtype), widen(w, dtype))


def layered(form: WeightFormat, shared: int | None) -> DecoderConfig:
    moe = MoeConfig(8, 2, 32, True, shared, form)
    return dataclasses.replace(MOE, attention_format=form, moe=moe)


def made(config: DecoderConfig, device: torch.device, seed: int) -> Decoder:
    decoder = build(lambda: Decoder(config), device, torch.float32)
    filled(decoder, device, seed)
    for i, m in enumerate(decoder.modules()):
        if isinstance(m, PackedMatrix):
            fill(m.weight, seed + i)
    decoder.prepare(device)
    decoder.fused = None  # the plain way, whatever is usable here
    return decoder


@pytest.mark.parametrize(
    ("name", "shared", "rows"),
    [
        ("int4", None, 1),
        ("int4", None, 3),
        ("int4", 64, 1),
        ("int4", 64, 3),
        ("int4 with zero points", None, 3),
        ("int8", None, 1),
        ("float8 blocks", None, 1),
        ("float8 blocks", None, 3),
    ],
)
def test_layers_equal_the_plain_decoder(
    name: str, shared: int | None, rows: int, device: torch.device
) -> None:
    config = layered(FORMATS[name], shared)
    assert fused.fits(config)
    decoder = made(config, device, rows)
    plain, ours = (decoder.cache(12, 16, device, torch.float32) for _ in range(2))
    past = torch.randn(plain.data.shape, generator=torch.Generator().manual_seed(9)).to(device)
    plain.data.copy_(past)
    ours.data.copy_(past)
    lengths, tables = [40, 1, 17][:rows], [[1, 2, 3], [4], [5, 6]][:rows]
    paging = plain.page([(t, n - 1, 1) for t, n in zip(tables, lengths, strict=True)])
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)).to(device)
    positions = torch.tensor([n - 1.0 for n in lengths], device=device).expand(3, -1)
    wanted = decoder(x, positions, PagedPass(plain, paging))
    cos, sin = decoder.rope(positions, x.dtype)
    found = fused.FusedLayers(decoder, device).paged(x, cos, sin, ours, paging)
    assert close(found, wanted)
    assert close(ours.data, plain.data)


@pytest.mark.parametrize(
    ("name", "shared", "rows"),
    [("int4", None, 19), ("int4", 64, 19), ("float8 blocks", None, 19), ("int4", None, 131)],
)
def test_prompts_equal_the_plain_decoder(
    name: str, shared: int | None, rows: int, device: torch.device
) -> None:
    decoder = made(layered(FORMATS[name], shared), device, rows)
    plain, ours = (decoder.cache(16, 16, device, torch.float32) for _ in range(2))
    paging = plain.page([(list(range(1, 11)), 0, rows)])
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)).to(device)
    positions = torch.arange(rows, dtype=torch.float32, device=device).expand(3, -1)
    wanted = decoder(x, positions, PagedPass(plain, paging))
    cos, sin = decoder.rope(positions, x.dtype)
    found = decoder.prefill(x, cos, sin, ours, Ragged.of(paging))
    assert close(found, wanted)
    assert close(ours.data, plain.data)


def test_sizes_that_no_tile_divides_take_the_plain_way() -> None:
    assert not fused.fits(layered(WeightFormat("int4", 24), None))
    assert not fused.fits(layered(WeightFormat("float8", 48, 16), None))

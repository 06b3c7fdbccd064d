"""Kernels that read packed weights: the numbers are those of the widened model, whatever the
format, one row or several, alone or in whole layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from stretto.errors import Invalid
from stretto.kernels import triton as kernels
from stretto.kernels.formats import WeightFormat
from stretto.kernels.reference import moe, quantized
from stretto.kernels.reference.norm import rms_norm
from stretto.kernels.reference.packed import PackedWeight, empty, widen
from stretto.kernels.triton import grouped, packed, packed_experts, packed_prompts, tuning
from stretto.kernels.triton.linear import Gained
from stretto.kernels.triton.packed_experts import PackedExpertWeights
from stretto.layers import fused
from stretto.layers.config import DecoderConfig, MoeConfig
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.linear import PackedMatrix
from stretto.layers.prefill import Ragged
from stretto.models.weights import build
from tests.kernels.triton.layers import MOE, close, filled
from tests.rows import row_errors

INT4 = WeightFormat("int4", 32, scale_dtype="bfloat16")
FORMATS = {
    "int4": INT4,
    "int4 with zero points": dataclasses.replace(INT4, symmetric=False),
    "int4, float16 scales": dataclasses.replace(INT4, scale_dtype="float16"),
    "int8": WeightFormat("int8", 32, scale_dtype="bfloat16"),
    "int4, groups of 128": WeightFormat("int4", 128, scale_dtype="float16"),
    "int8 with zero points": WeightFormat("int8", 32, symmetric=False, scale_dtype="bfloat16"),
    "float8 blocks": WeightFormat("float8", 32, 32),
    "float8 rows": WeightFormat("float8", 0, scale_dtype="bfloat16"),
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
    w = random_weight(FORMATS[name], 32, 128, seed=1, device=device)
    some = [0, 1, 2, 7, 8, 31, 32, 63, 64, 127]
    assert name.startswith("float8") or w.zero is not None or (w.scale < 0).any()
    found = packed.project(torch.eye(128, dtype=dtype, device=device)[some], w)
    wanted = widen(w, dtype).T[some]
    assert torch.equal(found, wanted)
    assert torch.equal(packed_prompts.widen_matrix(w, dtype), widen(w, dtype))


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


def rand(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("rows", [1, 17, 128])
def test_projections_equal_the_reference(name: str, rows: int, device: torch.device) -> None:
    """With a norm in front, with one on its way, onto a residual stream, and behind it."""
    w = random_weight(FORMATS[name], 96, 128, seed=rows, device=device)
    x, gain, residual = (
        rand(*s, seed=i, device=device) for i, s in enumerate([(rows, 128), (128,), (rows, 96)])
    )
    product = F.linear(rms_norm(x, gain, 1e-6), widen(w, torch.float32))
    assert close(packed.project(x, w, norm=(gain, 1e-6), add=residual), product + residual)
    squares = x.square().view(rows, 4, 32).sum(2).T.contiguous()
    assert close(packed.project(Gained(x * gain, squares, 1e-6), w), product)
    next_gain = rand(96, seed=9, device=device)
    total, gained = packed.project_onto(residual, x, w, (next_gain, 1e-6), None)
    assert close(total, residual + F.linear(x, widen(w, torch.float32)))
    factor = torch.rsqrt(gained.squares.sum(0) / 96 + 1e-6)
    assert close(gained.x * factor[:, None], rms_norm(total, next_gain, 1e-6))


@pytest.mark.parametrize("chunk", [32, 64])
def test_a_part_of_a_group_will_do(chunk: int, device: torch.device) -> None:
    w = random_weight(FORMATS["int4, groups of 128"], 32, 256, seed=3, device=device)
    x = rand(3, 256, seed=4, device=device)
    with tuning.instead({"packed_project_int4_g128/16x32x256": {"BK": chunk}}):
        assert close(packed.project(x, w), F.linear(x, widen(w, torch.float32)))


def decoded(decoder: Decoder, rows: int, idle: torch.Tensor | None, ours: bool) -> torch.Tensor:
    """The first position of so many sequences."""
    device = decoder.norm.weight.device
    cache = decoder.cache(rows + 1, 16, device, torch.float32)
    paging = cache.page([([1 + row], 0, 1) for row in range(rows)])
    x = rand(rows, 64, seed=3, device=device)
    positions = torch.zeros(3, rows, device=device)
    if not ours:
        return decoder(x, positions, PagedPass(cache, paging))
    cos, sin = decoder.rope(positions, x.dtype)
    return fused.FusedLayers(decoder, device).paged(x, cos, sin, cache, paging, idle=idle)


@pytest.mark.parametrize(
    ("name", "rows", "shared"),
    [
        ("int4 with zero points", 1, 64),
        ("float8 blocks", 1, 64),
        ("float8 blocks", 5, None),
        ("int8", 5, 64),
        ("int4 with zero points", 40, 64),
        ("float8 rows", 33, None),
        ("int4", 128, None),
    ],
)
def test_rows_that_choose_three_experts(
    name: str, rows: int, shared: int | None, device: torch.device
) -> None:
    """Not a power of two; more rows than a tile has; rows that are padding choose none."""
    config = layered(FORMATS[name], shared)
    moe_config = MoeConfig(8, 3, 32, False, shared, FORMATS[name])
    decoder = made(dataclasses.replace(config, moe=moe_config), device, rows)
    idle = None if rows == 1 else (torch.arange(rows, device=device) % 5 == 4).to(torch.int8)
    real = slice(None) if idle is None else idle == 0
    wanted = decoded(decoder, rows, None, ours=False)[real]
    assert close(decoded(decoder, rows, idle, ours=True)[real], wanted)


@pytest.mark.parametrize("rows", [3, 17])
def test_weights_as_the_left_operand_give_the_same(rows: int, device: torch.device) -> None:
    for name in ("int4", "float8 blocks"):
        decoder = made(layered(FORMATS[name], 64), device, rows)
        with tuning.instead({}) as asked:
            wanted = decoded(decoder, rows, None, ours=True)
        swapped = {
            n: q.found | {"swap": 1, "BN": 16} for n, q in asked.items() if "swap" in q.found
        }
        assert {n.split("_")[1] for n in swapped} == {"project", "up", "down"}
        with tuning.instead(swapped):
            assert close(decoded(decoder, rows, None, ours=True), wanted)


def experts_of(form: WeightFormat, device: torch.device) -> PackedExpertWeights:
    """Eight, of which each row goes to three."""
    hidden, size = 64, 32
    gain, router = (
        rand(*shape, seed=i, device=device).bfloat16() for i, shape in enumerate([(64,), (8, 64)])
    )
    return PackedExpertWeights(
        gain=1 + 0.1 * gain,
        eps=1e-6,
        router=router,
        gate_up=random_weight(form, 8, 2 * size, hidden, seed=3, device=device),
        down=random_weight(form, 8, hidden, size, seed=4, device=device),
        top_k=3,
        norm_topk=True,
    )


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.group <= 64])
@pytest.mark.parametrize("rows", [1, 19])
def test_in_bfloat16(name: str, rows: int, device: torch.device) -> None:
    """As on a card: numbers are widened in registers. Beside the same in float32."""
    w = random_weight(FORMATS[name], 64, 64, seed=2, device=device)
    x, y = (rand(rows, 64, seed=i, device=device).bfloat16() for i in (5, 6))
    found = packed.project(y, w, add=x)
    wanted = x.float() + F.linear(y.float(), widen(w, torch.bfloat16).float())
    assert close(found, wanted, 1e-2)
    e = experts_of(FORMATS[name], device)
    normed = rms_norm(x, e.gain, e.eps)
    weights, ids = moe.route(F.linear(normed, e.router), e.top_k, e.norm_topk)
    gate_up, down = (widen(m, torch.bfloat16).float() for m in (e.gate_up, e.down))
    sums = moe.experts(normed.float(), gate_up, down, weights.float(), ids, None)
    stream = x.clone()
    if rows == 1:
        packed_experts.mixture_one(stream, e)
    else:
        squares = x.float().square().sum(1)[None]
        packed_experts.mixture(stream, Gained(x * e.gain, squares, e.eps), e)
    assert float(row_errors(stream, x.float() + sums).median()) < 2e-2


# -- float8 rows


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STRETTO_KERNELS_FLOAT8", "products")
    kernels.narrow_products.cache_clear()
    yield
    kernels.narrow_products.cache_clear()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as float8 keeps them."""
    codes = torch.empty_like(x, dtype=quantized.FLOAT8)
    scale = x.new_empty(len(x), dtype=torch.float32)
    quantized.quantize(x, codes, scale)
    return codes.float() * scale[:, None]


NARROW = ["float8 blocks", "float8 rows"]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.usefixtures("products")
def test_many_rows_meet_float8_weights_as_float8(name: str, device: torch.device) -> None:
    w = random_weight(FORMATS[name], 96, 64, seed=5, device=device)
    x = rand(133, 64, seed=6, device=device) * torch.arange(133, device=device)[:, None]
    found = packed_prompts.linear(x, w)
    assert close(found, F.linear(rounded(x), widen(w, torch.float32)))
    assert 1e-3 < error(found, F.linear(x, widen(w, torch.float32))) < 0.05
    few = packed_prompts.linear(x[:128], w)
    assert close(few, F.linear(x[:128], widen(w, torch.float32))), "wide up to 128 rows"


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("rows", [40, 140])
@pytest.mark.usefixtures("products")
def test_sorted_float8_rows(name: str, rows: int, device: torch.device) -> None:
    experts, hidden, size, top = 4, 64, 32, 2
    gate_up = random_weight(FORMATS[name], experts, 2 * size, hidden, seed=1, device=device)
    down = random_weight(FORMATS[name], experts, hidden, size, seed=2, device=device)
    x = rand(rows, hidden, seed=3, device=device)
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    routed = grouped.route(rand(rows, experts, seed=4, device=device), top, True, count)
    found = packed_prompts.sorted_experts(x, gate_up, down, routed).view(rows, top, hidden)
    keep = rounded if rows > kernels.MAX_ROWS else torch.clone
    wide_up, wide_down = (widen(w, torch.float32) for w in (gate_up, down))
    wanted = torch.empty_like(found)
    for r, ids in enumerate(routed.ids.tolist()):
        for k, e in enumerate(ids):
            h = moe.swiglu(F.linear(keep(x)[r : r + 1], wide_up[e]))
            wanted[r, k] = F.linear(keep(h), wide_down[e])[0]
    assert close(found, wanted, 1e-3)


def test_wide_rows_unless_asked_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.narrow_products.cache_clear()
    assert not kernels.narrow_products(device)
    monkeypatch.setenv("STRETTO_KERNELS_FLOAT8", "fast")
    kernels.narrow_products.cache_clear()
    with pytest.raises(Invalid, match="must be weights or products, got 'fast'"):
        kernels.narrow_products(device)
    kernels.narrow_products.cache_clear()

from __future__ import annotations

import pytest
import torch

from stretto.kernels.reference.moe import swiglu as plain_swiglu
from stretto.kernels.reference.norm import rms_norm
from stretto.kernels.reference.paged import write_kv
from stretto.kernels.reference.rope import rotate
from stretto.kernels.triton.prefill import add_norm, combine, qkv_write, swiglu

EPS = 1e-6
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def scalar(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def rows_of(seed: int, *shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Same rounding order, so only the order of sums may differ."""
    error = float((a.float() - b.float()).norm() / b.float().norm())
    assert error < (1e-6 if a.dtype == torch.float32 else 4e-3), f"relative error {error}"


@BOTH
@pytest.mark.parametrize("size", [64, 48])
def test_add_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, add, weight = (
        rows_of(s, *n, device=device, dtype=dtype)
        for s, n in enumerate([(7, size), (7, size), (size,)])
    )
    x[5:], add[5:] = float("nan"), float("nan")
    total, normed = add_norm(x, add, weight, EPS, scalar(5, device))
    assert torch.equal(total[:5], x[:5] + add[:5])
    close(normed[:5], rms_norm(x[:5] + add[:5], weight, EPS))
    assert not total[5:].any()
    assert not normed[5:].any()
    alone, normed = add_norm(x, None, weight, EPS, scalar(5, device))
    assert alone is x
    close(normed[:5], rms_norm(x[:5], weight, EPS))
    assert not normed[5:].any()


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 16), (4, 2, 32), (6, 2, 16)])
def test_norm_rope_and_write(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, real, block = 9, 7, 4
    qkv = rows_of(0, rows, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    q_weight, k_weight = (rows_of(s, dim, device=device, dtype=dtype) for s in (1, 2))
    cos, sin = (rows_of(s, rows, dim, device=device, dtype=dtype) for s in (3, 4))
    qkv[real:] = float("nan")
    slots = torch.tensor([4, 5, 6, 7, 23, 12, 17, 8, 9], device=device)
    before = rows_of(5, 2, 6, kv_heads, block, dim, device=device, dtype=dtype)
    cache, expected = before.clone(), before.clone()
    out = qkv_write(qkv, q_weight, k_weight, EPS, cos, sin, cache, slots, scalar(real, device))
    q, k, v = (
        t.unflatten(-1, (-1, dim))
        for t in qkv[:real].split([n * dim for n in (heads, kv_heads, kv_heads)], -1)
    )
    close(out[:real], rotate(rms_norm(q, q_weight, EPS), cos[:real], sin[:real]))
    assert not out[real:].any()
    write_kv(expected, rotate(rms_norm(k, k_weight, EPS), cos[:real], sin[:real]), v, slots[:real])
    close(cache, expected)
    assert torch.equal(cache[:, 2], before[:, 2])  # where padding rows would have written


@BOTH
def test_swiglu_and_gate(dtype: torch.dtype, device: torch.device) -> None:
    both = rows_of(0, 6, 2 * 24, device=device, dtype=dtype)
    x, weight = (
        rows_of(1, 6, 48, device=device, dtype=dtype),
        rows_of(2, 1, 48, device=device, dtype=dtype),
    )
    both[4:], x[4:] = float("nan"), float("nan")
    h, gate = swiglu(both, scalar(4, device), x, weight)
    close(h[:4], plain_swiglu(both[:4]))
    assert not h[4:].any()
    assert gate is not None
    close(gate[:4].to(dtype), torch.sigmoid(torch.nn.functional.linear(x[:4], weight))[:, 0])
    h, gate = swiglu(both, scalar(4, device))
    assert gate is None
    close(h[:4], plain_swiglu(both[:4]))


@BOTH
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sorted_rows", [False, True])
def test_combine(shared: bool, sorted_rows: bool, dtype: torch.dtype, device: torch.device) -> None:
    rows, real, size, top_k = 6, 5, 48, 3
    x, y = (
        rows_of(0, rows, size, device=device, dtype=dtype),
        rows_of(1, rows * top_k, size, device=device, dtype=dtype),
    )
    weights = rows_of(2, rows, top_k, device=device, dtype=dtype)
    norm = rows_of(3, size, device=device, dtype=dtype)
    extra, gate = (
        rows_of(4, rows, size, device=device, dtype=dtype),
        rows_of(5, rows, device=device, dtype=dtype),
    )
    x[real:], y[real * top_k :] = float("nan"), float("nan")
    mixed = (y.view(rows, top_k, size).float() * weights.float()[..., None]).sum(1).to(dtype)
    if shared:
        mixed = mixed + gate[:, None] * extra
    want = x + mixed
    places = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(6)).to(device)
    shuffled = torch.empty_like(y)
    shuffled[places] = y
    total, normed = combine(
        x,
        shuffled if sorted_rows else y,
        weights.float(),
        norm,
        EPS,
        scalar(real, device),
        places.to(torch.int32) if sorted_rows else None,
        extra if shared else None,
        gate.float() if shared else None,
    )
    close(total[:real], want[:real])
    close(normed[:real], rms_norm(want[:real], norm, EPS))
    assert not total[real:].any()
    assert not normed[real:].any()

"""Decode kernels against the plain versions: projections, experts, attention. Fresh random inputs,
relative error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stretto.kernels.reference import moe
from stretto.kernels.reference.norm import rms_norm
from stretto.kernels.reference.paged import KVCache, paged_attention, write_kv
from stretto.kernels.reference.rope import rotate
from stretto.layers.config import DecoderConfig
from stretto.models.speech.code_predictor import FrameCache, FramePass

fast_linear = pytest.importorskip("stretto.kernels.triton.linear")
fast_experts = pytest.importorskip("stretto.kernels.triton.experts")
fast_many = pytest.importorskip("stretto.kernels.triton.experts_many")
fast_attention = pytest.importorskip("stretto.kernels.triton.attention")
tuning = pytest.importorskip("stretto.kernels.triton.tuning")

Narrow = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
EPS = 1e-6
# The interpreter cuts float32 down to bfloat16 where the device rounds.
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if torch.cuda.is_available() else 2e-2}
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


class Random:
    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, self.dtype)

    def gain(self, size: int) -> torch.Tensor:
        return (1.0 + 0.1 * torch.randn(size, generator=self.generator)).to(self.device, self.dtype)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@both
@pytest.mark.parametrize("rows", [1, 2, 7, 17])
@pytest.mark.parametrize("kind", ["plain", "norm", "add", "glu"])
def test_project(device: torch.device, dtype: torch.dtype, rows: int, kind: str) -> None:
    r = Random(device, dtype, rows)
    inputs, outputs = 96, 40  # neither a multiple of a tile
    x, gain = r(rows, inputs), r.gain(inputs)
    w = r(outputs * (2 if kind == "glu" else 1), inputs, scale=inputs**-0.5)
    normed = rms_norm(x, gain, EPS) if kind in ("norm", "glu") else x
    wanted = F.linear(normed.float(), w.float())
    add = r(rows, outputs) if kind == "add" else None
    if kind == "glu":
        wanted = moe.swiglu(wanted)
    if add is not None:
        wanted = wanted + add.float()
    norm = (gain, EPS) if kind in ("norm", "glu") else None
    out = torch.full((rows, outputs), float("nan"), device=device, dtype=dtype)
    found = fast_linear.project(x, w, norm=norm, add=add, glu=kind == "glu", out=out)
    assert found is out
    assert error(found, wanted) < ERROR[dtype]


def normed_by(gained: object) -> torch.Tensor:
    """What the rows come to once their squares are applied."""
    size = gained.x.shape[1]
    return gained.x.float() * torch.rsqrt(gained.squares.sum(0) / size + gained.eps)[:, None]


@both
@pytest.mark.parametrize("rows", [2, 17])
def test_rows_on_their_way_into_a_norm(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """A product that leaves its rows as `Gained`, and one that takes them so."""
    r = Random(device, dtype, rows)
    x, y, gain = r(rows, 48), r(rows, 96), r.gain(48)
    w, v = r(48, 96, scale=0.1), r(2 * 24, 48, scale=0.15)
    total, gained = fast_linear.project_onto(x, y, w, (gain, EPS), None)
    assert error(total, x.float() + F.linear(y.float(), w.float())) < ERROR[dtype]
    normed = rms_norm(total, gain, EPS)
    assert error(normed_by(gained), normed) < ERROR[dtype]
    wanted = moe.swiglu(F.linear(normed.float(), v.float()))
    assert error(fast_linear.project(gained, v, glu=True), wanted) < ERROR[dtype]


@both
@pytest.mark.parametrize("rows", [2, 7, 17, 40])
@pytest.mark.parametrize("splits", [1, 3])
def test_products_in_parts(
    device: torch.device, dtype: torch.dtype, rows: int, splits: int
) -> None:
    """The same chain with K cut into parts: twice, so that the counters must be zero again in
    between."""
    r = Random(device, dtype, rows + splits)
    sizes = {"SPLITS": splits, "BN": 32, "BK": 16, "warps": 4, "stages": 2}
    one = {"SPLITS": 1, "BN": 16, "BK": 32, "warps": 4, "stages": 3}
    x, gain = r(rows, 64), r.gain(64)
    wide = r(rows, 64 * splits)
    w, v = r(64, 32 * splits, scale=0.1), r(2 * 24, 64, scale=0.15)
    y = wide[:, : 32 * splits]  # rows that lie apart
    counters = torch.zeros(fast_linear.COUNTERS, dtype=torch.int32, device=device)
    for _ in range(2):
        total, gained = fast_linear.project_onto(x, y, w, (gain, EPS), None, counters, sizes)
        assert error(total, x.float() + F.linear(y.float(), w.float())) < ERROR[dtype]
        normed = rms_norm(total, gain, EPS)
        assert error(normed_by(gained), normed) < ERROR[dtype]
        wanted = F.linear(normed.float(), v.float())
        for glu, want in ((False, wanted), (True, moe.swiglu(wanted))):
            assert (
                error(fast_linear.project(gained, v, glu=glu, counters=counters, tuned=one), want)
                < ERROR[dtype]
            )
        plain = fast_linear.project(y, w, counters=counters, tuned=sizes)
        assert error(plain, F.linear(y.float(), w.float())) < ERROR[dtype]
        apart = wide[:, :64]  # normalised by a kernel of its own first
        normed = rms_norm(apart, gain, EPS)
        found = fast_linear.project(apart, v, norm=(gain, EPS), counters=counters, tuned=one)
        assert error(found, F.linear(normed.float(), v.float())) < ERROR[dtype]
        assert not counters.any()


@both
def test_many_rows_of_widths_that_nobody_tuned_are_cut_into_parts(
    device: torch.device, dtype: torch.dtype
) -> None:
    r = Random(device, dtype, 70)
    x, w, gain = r(70, 512), r(192, 512, scale=0.05), r.gain(512)
    counters = torch.zeros(fast_linear.COUNTERS, dtype=torch.int32, device=device)
    with tuning.instead({}) as asked:
        found = fast_linear.project(x, w, norm=(gain, EPS), counters=counters)
    assert asked["split/128x192x512"].found["SPLITS"] == 4
    assert error(found, F.linear(rms_norm(x, gain, EPS).float(), w.float())) < ERROR[dtype]


def test_where_whole_products_were_found_best_the_shipped_file_says_so() -> None:
    """From 64 rows on the default is to cut them."""
    tuned = json.loads(tuning.SHIPPED.read_text())
    whole = [name.partition("/")[2] for name in tuned if name.startswith("matrix/64x")]
    assert whole
    assert not [key for key in whole if f"split/{key}" not in tuned]


def test_how_many_parts() -> None:
    x = torch.empty(128, 2048, dtype=torch.bfloat16)
    parts = {n: fast_linear.split_defaults(128, n, x)["SPLITS"] for n in (1024, 2048, 4096, 12288)}
    assert parts == {1024: 4, 2048: 4, 4096: 2, 12288: 1}
    assert fast_linear.split_defaults(32, 2048, x)["SPLITS"] == 0
    assert fast_linear.split_defaults(128, 2048, x[:, :300])["SPLITS"] == 0


@both
def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    r = Random(device, dtype, 5)
    x, gain = r(3, 64), r.gain(64)
    assert error(fast_linear.normalise(x, gain, EPS), rms_norm(x, gain, EPS)) < ERROR[dtype]


def mixtures() -> Iterator[Any]:
    """All of one row; of more, where a case takes seconds in the interpreter, each pair of two
    choices."""
    for rows, kind, renorm, dtype in product(
        (1, 20, 40), ("alone", "shared", "float8"), (False, True), (torch.float32, torch.bfloat16)
    ):
        if rows == 1 or renorm == ((kind == "shared") ^ (rows == 40) ^ (dtype is torch.bfloat16)):
            name = f"{'renorm' if renorm else 'raw'}-{kind}-{rows}-{'f32' if dtype is torch.float32 else 'bf16'}"  # noqa: E501
            yield pytest.param(rows, kind, renorm, dtype, id=name)


@pytest.mark.parametrize(("rows", "kind", "renorm", "dtype"), mixtures())
def test_mixture(
    device: torch.device, dtype: torch.dtype, rows: int, kind: str, renorm: bool, narrow: Narrow
) -> None:
    """At 40 rows with three experts of sixteen each, some experts have more rows than a tile."""
    shared = kind == "shared"
    r = Random(device, dtype, rows + 100)
    hidden, experts, size, top_k, pieces = 64, 16, 96, 3, 2
    w = fast_experts.ExpertWeights(
        gain=r.gain(hidden),
        eps=EPS,
        router=r(experts + shared, hidden, scale=0.3),
        gate_up=r(experts, 2 * size, hidden, scale=hidden**-0.5),
        down=r(experts, hidden, size, scale=size**-0.5),
        top_k=top_k,
        norm_topk=renorm,
        shared_gate_up=r(2 * pieces * size, hidden, scale=hidden**-0.5) if shared else None,
        shared_down=r(hidden, pieces * size, scale=size**-0.5) if shared else None,
    )
    if kind == "float8":
        (gate_up, of_gate_up), (down, of_down) = narrow(w.gate_up), narrow(w.down)
        w = dataclasses.replace(w, gate_up=gate_up, down=down, scales=(of_gate_up, of_down))
    x = r(rows, hidden)
    normed = rms_norm(x, w.gain, EPS)
    weights, ids = moe.route(F.linear(normed, w.router[:experts]), top_k, renorm)
    wanted = moe.experts(
        normed.float(), w.gate_up.float(), w.down.float(), weights.float(), ids, w.scales
    )
    if shared:
        h = moe.swiglu(F.linear(normed.float(), w.shared_gate_up.float()))
        gate = torch.sigmoid(F.linear(normed.float(), w.router[experts:].float()))
        wanted = wanted + gate * F.linear(h, w.shared_down.float())
    found = x.clone()
    if rows == 1:
        fast_experts.mixture_one(found, w)
    else:
        next_gain = r.gain(hidden)
        squares = (x.float() ** 2).view(rows, 4, -1).sum(-1).T.contiguous()
        gained = fast_linear.Gained((x.float() * w.gain.float()).to(dtype), squares, EPS)
        after = fast_many.mixture(found, gained, w, (next_gain, EPS))
        choice = fast_many.choose(fast_many.route(gained, w), gained, w)
        other = {"BN": 32, "BK": 32, "warps": 4, "stages": 2, "swap": 1, "BM": 32}
        again = x.clone()
        fast_many.down(fast_many.up(gained, choice, w, other), choice, w, again, tuned=other)
        assert error(again, found) < ERROR[dtype]
        assert error(normed_by(after), rms_norm(found, next_gain, EPS)) < ERROR[dtype]
    assert error(found.float() - x.float(), wanted) < 3 * ERROR[dtype]


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("shared", [False, True])
def test_padding_goes_to_no_expert(device: torch.device, rows: int, shared: bool) -> None:
    """Whatever it is: other rows have the very same results, and no expert is read that they do not
    go to."""
    r = Random(device, torch.float32, rows)
    w = fast_experts.ExpertWeights(
        r.gain(64), EPS, r(16 + shared, 64), r(16, 64, 64, scale=0.1), r(16, 64, 32, scale=0.1),
        top_k=3,
        norm_topk=True, shared_gate_up=r(64, 64, scale=0.1) if shared else None,
        shared_down=r(64, 32, scale=0.1) if shared else None,
    )  # fmt: skip
    x, real = r(rows, 64), rows - 2
    gained = fast_linear.Gained(x * w.gain, (x.float() ** 2).sum(1)[None], EPS)
    idle = (torch.arange(rows, device=device) >= real).to(torch.int8)
    choice = fast_many.choose(fast_many.route(gained, w), gained, w, idle)
    plain = fast_many.choose(fast_many.route(gained, w), gained, w)
    assert (choice.table[:, real:] == -1).all()
    assert torch.equal(choice.table[:, :real], plain.table[:, :real])
    found, wanted = x.clone(), x.clone()
    after = fast_many.mixture(found, gained, w, (r.gain(64), EPS), idle)
    fast_many.mixture(wanted, gained, w)
    assert torch.equal(found[:real], wanted[:real])
    assert torch.equal(found[real:], x[real:])
    assert after is not None
    assert torch.isfinite(after.x).all()


@both
@pytest.mark.parametrize("rows", [1, 3])
def test_of_equal_logits_the_lower_number_goes_first(
    device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    r = Random(device, dtype, 8)
    x = r(rows, 64)
    router = torch.zeros(16, 64, device=device, dtype=dtype)
    router[5] = -0.0
    w = fast_experts.ExpertWeights(
        r.gain(64),
        EPS,
        router,
        r(16, 64, 64, scale=0.1),
        r(16, 64, 32, scale=0.1),
        top_k=7,
        norm_topk=True,
    )
    normed = rms_norm(x, w.gain, EPS)
    ids = torch.arange(7, device=device).expand(rows, -1)
    wanted = moe.experts(
        normed.float(),
        w.gate_up.float(),
        w.down.float(),
        torch.full_like(ids, 1 / 7, dtype=torch.float32),
        ids,
    )
    found = x.clone()
    if rows == 1:
        fast_experts.mixture_one(found, w)
    else:
        gained = fast_linear.Gained(x * w.gain, (x.float() ** 2).sum(1)[None], EPS)
        fast_many.mixture(found, gained, w)
    assert error(found.float() - x.float(), wanted) < 3 * ERROR[dtype]


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_are_no_numbers_stay_within_bounds(device: torch.device, rows: int) -> None:
    """Addresses are made from what the router chose: it must choose experts that exist, whatever it
    was given."""
    r = Random(device, torch.bfloat16, 9)
    w = fast_experts.ExpertWeights(
        r.gain(64),
        EPS,
        r(16, 64),
        r(16, 64, 64, scale=0.1),
        r(16, 64, 32, scale=0.1),
        top_k=3,
        norm_topk=True,
    )
    x = r(rows, 64)
    x[0] = float("nan")
    if rows == 1:
        fast_experts.mixture_one(x, w)
    else:
        gained = fast_linear.Gained(x * w.gain, (x.float() ** 2).sum(1)[None], EPS)
        fast_many.mixture(x, gained, w)
    assert x[0].isnan().all()  # and it shows
    assert not x[1:].isnan().any()


@both
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (16, 2), (4, 4)])
@pytest.mark.parametrize(("splits", "soon"), [(1, 0), (4, 0), (4, 1)])
def test_decode_attention(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, splits: int, soon: int
) -> None:
    r = Random(device, dtype, heads + splits)
    dim, size = 32, 16
    cache = KVCache(2, 40, kv_heads, size, dim, device, dtype)
    cache.data.copy_(r(*cache.data.shape))
    lengths = [
        1,
        2,
        16,
        17,
        65,
        150,
    ]  # first token, within a block, at its edges, over several tiles
    free = iter(range(1, 40))
    tables = [[next(free) for _ in range(-(-n // size))] for n in lengths]
    paging = cache.page([(table, n - 1, 1) for table, n in zip(tables, lengths, strict=True)])
    rows = len(lengths)
    qkv = r(rows, (heads + 2 * kv_heads) * dim)
    q_gain, k_gain = r.gain(dim), r.gain(dim)
    angles = torch.randn(rows, dim // 2, generator=r.generator).repeat(1, 2).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    copy = cache.data[1].clone()
    q, k, v = (
        t.unflatten(-1, (-1, dim))
        for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    )
    q, k = rotate(rms_norm(q, q_gain, EPS), cos, sin), rotate(rms_norm(k, k_gain, EPS), cos, sin)
    write_kv(copy, k, v, paging.slots)
    wanted = paged_attention(q, copy, paging).flatten(1)

    counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
    found = fast_attention.decode(
        qkv, (q_gain, k_gain, EPS), cos, sin, cache.data[1], paging.slots, paging.tables,
        paging.lengths, counters,
        heads, tuned={"BLOCK": 16, "SPLITS": splits, "warps": 4, "soon": soon},
    )  # fmt: skip
    assert error(found, wanted) < ERROR[dtype]
    assert (
        error(cache.data[1], copy) < ERROR[dtype] / 3
    )  # the new keys and values, and nothing else
    assert not counters.any()


@both
def test_frame_attention(device: torch.device, dtype: torch.dtype) -> None:
    """Two positions first, then one after the other, against the plain pass over the same cache."""
    r = Random(device, dtype, 7)
    heads, kv_heads, dim, positions, rows = 4, 2, 32, 8, 3
    c = DecoderConfig(8, 64, 1, heads, kv_heads, dim, EPS, 1e4, None, positions, 8, None)
    plain, ours = (FrameCache(c, rows + 1, positions, device, dtype) for _ in range(2))
    q_gain, k_gain = r.gain(dim), r.gain(dim)
    angles = torch.randn(positions, dim // 2, generator=r.generator).repeat(1, 2).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for start, queries in [(0, 2), (2, 1), (3, 1), (4, 1)]:
        qkv = r(rows * queries, (heads + 2 * kv_heads) * dim)
        at = torch.arange(start, start + queries).repeat(rows).to(device)
        q, k, v = (
            t.unflatten(-1, (-1, dim))
            for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        )
        q, k = (
            rotate(rms_norm(q, q_gain, EPS), cos[at], sin[at]),
            rotate(rms_norm(k, k_gain, EPS), cos[at], sin[at]),
        )
        wanted = FramePass(plain, rows, start, queries)(0, q, k, v).flatten(1)
        found = fast_attention.frame(
            qkv, (q_gain, k_gain, EPS), cos, sin, ours.data[0], start, queries, heads
        )
        assert error(found, wanted) < ERROR[dtype]
    assert error(ours.data, plain.data) < ERROR[dtype]

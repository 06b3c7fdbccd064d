"""Float8 experts multiplied as they are, against the reference and beside the way that widens them: fresh random rows,
large ones, small ones, zeros and what is no number at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stretto.kernels import moe
from stretto.kernels.norm import rms_norm

fast_linear = pytest.importorskip("stretto.kernels.fast.linear")
fast_experts = pytest.importorskip("stretto.kernels.fast.experts")
fast_choice = pytest.importorskip("stretto.kernels.fast.experts_choice")
fast_many = pytest.importorskip("stretto.kernels.fast.experts_many")

Narrow = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
EPS = 1e-6
HIDDEN, EXPERTS, SIZE, TOP = 64, 8, 64, 2
NAN = float("nan")


@pytest.fixture
def weights(device: torch.device, narrow: Narrow) -> Any:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, torch.bfloat16)

    (gate_up, of_gate_up), (down, of_down) = (
        narrow(random(EXPERTS, 2 * SIZE, HIDDEN, scale=HIDDEN**-0.5)),
        narrow(random(EXPERTS, HIDDEN, SIZE, scale=SIZE**-0.5)),
    )
    return fast_experts.ExpertWeights(
        gain=1 + random(HIDDEN, scale=0.1),
        eps=EPS,
        router=random(EXPERTS, HIDDEN, scale=0.3),
        gate_up=gate_up,
        down=down,
        top_k=TOP,
        norm_topk=True,
        scales=(of_gate_up, of_down),
    )


def random_rows(device: torch.device, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, HIDDEN, generator=generator).to(device, torch.bfloat16)


def on_their_way(x: torch.Tensor, w: Any) -> Any:
    squares = (x.float() ** 2).view(len(x), 2, -1).sum(-1).T.contiguous()
    return fast_linear.Gained((x.float() * w.gain.float()).to(x.dtype), squares, EPS)


def added(x: torch.Tensor, w: Any) -> torch.Tensor:
    """What the kernels add to the residual stream for rows x: to zeros, so that no sum rounds it away."""
    found = torch.zeros_like(x)
    fast_many.mixture(found, on_their_way(x, w), w)
    return found.float()


def wanted(x: torch.Tensor, w: Any) -> torch.Tensor:
    """In float32, of the experts that the kernels choose: by logits, whose weights are all the same in a tiny row."""
    factor = torch.rsqrt(x.float().square().mean(1, keepdim=True) + EPS)
    logits = (fast_many.route(on_their_way(x, w), w).sum(0) * factor).to(x.dtype).float()
    ids = logits.topk(TOP).indices
    weights = torch.softmax(logits.gather(1, ids), 1).to(x.dtype)
    normed = rms_norm(x.float(), w.gain.float(), EPS)
    return moe.experts(normed, w.gate_up.float(), w.down.float(), weights.float(), ids, w.scales)


def errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row, relative."""
    return (found.double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By definition: (high + low / 16) and the scale [rows] that it is to be multiplied by, in float64."""
    wide = x.double()
    largest = x.float().abs().amax(1)
    scale = torch.where(largest > 0, torch.exp2(torch.frexp(largest)[1].double() - 8), 0.0)
    scale = scale.clamp_min(2.0**-126)[:, None]
    high = (wide / scale).to(torch.float8_e4m3fn).double()
    low = ((wide / scale - high) * 16).to(torch.float8_e4m3fn).double()
    return high + low / 16, scale[:, 0]


def test_two_float8_numbers_are_a_bfloat16_number(device: torch.device, weights: Any) -> None:
    """All that bfloat16 can hold within 2^-13 of a row's largest number, in rows of any size."""
    sizes = [1.0, 1e30, 1e-30, 1e-34, 0.0, 3e38, 1.5]
    x = torch.zeros(len(sizes), HIDDEN)
    generator = torch.Generator().manual_seed(1)
    for i, size in enumerate(sizes):
        spread = torch.exp2(-torch.randint(0, 13 if i < 6 else 40, (HIDDEN,), generator=generator))
        x[i] = (torch.rand(HIDDEN, generator=generator) * 0.5 + 0.5) * spread * size
        x[i, 0] = size
    x[:, 1::2] *= -1
    x = x.bfloat16().to(device)
    gained = fast_linear.Gained(x, torch.full((1, len(x)), HIDDEN * 1.0, device=device), 0.0)
    choice = fast_many.choose(fast_many.route(gained, weights), gained, weights)
    parts, scale = split(x)
    assert torch.allclose(choice.scales.double(), scale, rtol=1e-6, atol=0), "the norm's factor is 1 here"
    found = choice.planes.double()
    assert torch.equal(found[:, 0] + found[:, 1] / 16, parts)
    assert torch.equal((parts * scale[:, None])[:6], x.double()[:6]), "nothing is lost"
    assert (parts * scale[:, None] - x.double())[6].abs().max() <= 1.5 * 2.0**-21
    assert float(found.abs().max()) <= 256


def test_a_scale_says_what_float8_cannot(device: torch.device, weights: Any) -> None:
    x = random_rows(device, 5)
    x[0, 3], x[2, 63], x[3, 0] = NAN, float("inf"), -float("inf")
    gained = fast_linear.Gained(x, torch.ones(1, 5, device=device), EPS)
    choice = fast_many.choose(torch.zeros(1, 5, EXPERTS, device=device), gained, weights)
    assert choice.scales.isnan().tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("rows", [2, 8, 9, 32, 33, 128])
def test_as_good_as_widening(device: torch.device, weights: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ much in size do, too."""
    x = random_rows(device, rows)
    x *= torch.exp2(torch.arange(rows, device=device) % 25 - 12)[:, None].to(x.dtype)
    x[:, 5] *= 50  # an outlier, as some models have: the others must not lose by it
    assert routed(x, weights)[1].planes is not None
    reference = wanted(x, weights)
    native = errors(added(x, weights), reference)
    with monkeypatch.context() as m:
        m.setattr(fast_choice, "native", lambda x, w: False)
        assert routed(x, weights)[1].planes is None
        widened = errors(added(x, weights), reference)
    assert native.max() < 1.5 * widened.max()
    assert native.median() < 1.25 * widened.median()


def routed(x: torch.Tensor, w: Any) -> tuple[Any, Any, Any]:
    gained = on_their_way(x, w)
    return gained, fast_many.choose(fast_many.route(gained, w), gained, w), w


@pytest.mark.parametrize(
    ("cut", "block", "tile", "early"), [(32, 64, 8, 0), (64, 64, 16, 1), (64, 64, 8, 1), (64, 32, 16, 0)]
)
def test_any_cut_gives_the_same(
    device: torch.device, weights: Any, cut: int, block: int, tile: int, early: int
) -> None:
    """`down` goes through what `up` made in steps that are no larger than its blocks, whatever it was asked for."""
    x = random_rows(device, 12)
    gained, choice, w = routed(x, weights)
    h = fast_many.up(gained, choice, w, {"BN": block, "BK": 32, "warps": 4, "stages": 2, "BM": tile})
    assert h.scales.shape == (12, TOP, SIZE // block)
    found = torch.zeros_like(x)
    sizes = {"BN": 32, "BK": cut, "warps": 4, "stages": 2, "BM": tile, "early": early}
    fast_many.down(h, choice, w, found, tuned=sizes)
    assert errors(found.float(), added(x, weights)).max() < 5e-3


@pytest.mark.parametrize("size", [1e15, 1e-15])
def test_rows_of_any_size(device: torch.device, weights: Any, size: float) -> None:
    x = random_rows(device, 3)
    x[1] *= size
    assert errors(added(x, weights), wanted(x, weights)).max() < 1e-2


def test_a_row_of_zeros_stays_zeros(device: torch.device, weights: Any) -> None:
    x = random_rows(device, 3)
    x[1] = 0
    found = added(x, weights)
    assert not found[1].any()
    assert errors(found, wanted(x, weights))[[0, 2]].max() < 1e-2


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf"), 1e30], ids=["nan", "inf", "-inf", "overflow"])
@pytest.mark.parametrize("rows", [3, 20])
def test_what_is_no_number_shows_in_its_row_and_nowhere_else(
    device: torch.device, weights: Any, bad: float, rows: int
) -> None:
    x = random_rows(device, rows)
    without = added(x, weights)
    x[1, 7] = bad
    found = added(x, weights)
    if bad == 1e30:  # its squares are infinite, and its norm makes it zeros, as in the reference
        assert found[1].isfinite().all()
    else:
        assert not found[1].isfinite().any()
    others = torch.arange(rows) != 1
    assert torch.equal(found[others], without[others])


def test_products_that_are_too_large_for_bfloat16_show(device: torch.device, weights: Any) -> None:
    """In between: what `up` hands to `down` overflows for those who chose one expert."""
    x = random_rows(device, 9)
    _, ids = moe.route(fast_many.route(on_their_way(x, weights), weights).sum(0), TOP, True)
    expert = int(ids[0, 0])
    chose = (ids == expert).any(1)
    assert not chose.all()
    scales = weights.scales[0].clone()
    scales[expert] *= 1e30
    w = dataclasses.replace(weights, scales=(scales, weights.scales[1]))
    bad = fast_many.up(*routed(x, w)).scales.isnan()[..., 0]
    assert torch.equal(bad, torch.stack([(routed(x, w)[1].table == k)[expert] for k in range(TOP)], 1))
    found = added(x, w)
    assert not found[chose].isfinite().any()
    assert torch.equal(found[~chose], added(x, weights)[~chose])


def test_rows_together_are_what_they_are_alone(device: torch.device, weights: Any) -> None:
    x = random_rows(device, 40)
    together = added(x, weights)
    for start in range(0, 40, 10):
        alone = added(x[start : start + 2], weights)
        assert errors(alone, together[start : start + 2]).max() < 5e-3


def test_other_types_are_widened(device: torch.device, weights: Any) -> None:
    x = random_rows(device, 3)
    assert fast_choice.native(x, weights)
    assert not fast_choice.native(x.float(), weights)
    assert not fast_choice.native(x, dataclasses.replace(weights, scales=None))
    assert not fast_choice.native(F.pad(x, (0, 16)), weights), "the tensor cores take 32 inputs at a time"


WIDER = {"BN": 128, "BK": 128, "warps": 8, "stages": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("launch", [None, WIDER, WIDER | {"BM": 8, "early": 1}], ids=["default", "wider", "early"])
def test_real_sizes(device: torch.device, narrow: Narrow, rows: int, launch: dict[str, int] | None) -> None:
    g = torch.Generator(device).manual_seed(rows)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=g, device=device) * scale).to(torch.bfloat16)

    gate_up, of_gate_up = narrow(random(128, 2 * 768, 2048, scale=2048**-0.5))
    down, of_down = narrow(random(128, 2048, 768, scale=768**-0.5))
    gain, router = 1 + random(2048, scale=0.1), random(128, 2048, scale=0.02)
    w = fast_experts.ExpertWeights(gain, EPS, router, gate_up, down, 8, True, scales=(of_gate_up, of_down))
    x = random(rows, 2048, scale=1.0)
    gained, choice, _ = routed(x, w)
    ids = torch.stack([(choice.table == k).int().argmax(0) for k in range(8)], 1)
    normed = rms_norm(x.float(), gain.float(), EPS)
    reference = moe.experts(normed, gate_up, down, choice.weights, ids, w.scales)
    for _ in range(2):
        found = torch.zeros_like(x)
        fast_many.down(fast_many.up(gained, choice, w, launch), choice, w, found, tuned=launch)
        assert errors(found, reference).max() < 1e-2

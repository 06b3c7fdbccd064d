"""Float8 experts of many rows multiplied as they are: beside widening them, and against the plain version."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stretto.kernels import moe
from stretto.kernels.fast import grouped, grouped_float8, tuning
from stretto.kernels.fast.prefill import combine

Narrow = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Experts = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
ROWS, EXPERTS, TOP_K, HIDDEN, SIZE = 40, 4, 2, 128, 128
UP = {"M": 16, "N": 64, "K": 64, "num_warps": 4, "num_stages": 3}
LAUNCHES = [(UP, UP | {"M": 32}), (UP | {"M": 32, "N": 128}, UP | {"K": 128}), (UP, UP | {"K": 128})]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture
def weights(device: torch.device, narrow: Narrow) -> Experts:
    g = torch.Generator().manual_seed(5)
    shapes = ((EXPERTS, 2 * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE))
    wide = [(torch.randn(s, generator=g) * s[-1] ** -0.5).to(device, torch.bfloat16) for s in shapes]
    (gate_up, of_gate_up), (down, of_down) = map(narrow, wide)
    return gate_up, down, (of_gate_up, of_down)


def rows_of(device: torch.device, skewed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their logits. Skewed: all go to the same two experts, so the others have none."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(ROWS, HIDDEN, generator=g) * torch.exp2(torch.arange(ROWS) % 9 - 4)[:, None]
    logits = torch.stack([torch.randperm(EXPERTS, generator=g) for _ in range(ROWS)]).float()
    return x.to(device, torch.bfloat16), (logits[:1].repeat(ROWS, 1) if skewed else logits).to(device)


def routed_by(logits: torch.Tensor, count: int = ROWS) -> grouped.Routed:
    return grouped.route(logits, TOP_K, True, torch.tensor([count], dtype=torch.int32, device=logits.device))


@pytest.mark.parametrize(("up", "down"), LAUNCHES)
@pytest.mark.parametrize("skewed", [False, True])
def test_as_good_as_widening(
    up: dict[str, int], down: dict[str, int], skewed: bool, device: torch.device, weights: Experts
) -> None:
    gate_up, w_down, scales = weights
    x, logits = rows_of(device, skewed)
    routed = routed_by(logits)
    h = grouped_float8.gate_up(x, gate_up, routed, scales[0], up)
    native = grouped_float8.down(h, w_down, routed, scales[1], x.dtype, down)
    widened = grouped.down(grouped.gate_up(x, gate_up, routed, scale=scales[0]), w_down, routed, scale=scales[1])
    ids = routed.ids.long()
    one_by_one = torch.cat(
        [
            moe.experts(x.float(), gate_up.float(), w_down.float(), torch.ones(ROWS, 1, device=device), i, scales)
            for i in ids[:, :, None].unbind(1)
        ],
        1,
    ).view(ROWS * TOP_K, HIDDEN)
    assert error(native, one_by_one) < 1.5 * error(widened, one_by_one)


def test_rows_that_are_no_numbers_stay_alone(device: torch.device, weights: Experts) -> None:
    """Those behind the last real row are not looked at, and a bad one shows in its own choices."""
    gate_up, w_down, scales = weights
    x, logits = rows_of(device)
    x[30:], logits[30:] = float("nan"), float("nan")
    routed = routed_by(logits, 30)

    def run() -> torch.Tensor:
        h = grouped_float8.gate_up(x, gate_up, routed, scales[0], UP)
        return grouped_float8.down(h, w_down, routed, scales[1], x.dtype, UP)[: 30 * TOP_K].view(30, TOP_K, -1)

    fine = run()
    assert fine.isfinite().all()
    x[3, 5], x[7] = float("inf"), 0
    found = run()
    assert not found[3].isfinite().any()
    assert not found[7].any()
    others = [i for i in range(30) if i not in (3, 7)]
    assert torch.equal(found[others], fine[others])


@pytest.mark.parametrize("native", [0, 1])
def test_which_way_is_a_tuned_parameter(native: int, device: torch.device, weights: Experts) -> None:
    x, logits = rows_of(device)
    routed = routed_by(logits)
    name = f"prefill_experts_float8/{EXPERTS}x{HIDDEN}x{SIZE}x{grouped.per_expert(ROWS * TOP_K, EXPERTS)}"
    with tuning.instead({name: {"native": native}}) as asked:
        y = grouped_float8.experts(x, *weights[:2], routed, weights[2])
    assert any(a.kernel == "prefill_up_native" for a in asked.values()) == bool(native)
    gain, count = torch.ones(HIDDEN, device=device, dtype=x.dtype), torch.tensor([ROWS], dtype=torch.int32)
    total, _ = combine(torch.zeros_like(x), y, routed.weights, gain, 1e-6, count.to(device))
    chosen, ids = moe.route(logits, TOP_K, True)
    assert error(total, moe.experts(x.float(), weights[0].float(), weights[1].float(), chosen, ids, weights[2])) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 100, 512, 1000, 2500])
def test_real_sizes(rows: int, device: torch.device, narrow: Narrow) -> None:
    """At numbers of rows that take every default launch."""
    g = torch.Generator(device).manual_seed(rows)
    shapes = ((128, 2 * 768, 2048), (128, 2048, 768))
    wide = [(torch.randn(s, generator=g, device=device) * s[-1] ** -0.5).bfloat16() for s in shapes]
    (gate_up, of_gate_up), (w_down, of_down) = map(narrow, wide)
    x = torch.randn(rows, 2048, generator=g, device=device).bfloat16()
    logits = torch.rand(rows, 128, generator=g, device=device)
    routed = grouped.route(logits, 8, True, torch.tensor([rows], dtype=torch.int32, device=device))
    widened = grouped.down(grouped.gate_up(x, gate_up, routed, scale=of_gate_up), w_down, routed, scale=of_down)
    h = grouped_float8.gate_up(x, gate_up, routed, of_gate_up)
    native = grouped_float8.down(h, w_down, routed, of_down, x.dtype)
    assert error(native, widened) < 1e-2

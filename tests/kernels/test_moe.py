import pytest
import torch
import torch.nn.functional as F

from stretto.kernels.reference import moe
from stretto.layers.mlp import Experts
from tests.kernels.wide import dequantize

EXPERTS, HIDDEN, SIZE, TOP = 8, 16, 24, 3  # rows of 16 bytes, for the grouped product


def weights(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=g), torch.randn(
        EXPERTS, HIDDEN, SIZE, generator=g
    )


def one_by_one(x, gate_up, down, w, ids):
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for slot in range(TOP):
            e = int(ids[t, slot])
            gate, up = gate_up[e] @ x[t], None
            gate, up = gate[:SIZE], gate[SIZE:]
            out[t] += w[t, slot] * (down[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize(
    "rows", [1, 2, 5, 6, 64]
)  # both sides of the switch between gathering and sorting
def test_experts_equal_one_row_at_a_time(rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=g)
    gate_up, down = weights(rows)
    w, ids = moe.route(torch.randn(rows, EXPERTS, generator=g), TOP, norm=True)
    got = moe.experts(x, gate_up, down, w, ids)
    torch.testing.assert_close(got, one_by_one(x, gate_up, down, w, ids), atol=2e-5, rtol=1e-5)


def test_both_ways_agree() -> None:
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0))
    gate_up, down = weights(0)
    _, ids = moe.route(
        torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(1)), TOP, norm=True
    )
    few, ordered = moe._few(x, gate_up, down, ids), moe._sorted(x, gate_up, down, ids)
    torch.testing.assert_close(few, ordered, atol=1e-5, rtol=1e-5)


def quantized(seed: int) -> Experts:
    made = Experts(EXPERTS, HIDDEN, SIZE)
    for p, w in zip((made.gate_up, made.down), weights(seed), strict=True):
        p.copy_(w)
    made.quantize()
    return made


def wide(e: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    assert e.scales is not None
    return dequantize(e.gate_up, e.scales[0]), dequantize(e.down, e.scales[1])


@pytest.mark.parametrize("rows", [1, 5, 6, 64])
def test_float8_experts_equal_one_row_at_a_time_with_the_wide_weights(rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=g)
    e = quantized(rows)
    w, ids = moe.route(torch.randn(rows, EXPERTS, generator=g), TOP, norm=True)
    got = moe.experts(x, e.gate_up, e.down, w, ids, e.scales)
    want = one_by_one(x.double(), *(v.double() for v in wide(e)), w.double(), ids).float()
    torch.testing.assert_close(got, want, atol=2e-6 * want.abs().max().item(), rtol=0)
    exact = one_by_one(x, *weights(rows), w, ids)
    assert (got - exact).abs().max() > 1e-3  # and these are others than before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_all_ways_through_float8_experts_agree(rows: int, dtype: torch.dtype) -> None:
    e = quantized(3)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, ids = moe.route(
        torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(1)), TOP, norm=True
    )
    ways = [moe._few, moe._sorted] + [moe._grouped] * (dtype == torch.bfloat16)
    few, *others = (way(x, e.gate_up, e.down, ids, e.scales) for way in ways)
    assert few.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for other in others:
        torch.testing.assert_close(other, few, atol=tolerance * few.abs().max().item(), rtol=0)
    # A way that forgot a scale, or used another expert's, is far from it.
    exact = moe._sorted(x.float(), *wide(e), ids)
    torch.testing.assert_close(
        few.float(), exact, atol=tolerance * exact.abs().max().item(), rtol=0
    )


def test_route_renormalises_over_the_chosen() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    w, ids = moe.route(logits, 2, norm=True)
    assert ids.tolist() == [[0, 1]]
    assert w.sum().item() == pytest.approx(1.0)
    raw, _ = moe.route(logits, 2, norm=False)
    assert raw.sum().item() < 0.95
    assert (w[0, 0] / w[0, 1]).item() == pytest.approx((raw[0, 0] / raw[0, 1]).item())

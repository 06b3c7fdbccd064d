import pytest
import torch
import torch.nn.functional as F

from stretto.kernels import moe

EXPERTS, HIDDEN, SIZE, TOP = 8, 12, 10, 3


def weights(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, SIZE, generator=g)


def one_by_one(x, gate_up, down, w, ids):
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for slot in range(TOP):
            e = int(ids[t, slot])
            gate, up = gate_up[e] @ x[t], None
            gate, up = gate[:SIZE], gate[SIZE:]
            out[t] += w[t, slot] * (down[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 64])  # both sides of the switch between gathering and sorting
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
    _, ids = moe.route(torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(1)), TOP, norm=True)
    few, ordered = moe._few(x, gate_up, down, ids), moe._sorted(x, gate_up, down, ids)
    torch.testing.assert_close(few, ordered, atol=1e-5, rtol=1e-5)


def test_route_renormalises_over_the_chosen() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    w, ids = moe.route(logits, 2, norm=True)
    assert ids.tolist() == [[0, 1]]
    assert w.sum().item() == pytest.approx(1.0)
    raw, _ = moe.route(logits, 2, norm=False)
    assert raw.sum().item() < 0.95
    assert (w[0, 0] / w[0, 1]).item() == pytest.approx((raw[0, 0] / raw[0, 1]).item())

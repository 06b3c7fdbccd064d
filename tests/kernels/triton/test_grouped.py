from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stretto.kernels.reference import moe
from stretto.kernels.triton import grouped
from stretto.kernels.triton.prefill import combine

Narrow = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scalar(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def close(a: torch.Tensor, b: torch.Tensor, limit: float) -> None:
    error = float((a.float() - b.float()).norm() / b.float().norm())
    assert error < limit, f"relative error {error}"


def logits_for(
    kind: str, rows: int, experts: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Router logits without ties. `one`: all rows agree; `few`: some experts get nothing."""
    g = torch.Generator().manual_seed(rows)
    steps = torch.stack([torch.randperm(experts, generator=g) for _ in range(rows)]).float() / 8
    if kind == "one":
        steps = steps[:1].repeat(rows, 1)
    if kind == "few":
        steps[:, : experts // 2] -= 100
    return steps.to(device, dtype)


@pytest.mark.parametrize("kind", ["all", "one", "few"])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 8, 2), (50, 8, 6)])
def test_routing_and_sorting(
    kind: str,
    rows: int,
    experts: int,
    top_k: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped, "SCANS", (128, 128))  # several steps
    top_k = min(top_k, experts // 2) if kind == "few" else top_k
    logits = logits_for(kind, rows, experts, device, torch.bfloat16)
    got = grouped.route(logits, top_k, True, scalar(rows, device))
    weights, ids = moe.route(logits, top_k, True)
    assert torch.equal(got.ids.long(), ids)
    torch.testing.assert_close(
        got.weights, weights.float(), atol=4e-3, rtol=0
    )  # one step of bfloat16
    flat = ids.reshape(-1)
    assert torch.equal(got.order.long(), flat.argsort(stable=True))
    assert torch.equal(got.order[got.places.long()].long(), torch.arange(len(flat), device=device))
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    assert got.offsets.tolist() == [0, *ends.tolist()]


def test_routing_without_normalising(device: torch.device) -> None:
    logits = logits_for("all", 9, 8, device, torch.float32)
    got = grouped.route(logits, 3, False, scalar(9, device))
    torch.testing.assert_close(got.weights, moe.route(logits, 3, False)[0], atol=1e-6, rtol=0)


def test_padding_rows_go_nowhere(device: torch.device) -> None:
    logits = logits_for("all", 13, 8, device, torch.float32)
    alone = grouped.route(logits[:9], 2, True, scalar(9, device))
    logits[9:] = float("nan")
    got = grouped.route(logits, 2, True, scalar(9, device))
    assert torch.equal(got.offsets, alone.offsets)
    assert torch.equal(got.order[:18], alone.order)
    assert torch.equal(got.weights[:9], alone.weights)
    assert (got.ids[9:] == 8).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [True, False], ids=["whole row", "one score"])
def test_rows_that_are_no_numbers_have_their_places_too(
    device: torch.device, bad: float, whole: bool
) -> None:
    """Addresses are made from a row's places: none may be left as the memory was found. And it
    shows."""
    logits = logits_for("all", 9, 8, device, torch.float32)
    fine = [0, 1, 2, 3, 5, 6, 7, 8]
    alone = grouped.route(logits[fine], 3, True, scalar(8, device))
    logits[4, slice(None) if whole else 2] = bad
    got = grouped.route(logits, 3, True, scalar(9, device))
    assert ((got.ids >= 0) & (got.ids < 8)).all()
    assert sorted(got.order.tolist()) == list(range(27))
    assert torch.equal(got.order[got.places.long()].long(), torch.arange(27, device=device))
    assert int(got.offsets[-1]) == 27
    assert torch.equal(got.ids[fine], alone.ids)
    assert torch.equal(got.weights[fine], alone.weights)
    assert got.weights[4].isnan().any() == (whole or bad != float("-inf"))


LAUNCHES = [
    {"M": 16, "N": 16, "K": 32, "SWAP": 1, "HALF": 0, "num_warps": 4, "num_stages": 3},
    {"M": 32, "N": 32, "K": 16, "SWAP": 0, "HALF": 1, "num_warps": 4, "num_stages": 3},
]


def weights_for(
    experts: int, hidden: int, size: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    g = torch.Generator(device).manual_seed(size)
    shapes = ((experts, 2 * size, hidden), (experts, hidden, size))
    return [(torch.randn(s, generator=g, device=device) * s[-1] ** -0.5).to(dtype) for s in shapes]


@pytest.mark.parametrize(
    ("launch", "hidden", "size"), [(LAUNCHES[0], 48, 24), (LAUNCHES[1], 64, 32)]
)
@pytest.mark.parametrize("kind", ["all", "one", "few"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("float8", [False, True], ids=["wide", "float8"])
def test_experts_equal_the_plain_version(
    launch: dict[str, int],
    kind: str,
    hidden: int,
    size: int,
    dtype: torch.dtype,
    limit: float,
    float8: bool,
    device: torch.device,
    narrow: Narrow,
) -> None:
    rows, experts, top_k = 40, 4, 2  # so that a tile does not hold an expert's rows
    gate_up, down = weights_for(experts, hidden, size, device, dtype)
    of_gate_up = of_down = None
    if float8:
        (gate_up, of_gate_up), (down, of_down) = narrow(gate_up), narrow(down)
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    logits = logits_for(kind, rows, experts, device, dtype)
    routed = grouped.route(logits, top_k, True, scalar(rows, device))
    h = grouped.gate_up(x, gate_up, routed, launch, of_gate_up)
    y = grouped.down(h, down, routed, launch, of_down)
    norm = torch.ones(hidden, device=device, dtype=dtype)
    total, _ = combine(torch.zeros_like(x), y, routed.weights, norm, 1e-6, scalar(rows, device))
    weights, ids = moe.route(logits.float(), top_k, True)
    scales = None if of_gate_up is None or of_down is None else (of_gate_up, of_down)
    close(total, moe.experts(x.float(), gate_up.float(), down.float(), weights, ids, scales), limit)


def test_experts_of_padded_rows(device: torch.device) -> None:
    """Rows behind the last real one are never looked at, and the real ones come out the same
    bits."""
    gate_up, down = weights_for(8, 64, 32, device, torch.float32)
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(2)).to(device)
    logits = logits_for("all", 24, 8, device, torch.float32)
    x[19:], logits[19:] = float("nan"), float("nan")
    alone = grouped.route(logits[:19], 2, True, scalar(19, device))
    padded = grouped.route(logits, 2, True, scalar(19, device))
    launch = LAUNCHES[0]
    a = grouped.down(grouped.gate_up(x[:19], gate_up, alone, launch), down, alone, launch)
    b = grouped.down(grouped.gate_up(x, gate_up, padded, launch), down, padded, launch)
    assert torch.equal(a, b[: 19 * 2])


REAL = [(128, 8, 2048, 768), (128, 6, 1024, 384)]


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "top_k", "hidden", "size"), REAL)
def test_real_sizes(
    experts: int, top_k: int, hidden: int, size: int, device: torch.device, narrow: Narrow
) -> None:
    """Both ways of the product, at numbers of rows that take every default launch."""
    gate_up, down = weights_for(experts, hidden, size, device, torch.bfloat16)
    norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    for rows in (2, 16, 100, 300, 512, 1000, 2500):
        x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(
            device, torch.bfloat16
        )
        logits = logits_for("all", rows, experts, device, torch.float32)
        count = scalar(rows, device)
        routed = grouped.route(logits, top_k, True, count)
        weights, ids = moe.route(logits, top_k, True)
        want = moe.experts(x, gate_up, down, weights.bfloat16(), ids)
        ours = grouped.down(grouped.gate_up(x, gate_up, routed), down, routed)
        theirs = grouped.library_experts(x, gate_up, down, routed)
        for y, places in ((ours, None), (theirs, routed.places)):
            total, _ = combine(torch.zeros_like(x), y, routed.weights, norm, 1e-6, count, places)
            close(total, want, 1e-2)
        (gate_up8, of_gate_up), (down8, of_down) = narrow(gate_up), narrow(down)
        want = moe.experts(
            x,
            gate_up8.to(x.dtype),
            down8.to(x.dtype),
            weights.bfloat16(),
            ids,
            (of_gate_up, of_down),
        )
        y, _ = grouped.experts(x, gate_up8, down8, routed, (of_gate_up, of_down))
        total, _ = combine(torch.zeros_like(x), y, routed.weights, norm, 1e-6, count)
        close(total, want, 1e-2)

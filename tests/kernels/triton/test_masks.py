"""Biased and masked logits of the kernels are those of the references, bit for bit."""

from __future__ import annotations

import pytest
import torch

from stretto.kernels.reference.masks import bias_rows, floor_rows, mask_rows

fast = pytest.importorskip("stretto.kernels.triton.masks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_what_the_reference_does(device: torch.device, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(4)
    size, most = 3000, 300
    counts = torch.tensor([0, 1, 300, 129, 0, 7], dtype=torch.int32)
    ids = torch.stack([torch.randperm(size, generator=draw)[:most] for _ in counts])
    values = 10 * torch.randn(
        len(counts), most, generator=draw
    )  # those behind the count are of earlier requests
    rows = torch.tensor([5, 0, 3, 2])
    logits = torch.randn(len(rows), size, generator=draw).to(dtype)
    expected = logits.clone()
    for at, row in enumerate(rows.tolist()):
        for j in range(int(counts[row])):
            expected[at, ids[row, j]] += values[row, j].to(dtype)
    for add in (bias_rows, fast.bias_rows):
        ours = logits.clone().to(device)
        add(ours, *(t.to(device) for t in (rows, counts, ids, values)))
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("size", [70, 1920, 5000])
def test_the_kernel_forbids_what_the_reference_does(device: torch.device, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    bits = torch.randint(
        -(2**31), 2**31, (6, -(-size // 32)), generator=draw, dtype=torch.int64
    ).to(torch.int32)
    masked = torch.tensor([True, False, True, False, False, True])
    rows = torch.tensor([5, 1, 0, 3])
    logits = torch.randn(4, size, generator=draw)
    bits, masked, rows, logits = (t.to(device) for t in (bits, masked, rows, logits))
    plain, ours = logits.clone(), logits.clone()
    mask_rows(plain, rows, masked, bits)
    fast.mask_rows(ours, rows, masked, bits)
    assert torch.equal(plain, ours)
    for at, row in enumerate(rows.tolist()):
        allowed = [
            bool(int(bits[row, t // 32]) >> t % 32 & 1) or not masked[row] for t in range(size)
        ]
        assert torch.equal(plain[at].isfinite().cpu(), torch.tensor(allowed))
        assert torch.equal(
            plain[at][plain[at].isfinite()], logits[at][torch.tensor(allowed, device=device)]
        )


@pytest.mark.parametrize("size", [70, 5000])
def test_unlikely_tokens_are_left_out(device: torch.device, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    end = 3
    least = torch.tensor([0.2, 0.0, 0.5, 1.0, 0.1])
    temperature = torch.tensor([0.7, 1.0, 1.3, 0.9, 1.0])
    penalty = torch.tensor([1.0, 1.0, 1.4, 1.0, 1.2])
    seen = torch.rand(5, size, generator=draw) < 0.3
    ends = torch.tensor([0, 0, 0, 0, 50])  # the last row may not end yet, and would like to
    rows, positions = torch.tensor([4, 0, 1, 2, 3]), torch.full((5,), 10)
    logits = 3 * torch.randn(5, size, generator=draw)
    logits[0, end] = 50.0
    given = [t.to(device) for t in (rows, least, temperature, penalty, seen)]
    ours, plain = logits.to(device), logits.to(device)
    fast.floor_rows(ours, *given, (positions.to(device), ends.to(device), end))
    plain[0, end] = float("-inf")  # as it is held back there
    floor_rows(plain, *given)
    ours[0, end] = float("-inf")
    assert torch.equal(ours, plain)
    kept = plain.isfinite().sum(-1).tolist()
    assert kept[2] == size  # off
    assert kept[4] == 1  # only the best
    assert all(1 <= n < size for n in (kept[0], kept[1], kept[3]))

"""Masked logits of the kernel are those of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from stretto.kernels.masks import mask_rows

fast = pytest.importorskip("stretto.kernels.fast.masks")


@pytest.mark.parametrize("size", [70, 1920, 5000])
def test_the_kernel_forbids_what_the_reference_does(device: torch.device, size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    bits = torch.randint(-(2**31), 2**31, (6, -(-size // 32)), generator=draw, dtype=torch.int64).to(torch.int32)
    masked = torch.tensor([True, False, True, False, False, True])
    rows = torch.tensor([5, 1, 0, 3])
    logits = torch.randn(4, size, generator=draw)
    bits, masked, rows, logits = (t.to(device) for t in (bits, masked, rows, logits))
    plain, ours = logits.clone(), logits.clone()
    mask_rows(plain, rows, masked, bits)
    fast.mask_rows(ours, rows, masked, bits)
    assert torch.equal(plain, ours)
    for at, row in enumerate(rows.tolist()):
        allowed = [bool(int(bits[row, t // 32]) >> t % 32 & 1) or not masked[row] for t in range(size)]
        assert torch.equal(plain[at].isfinite().cpu(), torch.tensor(allowed))
        assert torch.equal(plain[at][plain[at].isfinite()], logits[at][torch.tensor(allowed, device=device)])

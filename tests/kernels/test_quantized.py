from __future__ import annotations

import pytest
import torch

from stretto.kernels.reference import quantized
from stretto.kernels.reference.quantized import FLOAT8, LARGEST, LEAST_SCALE, finite, quantize
from tests.kernels.wide import dequantize


def narrow(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, scale = torch.empty_like(weight, dtype=FLOAT8), torch.full(weight.shape[:-1], torch.nan)
    quantize(weight, out, scale)
    return out, scale


def spread(seed: int, *shape: int) -> torch.Tensor:
    """Rows of very different sizes, and in each row numbers of many."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randn(*shape[:-1], 1, generator=g) * 6
    return torch.randn(*shape, generator=g) * torch.exp2(
        sizes + 3 * torch.randn(*shape, generator=g)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_keeps_to_its_bound(dtype: torch.dtype) -> None:
    """Three bits behind the leading one: half a step is 1/16 of the number at most; below 2^-6
    steps are 2^-9 wide."""
    w = spread(0, 3, 40, 96).to(dtype)
    q, scale = narrow(w)
    assert q.dtype == FLOAT8
    assert scale.dtype == torch.float32
    wide, error = w.double(), (dequantize(q, scale) - w.float()).abs().double()
    bound = torch.maximum(wide.abs() / 16, scale.double()[..., None] / 1024)
    assert (error <= bound * (1 + 1e-6)).all()
    assert (error > bound * 0.9).any()  # no looser than it must be
    # Of the row's largest number: it is a number of the format, but for the scale's own rounding.
    assert torch.equal(q.float().abs().amax(-1), torch.full(scale.shape, LARGEST))
    torch.testing.assert_close(
        dequantize(q, scale).abs().amax(-1), w.float().abs().amax(-1), rtol=3e-7, atol=0
    )


def test_rounds_to_the_nearest_number_of_the_format() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].view(FLOAT8)
    format = codes.float()[codes.float().isfinite()].unique()
    w = torch.cat(
        (format, torch.rand(2000, generator=torch.Generator().manual_seed(1)) * 896 - 448)
    )[None]
    q, scale = narrow(w)
    assert scale.item() == 1
    nearest = (w[0, :, None] - format).abs().amin(-1)
    assert torch.equal((q.float() - w)[0].abs(), nearest)


def test_zero_rows_and_rows_at_the_ends_of_the_range() -> None:
    f = torch.finfo(torch.float32)
    tops = torch.tensor(
        [0.0, f.max, f.tiny, f.smallest_normal * 2**-20, f.tiny * 440, f.tiny * 450, 1e-30, 448.0]
    )
    w = tops[:, None] * torch.tensor([1.0, -0.5, 0.25, 0.0])
    q, scale = narrow(w)
    assert scale[0] == 1
    assert not q[0].float().any()
    assert (scale >= LEAST_SCALE).all()
    assert finite(scale)
    assert q.float().isfinite().all()
    wide = dequantize(q, scale)
    assert wide.isfinite().all()
    assert ((wide - w).abs() <= torch.maximum(w.abs() / 16, scale[:, None] / 1024)).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_in_the_scale_of_its_row_alone(bad: float) -> None:
    w = torch.ones(3, 5)
    w[1, 2] = bad
    _, scale = narrow(w)
    assert scale.isfinite().tolist() == [True, False, True]
    assert not finite(scale)


def test_parts_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    w = spread(2, 2, 9, 16)
    whole = narrow(w)
    for part in (1, 16 * 5):
        monkeypatch.setattr(quantized, "PART", part)
        for a, b in zip(narrow(w), whole, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_weights_are_left_as_they_are() -> None:
    w = spread(3, 4, 8)
    before = w.clone()
    narrow(w)
    assert torch.equal(w, before)

"""What 8 and 4 bits cost in accuracy: relative error of weights (Frobenius norm) by format, for
rows of several kinds.

    python -m bench kernels --parts rounding

Real checkpoints lie between the kinds: most rows nearly Gaussian, some with heavy tails or
outliers. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bench.harness.results import parser
from stretto.kernels.reference.quantized import FLOAT8, LARGEST, quantize

ROWS, INPUTS, GROUP = 1024, 2048, 128


def kinds() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    gauss = torch.randn(ROWS, INPUTS, generator=g)
    tails = gauss / (torch.randn(4, ROWS, INPUTS, generator=g).square().mean(0)).sqrt()
    outliers = gauss.clone()
    outliers[:, 0] = 20.0
    apart = gauss * torch.exp2(torch.linspace(-8, 8, ROWS))[:, None]
    return {
        "Gaussian": gauss,
        "Student's t, 4": tails,
        "one of 20 sigma": outliers,
        "rows of all sizes": apart,
    }


def float8_rows(w: torch.Tensor) -> torch.Tensor:
    q, scale = torch.empty_like(w, dtype=FLOAT8), torch.empty(len(w))
    quantize(w, q, scale)
    return q.float() * scale[..., None]


def float8_tensor(w: torch.Tensor) -> torch.Tensor:
    scale = w.abs().max() / LARGEST
    return (w / scale).to(FLOAT8).float() * scale


def integers(largest: int, group: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(w: torch.Tensor) -> torch.Tensor:
        parts = w.view(len(w), -1, group)
        step = parts.abs().amax(-1, keepdim=True) / largest
        return ((parts / step).round() * step).view_as(w)

    return rounded


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3, scale per row": float8_rows,
    "e4m3, scale per tensor": float8_tensor,
    "int8, scale per row": integers(127, INPUTS),
    f"int4, scale per {GROUP}": integers(7, GROUP),
}


def error(w: torch.Tensor, rounded: torch.Tensor) -> float:
    """Mean over rows, so that large rows do not hide small ones."""
    return float(((rounded - w).norm(dim=-1) / w.norm(dim=-1)).mean())


def main(given: Sequence[str]) -> int:
    parser("kernels --parts rounding", __doc__, out=False).parse_args(given)
    weights = kinds()
    print(f"{'':24}" + "".join(f"{kind:>20}" for kind in weights))
    for name, rounded in FORMATS.items():
        print(
            f"{name:24}"
            + "".join(f"{100 * error(w, rounded(w)):18.1f} %" for w in weights.values())
        )
    return 0

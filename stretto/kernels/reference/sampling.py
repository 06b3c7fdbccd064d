"""Picking tokens on the device.

One row of logits per request, each with its own parameters. A sampled token is `argmax(p / e)` with
e exponential noise (the same as drawing from p). The noise is a hash of (request seed, draw number,
token id), so a request's draws depend on the request alone: not on its batch, its row or the
device's generator. Nothing synchronises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from stretto.types import SamplingParams

Noise = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(seeds [rows], draw numbers [rows], vocabulary size) -> exponential noise [rows, vocabulary],
float32."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Sampling parameters of the rows of a batch, on the device."""

    temperature: torch.Tensor  # [rows] float32; 0: greedy
    top_k: torch.Tensor  # [rows] int64; 0: off
    top_p: torch.Tensor  # [rows] float32
    penalty: torch.Tensor  # [rows] float32: repetition penalty
    seed: torch.Tensor  # [rows] int64
    all_greedy: bool  # host knowledge: no row draws
    any_penalty: bool  # host knowledge: some row has a repetition penalty

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingRows:
        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            penalty=column([p.repetition_penalty for p in params], torch.float32),
            seed=torch.tensor([signed(p.seed) for p in params], dtype=torch.int64, device=device),
            all_greedy=all(p.greedy for p in params),
            any_penalty=any(p.repetition_penalty != 1.0 for p in params),
        )


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    draw: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    suppress: torch.Tensor | None = None,
    noise: Noise | None = None,
) -> torch.Tensor:
    """One token per row of logits [rows, vocabulary].

    `draw` [rows] numbers the draws of each request. `seen` [rows, vocabulary] marks the tokens that
    the repetition penalty applies to; `suppress` [vocabulary] marks tokens that must never be
    picked."""
    scores = logits.float()
    if seen is not None and rows.any_penalty:
        penalty = rows.penalty[:, None]
        scores = torch.where(
            seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores
        )
    if suppress is not None:
        scores = scores.masked_fill(suppress, float("-inf"))
    best = scores.argmax(-1)
    if rows.all_greedy:
        return best
    greedy = rows.temperature == 0
    warm = scores / torch.where(greedy, 1.0, rows.temperature)[:, None]
    probs = torch.softmax(_truncate(warm, rows.top_k, rows.top_p), -1)
    waiting = (noise or counter_noise)(rows.seed, draw, logits.shape[-1])
    return torch.where(greedy, best, (probs / waiting).argmax(-1))


def _truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the top_k best (and ties with the last of them), then the smallest set that holds top_p
    of the rest."""
    size = scores.shape[-1]
    rising, order = scores.sort(dim=-1, stable=True)  # among ties, the first go first
    top_count = torch.where(top_k == 0, size, top_k.clamp(max=size))
    floor = rising.gather(-1, (size - top_count)[:, None])
    rising = rising.masked_fill(rising < floor, float("-inf"))
    drop = rising.softmax(-1).cumsum(-1) <= (1.0 - top_p)[:, None]
    drop = drop & (top_p < 1.0)[:, None]
    drop[:, -1] = False
    drop = drop | (rising == float("-inf"))
    return scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))


def counter_noise(seed: torch.Tensor, draw: torch.Tensor, size: int) -> torch.Tensor:
    """Exponential noise [rows, size] as a hash of seed, draw number and index."""
    if not seed.is_cuda:
        return _noise_on_host(seed, draw, size)
    start = _mix(_mix(seed) + draw * _GOLDEN)[:, None]
    bits = _mix(start + torch.arange(size, device=seed.device) * _GOLDEN)
    uniform = ((bits >> 40) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    uniform.clamp_(
        max=1 - 2.0**-24
    )  # the largest rounds up to 1: no noise at all, and 0 / 0 for a dropped token
    return uniform.log_().neg_()


def _noise_on_host(seed: torch.Tensor, draw: torch.Tensor, size: int) -> torch.Tensor:
    """The same by numpy, whose small operations cost a fraction: a frame of speech has 16 draws."""
    start = _mix_unsigned(
        _mix_unsigned(seed.numpy().view(np.uint64)) + draw.numpy().view(np.uint64) * _UNSIGNED[0]
    )
    bits = _mix_unsigned(start[:, None] + _steps(size))
    uniform = torch.from_numpy((bits >> np.uint64(40)).astype(np.float32)).add_(0.5).mul_(2.0**-24)
    uniform.clamp_(max=1 - 2.0**-24)
    return uniform.log_().neg_()


@cache
def _steps(size: int) -> npt.NDArray[np.uint64]:
    return np.arange(size, dtype=np.uint64) * _UNSIGNED[0]


def _mix_unsigned(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> _UNSIGNED[3])) * _UNSIGNED[1]
    x = (x ^ (x >> _UNSIGNED[4])) * _UNSIGNED[2]
    return x ^ (x >> _UNSIGNED[5])


def signed(x: int) -> int:
    """The 64-bit pattern of x as a signed integer (torch has no full set of uint64 operations)."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = signed(0x9E3779B97F4A7C15)
_MIX1 = signed(0xBF58476D1CE4E5B9)
_MIX2 = signed(0x94D049BB133111EB)
_UNSIGNED = tuple(
    np.uint64(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31)
)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser: every input bit reaches every output bit. Integer overflow
    wraps."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift right of a signed tensor."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def guarded(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Tokens, with -1 where the logits are not numbers any more. (One may be -inf: forbidden on
    purpose.)"""
    fine = logits.amax(-1, keepdim=True).isfinite()
    return torch.where(fine, tokens, -1)

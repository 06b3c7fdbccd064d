"""How large models are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from stretto.models.weights import build


def estimate(
    factories: Mapping[str, Callable[[], nn.Module]], dtype: torch.dtype
) -> dict[str, int]:
    """Bytes of each stage's weights and buffers, without allocating any."""
    sizes = {}
    for stage, factory in factories.items():
        module = build(factory, "meta", dtype)
        sizes[stage] = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    return sizes


def shapes_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Of names and shapes of tensors, in any order."""
    lines = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]

"""Layers with chosen weights, and how near two results are."""

from __future__ import annotations

import dataclasses

import torch

from stretto.layers.config import DecoderConfig, MoeConfig

DENSE = DecoderConfig(64, 64, 2, 4, 2, 32, 1e-6, 1e4, None, 256, 96, None)


MOE = dataclasses.replace(
    DENSE,
    num_kv_heads=1,
    mrope_section=(6, 5, 5),
    dense_size=None,
    moe=MoeConfig(8, 2, 32, True, None),
)


def filled(module: torch.nn.Module, device: torch.device, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        values = torch.randn(p.shape, generator=generator)
        p.data.copy_((1 + 0.1 * values) if "norm" in name else values * p.shape[-1] ** -0.5)
    for name, b in module.named_buffers():
        if name.endswith("_scale"):  # of float8 weights
            b.copy_(0.5 + torch.rand(b.shape, generator=generator))


def close(found: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-4) -> bool:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm()) < limit

"""Random weights, of sizes at which activations stay finite and of order one through all layers,
and no part of a model is so quiet that a mistake in it would not show.

`fill_dummy` fills a module that is served without a checkpoint's weights; tiny checkpoints are
written with the same distributions (`stretto.testing`)."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import nn

from stretto.kernels.reference.packed import PackedWeight
from stretto.kernels.reference.quantized import FLOAT8
from stretto.layers.linear import PackedLinear
from stretto.layers.mlp import Experts, PackedExperts
from stretto.layers.targets import Float8Rows, Target, targets

Shape = tuple[int, ...]


@torch.no_grad()
def fill_dummy(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Random weights, drawn on the module's device; the same for the same seed and kind of device.
    Narrow ones are drawn as wide as the others, and quantised layer by layer.

    `prefix` is the module's own in the checkpoint, for a module too small to tell its kind from its
    names."""
    views: dict[int, list[tuple[Target, tuple[float, float]]]] = defaultdict(list)
    for name, into in targets(module, prefix).items():
        views[_storage(into)].append((into, spread(name, tuple(into.shape))))
    whole: dict[int, Target] = {_storage(p): p for p in module.parameters()}
    for part in module.modules():
        if isinstance(part, Experts | PackedExperts):
            whole |= {_storage(rows): rows for rows in part.rows()}
        elif isinstance(part, PackedLinear):
            whole[_storage(part.weight)] = part.weight
    generators = {p.device: torch.Generator(p.device).manual_seed(seed) for p in whole.values()}
    dtype = next(p.dtype for p in module.parameters() if p.dtype != FLOAT8)
    for storage, parts in views.items():
        # All experts of a layer are views of one parameter: one launch instead of hundreds.
        if len({sizes for _, sizes in parts}) == 1:
            parts = [(whole[storage], parts[0][1])]
        for into, (mean, std) in parts:
            if isinstance(into, Float8Rows | PackedWeight):
                wide = torch.empty(into.shape, dtype=dtype, device=into.device)
                into.fill(wide.normal_(mean, std, generator=generators[into.device]))
            else:
                into.normal_(mean, std, generator=generators[into.device])


def _storage(t: Target) -> int:
    if isinstance(t, PackedWeight):
        return t.codes.untyped_storage().data_ptr()
    return (t.weight if isinstance(t, Float8Rows) else t).untyped_storage().data_ptr()


def spread(name: str, shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a random tensor's entries, by its checkpoint name (with or
    without the stage's prefix). Matrices keep the variance of what passes through them."""
    mean, std = 0.0, 0.1  # biases
    if name.endswith(("scale", "gamma")):
        mean, std = 0.5, 0.1
    elif name.endswith("cluster_usage"):
        mean, std = 1.0, 0.1  # codebooks are stored as sums, and divided by this
    elif name.endswith(("alpha", "beta")):
        std = 0.3
    elif len(shape) == 1 and name.endswith("weight"):  # norms
        # queries: attention that picks
        mean = 2.0 if name.endswith("q_norm.weight") else 1.0
        std = 0.2
    elif "embed_tokens" in name:
        std = 0.5  # an answer depends more on all that was said than on the last word
    elif "codec_embedding" in name:
        std = 0.25  # sixteen of them are summed in a talker row
    elif "embed" in name and "patch_embed" not in name:
        std = 1.0
    elif len(shape) > 1:
        std = 1.0 / math.sqrt(_fan_in(name, shape))
    if "text_projection" in name and len(shape) > 1:
        # its input is small and SiLU halves it; a text row should weigh as much as a frame's codes
        std *= 2.0
    if name.endswith("conv2.conv.weight"):
        std *= 0.3  # twelve residual units in a row: keep their sum from growing
    if "decoder.6.conv." in name:
        std *= 0.04  # the waveform stays well inside (-1, 1), where the final clamp hides nothing
    return mean, std


def _fan_in(name: str, shape: Shape) -> int:
    """How many products one output sums. Transposed convolutions are [in, out, kernel], with two or
    one taps."""
    if ".block.1.conv." in name and "encoder.layers." not in name:
        return 2 * shape[0]
    if "upsample." in name and ".0.conv." in name:
        return shape[0]
    return math.prod(shape[1:])

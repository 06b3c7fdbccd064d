"""Where a checkpoint's tensors go.

A module's parameters carry the checkpoint's names, except where several checkpoint tensors are fused into one
parameter (q/k/v, gate/up, experts). Such a module defines `fused(prefix)`, which maps checkpoint names to views
of its parameters. The loader only ever sees the flat map that `targets` makes: checkpoint name -> view to fill."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Fused(Protocol):
    def fused(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> view of a parameter of this module. `prefix` is the *parent's* ("...self_attn.")."""
        ...


def targets(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Checkpoint tensor name -> destination view, for all parameters of `module`."""
    found: dict[str, torch.Tensor] = {}
    for name, p in module.named_parameters(recurse=False):
        found[f"{prefix}{name}"] = p.data
    for name, child in module.named_children():
        part = child.fused(prefix) if isinstance(child, Fused) else targets(child, f"{prefix}{name}.")
        found.update(part)
    return found


def frozen(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of the current default device and dtype."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)

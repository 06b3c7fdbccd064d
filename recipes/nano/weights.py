"""Trained parts as files, in the type that is shipped. Called by the training steps."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def save(module: nn.Module, path: Path) -> None:
    save_file(
        {
            k: v.detach().to(torch.bfloat16).cpu().contiguous()
            for k, v in module.state_dict().items()
        },
        path,
    )


def load(module: nn.Module, path: Path) -> None:
    """Into the module, where it is. After `save`: it then computes with what is shipped."""
    module.load_state_dict({k: v.float() for k, v in load_file(path).items()})

"""The library compressed-tensors as an oracle of its own layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def library_config(folder: Path) -> Any:
    """`quantization_config`, as the library reads it."""
    pytest.importorskip("compressed_tensors", reason="`make setup-test` installs it")
    from compressed_tensors.quantization import QuantizationConfig

    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    others = ("sparsity_config", "transform_config")  # which it takes apart itself
    return QuantizationConfig.model_validate({k: v for k, v in raw.items() if k not in others})


def decompressed(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensors, set[str]]:
    """The wide weights, as the library makes them of scales of this type; and the names of those
    that were quantised."""
    config = library_config(folder)
    from compressed_tensors.compressors import BaseCompressor

    [scheme] = config.config_groups.values()
    reader = BaseCompressor.get_value_from_registry(config.format)
    stems: dict[str, Tensors] = {}
    wide: Tensors = {}
    tensors = read(folder)
    for name, t in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if f"{stem}.weight_scale" in tensors:
            stems.setdefault(stem, {})[suffix] = t
        else:
            wide[name] = t
    for stem, parts in stems.items():
        parts["weight_scale"] = parts["weight_scale"].to(dtype)
        wide[f"{stem}.weight"] = reader.decompress(parts, scheme)["weight"]
    return wide, {f"{stem}.weight" for stem in stems}

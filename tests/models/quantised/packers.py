"""Checkpoints in the layouts of the tools that quantise: the numbers of each matrix, its tensors,
and what they stand for. Independent of the package's own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""Tensors by suffix, and the wide matrix in float32."""

THINKER = r"thinker\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.experts\.\d+\.\w+_proj)"
PROJECTIONS = r"talker\.(text|hidden)_projection\.linear_fc[12]"
TALKER = (
    r"talker\.(model|code_predictor\.model)\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)"
)


def words(u: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Numbers from 0 on [o, i] -> int32 [o, i * bits / 32], lowest bits first."""
    count = 32 // bits
    x = (u.long().reshape(len(u), -1, count) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)


def integers(
    w: torch.Tensor, group: int, bits: int = 4, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes and scales; every third scale is negative, as AutoRound makes them."""
    high = (1 << bits - 1) - 1
    r = w.float().view(len(w), -1, group)
    s = (r.abs().amax(-1) / (high + 0.5)).clamp_min(1e-6).to(dtype)
    q = torch.clamp(torch.round(r / s.float()[..., None]), -high - 1, high)
    turned = (q > -high - 1).all(-1) & (torch.arange(q[..., 0].numel()).view(s.shape) % 3 == 0)
    sign = torch.where(turned, -1, 1)
    return (q * sign[..., None]).view(w.shape).int(), (s * sign).to(dtype)


def spread(s: torch.Tensor, group: int) -> torch.Tensor:
    return s.float().repeat_interleave(group, -1)


def pack_quantized(group: int = 32, bits: int = 4) -> Callable[[torch.Tensor], Packed]:
    """A, symmetric."""

    def pack(w: torch.Tensor) -> Packed:
        q, s = integers(w, group, bits)
        tensors = {
            "weight_packed": words(q + (1 << bits - 1), bits),
            "weight_scale": s,
            "weight_shape": torch.tensor(w.shape),
        }
        return tensors, q * spread(s, group)

    return pack


def pack_asymmetric(group: int = 32, bits: int = 4) -> Callable[[torch.Tensor], Packed]:
    """A with zero points, which are packed along the outputs."""

    def pack(w: torch.Tensor) -> Packed:
        levels, half = (1 << bits) - 1, 1 << bits - 1
        r = w.float().view(len(w), -1, group)
        low, high = r.amin(-1).clamp_max(0), r.amax(-1).clamp_min(0)
        s = ((high - low) / levels).clamp_min(1e-6).to(torch.bfloat16)
        z = torch.clamp(torch.round(-low / s.float()), 0, levels)
        u = torch.clamp(torch.round(r / s.float()[..., None]) + z[..., None], 0, levels)
        rows = torch.nn.functional.pad(z, (0, 0, 0, -len(z) % (32 // bits)), value=half)
        tensors = {
            "weight_packed": words(u.view(w.shape), bits),
            "weight_scale": s,
            "weight_zero_point": words(rows.T.contiguous(), bits).T.contiguous(),
            "weight_shape": torch.tensor(w.shape),
        }
        return tensors, (u - z[..., None]).view(w.shape) * spread(s, group)

    return pack


def pack_gptq(
    group: int = 32, word: int = 0x77777777, order: bool = False
) -> Callable[[torch.Tensor], Packed]:
    """B."""

    def pack(w: torch.Tensor) -> Packed:
        q, s = integers(w, group, dtype=torch.float16)
        o, i = w.shape
        signed = word if word < 2**31 else word - 2**32
        tensors = {
            "qweight": words(q + 8).T.contiguous(),
            "qzeros": torch.full((i // group, o // 8), signed, dtype=torch.int32),
            "scales": s.T.contiguous(),
        }
        if order:
            tensors["g_idx"] = (torch.arange(i) // group).int()
        return tensors, q * spread(s, group)

    return pack


def pack_blocks(
    block: int = 32, name: str = "weight_scale_inv", inverse: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[[torch.Tensor], Packed]:  # fmt: skip
    """C; the last blocks may be partial."""

    def pack(w: torch.Tensor) -> Packed:
        o, i = w.shape
        s = torch.ones(-(-o // block), -(-i // block))
        for r in range(len(s)):
            for c in range(s.shape[1]):
                part = w[r * block : (r + 1) * block, c * block : (c + 1) * block]
                s[r, c] = part.abs().max() / 448 if part.any() else 1.0
        stored = (1 / s if inverse else s).to(dtype)
        used = 1 / stored.float() if inverse else stored.float()
        each = used.repeat_interleave(block, 0)[:o].repeat_interleave(block, 1)[:, :i]
        q = (w / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": q, name: stored}, q.float() * each

    return pack


def pack_rows(dtype: torch.dtype = torch.bfloat16) -> Callable[[torch.Tensor], Packed]:
    """D."""

    def pack(w: torch.Tensor) -> Packed:
        largest = w.abs().amax(1, keepdim=True)
        s = torch.where(largest > 0, largest / 448, 1.0).to(dtype)
        q = (w / s.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": q, "weight_scale": s}, q.float() * s.float()

    return pack


# ---- configs as the tools write them


def compressed(weights: dict[str, Any], form: str, activations: object = None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "ignore": ["thinker.lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def config_a(bits: int = 4, group: int = 32, symmetric: bool = True) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group",
        "group_size": group, "dynamic": False, "actorder": None,
    }  # fmt: skip
    return compressed(weights, "pack-quantized")


CONFIG_AUTOROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "block_name_to_quantize": "thinker.model.layers",
    "extra_config": {r".*thinker\.model\.layers\.0\.mlp\.gate.*": {"bits": 16}},
}
CONFIG_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
    "checkpoint_format": "gptq_v2",
}  # fmt: skip
CONFIG_FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [32, 32], "modules_to_not_convert": ["thinker.lm_head"],
}  # fmt: skip
_DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True}
CONFIG_BLOCKS = compressed(
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block",
     "block_structure": [32, 32], "dynamic": False},
    "float-quantized", {**_DYNAMIC, "strategy": "group", "group_size": 32},
)  # fmt: skip
CONFIG_ROWS = compressed(
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    "float-quantized",
    {**_DYNAMIC, "strategy": "token"},
)


@dataclass(frozen=True, slots=True)
class QuantisedCase:
    pack: Callable[[torch.Tensor], Packed]
    config: dict[str, Any]
    names: tuple[str, ...] = (THINKER,)  # patterns of the matrices
    says: str = ""  # of the format


FP8 = "FP8, blocks of 32 x 32"
INT8 = "int8, groups of 32"
CASES: dict[str, QuantisedCase] = {
    "A": QuantisedCase(pack_quantized(), config_a(), says="int4, groups of 32"),
    "A asymmetric": QuantisedCase(
        pack_asymmetric(), config_a(symmetric=False), says="int4, groups of 32, with zero points"
    ),
    "A 8 bits": QuantisedCase(pack_quantized(bits=8), config_a(8), says=INT8),
    "A asymmetric, 8 bits": QuantisedCase(
        pack_asymmetric(bits=8), config_a(8, symmetric=False), says=f"{INT8}, with zero points"
    ),
    "A, talker too": QuantisedCase(
        pack_quantized(8), config_a(group=8), (THINKER, TALKER, PROJECTIONS), "int4, groups of 8"
    ),
    "B AutoRound": QuantisedCase(pack_gptq(), CONFIG_AUTOROUND, says="int4, groups of 32"),
    "B GPTQ": QuantisedCase(
        pack_gptq(word=0x88888888, order=True), CONFIG_GPTQ, says="int4, groups of 32"
    ),
    # its model-free mode: projections too, which have biases
    "B AutoRound, talker too": QuantisedCase(
        pack_gptq(8),
        {**CONFIG_AUTOROUND, "group_size": 8},
        (THINKER, TALKER, PROJECTIONS),
        "int4, groups of 8",
    ),
    "C": QuantisedCase(pack_blocks(), CONFIG_FP8, (THINKER, TALKER), FP8),
    "C reciprocal": QuantisedCase(
        pack_blocks(inverse=True, dtype=torch.bfloat16), CONFIG_FP8, (THINKER, TALKER), FP8
    ),
    "C compressed-tensors": QuantisedCase(
        pack_blocks(name="weight_scale", dtype=torch.bfloat16), CONFIG_BLOCKS, says=FP8
    ),
    "D": QuantisedCase(pack_rows(), CONFIG_ROWS, says="FP8, a scale per row"),
}


@dataclass(slots=True)
class Written:
    """A quantised checkpoint, and one of the same numbers in float32."""

    directory: Path
    wide: Path
    values: Tensors = field(default_factory=dict)  # of the quantised matrices


def write(source: Path, folder: Path, case: QuantisedCase) -> Written:
    import re

    pattern = re.compile("|".join(f"(?:{n})" for n in case.names) + r"$")
    found = Written(folder / "packed", folder / "wide")
    for directory in (found.directory, found.wide):
        skip = shutil.ignore_patterns("model*.safetensors", "*.index.json")
        shutil.copytree(source, directory, ignore=skip)
    packed, wide = {}, {}
    for file in sorted(source.glob("*.safetensors")):
        for name, w in load_file(file).items():
            stem = name.removesuffix(".weight")
            packed[name] = wide[name] = w
            if stem != name and pattern.fullmatch(stem):
                if stem.endswith("experts.1.down_proj"):
                    w[:, :32] = 0  # groups, and blocks, of zeros alone
                tensors, value = case.pack(w)
                del packed[name]
                packed |= {f"{stem}.{suffix}": t for suffix, t in tensors.items()}
                wide[name] = found.values[name] = value.contiguous()
    save_file(wide, found.wide / "model.safetensors", {"format": "pt"})
    save_shards(packed, found.directory)
    set_config(found.directory, case.config)
    return found


def save_shards(tensors: Tensors, directory: Path, count: int = 2) -> None:
    """The parts of a matrix may lie in different files."""
    names = sorted(tensors)
    index = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {n: tensors[n].contiguous() for n in names[i::count]}
        save_file(part, directory / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def set_config(directory: Path, quantization: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))

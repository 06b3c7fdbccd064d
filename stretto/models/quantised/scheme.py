"""How `stretto quantize` stores a matrix: which tensors it writes, and what it says of them in
`config.json`, both in the layout of compressed-tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stretto.errors import CheckpointError, Invalid
from stretto.kernels.formats import WeightFormat
from stretto.models.checkpoint import StoredTensor
from stretto.models.quantised.recognise import FLOATS

SchemeName = Literal["int4", "fp8-block", "fp8-row"]
GROUP = 32
BLOCK = 128
PER_WORD = 8  # int4 numbers in an int32

Entry = tuple[str, str, tuple[int, ...]]
"""A tensor that is to be written: its name, dtype and shape."""


@dataclass(frozen=True, slots=True)
class Scheme:
    name: SchemeName
    group: int = GROUP
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.name != "int4" and self.group != GROUP:
            raise Invalid(f"--group-size is of int4; {self.name} has none", "group_size")
        if self.name != "int4" and not self.symmetric:
            raise Invalid(f"--asymmetric is of int4; {self.name} has no zero points", "asymmetric")
        if self.group < PER_WORD or self.group % PER_WORD:
            raise Invalid(
                f"--group-size must be a multiple of {PER_WORD}, got {self.group}", "group_size"
            )

    def format_for(self, stored: StoredTensor) -> WeightFormat:
        """Refuses what cannot be stored in this way."""
        if stored.dtype not in FLOATS or len(stored.shape) != 2:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name}: is {stored.dtype} {list(stored.shape)} "
                f"instead of a matrix of wide numbers"
            )
        if self.name == "int4":
            if stored.shape[1] % self.group:
                raise Invalid(
                    f"--group-size {self.group} does not divide the {stored.shape[1]} inputs of "
                    f"{stored.name}",
                    "group_size",
                )
            return WeightFormat(
                "int4", self.group, symmetric=self.symmetric, scale_dtype=FLOATS[stored.dtype]
            )
        # Scales of float8 matrices of small weights are below what float16 holds.
        dtype = "bfloat16" if stored.dtype == "BF16" else "float32"
        block = (0, 1) if self.name == "fp8-row" else (BLOCK, BLOCK)
        return WeightFormat("float8", *block, scale_dtype=dtype)

    def entries(self, stored: StoredTensor) -> list[Entry]:
        """The tensors that replace a wide one."""
        form, (outputs, inputs) = self.format_for(stored), stored.shape
        stem = stored.name.removesuffix(".weight")
        scale_dtype = next(k for k, v in FLOATS.items() if v == form.scale_dtype)
        if form.kind == "float8":
            blocks = (outputs, 1) if form.per_row else (-(-outputs // BLOCK), -(-inputs // BLOCK))
            return [
                (f"{stem}.weight", "F8_E4M3", (outputs, inputs)),
                (f"{stem}.weight_scale", scale_dtype, blocks),
            ]
        groups = inputs // form.group
        made: list[Entry] = [
            (f"{stem}.weight_packed", "I32", (outputs, inputs // PER_WORD)),
            (f"{stem}.weight_scale", scale_dtype, (outputs, groups)),
            (f"{stem}.weight_shape", "I64", (2,)),
        ]
        if not form.symmetric:
            made.append((f"{stem}.weight_zero_point", "I32", (-(-outputs // PER_WORD), groups)))
        return made

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`. `ignored`: the linear maps that stay wide."""
        integers = self.name == "int4"
        group = {
            "targets": ["Linear"],
            "weights": self._weights(),
            "input_activations": None if integers else self._activations(),
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if integers else "float-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
            "ignore": list(ignored),
            "config_groups": {"group_0": group},
        }

    def _weights(self) -> dict[str, Any]:
        options: dict[SchemeName, dict[str, Any]] = {
            "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group},
            "fp8-block": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
            "fp8-row": {"strategy": "channel"},
        }
        usual = {
            "num_bits": 8,
            "type": "float",
            "group_size": None,
            "block_structure": None,
            "actorder": None,
        }
        return {**usual, **options[self.name], "symmetric": self.symmetric, "dynamic": False}

    def _activations(self) -> dict[str, Any]:
        """What other engines may do with activations; Stretto leaves them as they are."""
        by: dict[str, Any] = {"strategy": "token", "group_size": None}
        if self.name == "fp8-block":
            by = {"strategy": "group", "group_size": BLOCK}
        return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, **by}

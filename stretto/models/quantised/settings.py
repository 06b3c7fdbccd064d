"""A checkpoint's `quantization_config`: what its tensors do not show, and grounds to refuse it.

Tools write it into `config.json`, at the top or in a part's section, or into a file beside it.
Which tensors are quantised is never taken from it: the tensors say so. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stretto.errors import CheckpointError

KEYS = ("quantization_config", "compression_config")
SECTIONS = (
    (),
    ("thinker_config",),
    ("thinker_config", "text_config"),
    ("talker_config",),
)
FILES = ("quantization_config.json", "quantize_config.json")
GPTQ_PACKINGS = {"auto_round:auto_gptq": True, "auto_round": False, "auto_round:gptqmodel": False}
"""Whether zero points are stored less one."""


StoredKind = Literal["packed", "gptq", "float8"]
"""What the tensors of a matrix are: compressed-tensors' words, GPTQ's words, or FP8."""


@dataclass(frozen=True, slots=True)
class QuantisationSettings:
    method: str
    kind: StoredKind
    bits: int = 8
    group: int | None = None
    symmetric: bool = True
    zeros_less_one: bool = True
    block: tuple[int, int] | None = None  # outputs, inputs
    per_row: bool = False  # says that FP8 has a scale for each row
    dynamic_activations: bool = False


class _Reader:
    """One of those objects; errors name the file."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def refuse(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what} is not supported")

    def only(self, key: str, allowed: tuple[object, ...], default: object = None) -> Any:
        value = self.raw.get(key, default)
        if value not in allowed:
            raise self.refuse(f"{key} {value!r}")
        return value

    def empty(self, *keys: str) -> None:
        for key in keys:
            if self.raw.get(key):
                raise self.refuse(f"{key} {str(self.raw[key])[:80]!r}")


def read_settings(directory: Path, config: Mapping[str, Any]) -> QuantisationSettings | None:
    """From a checkpoint's directory and its config.json; None if nothing speaks of quantisation.
    Refuses what is not supported."""
    found: list[QuantisationSettings] = []
    for where, raw in _objects(directory, config):
        settings = _read(_Reader(raw, where))
        if found and settings != found[0]:
            raise CheckpointError(f"{where}: contradicts another quantization_config")
        found.append(settings)
    return found[0] if found else None


def speaks_of_quantisation(directory: Path, config: Mapping[str, Any]) -> str:
    """Where a checkpoint says that it is quantised, in whatever way; empty if it does not."""
    try:
        return next((where for where, _ in _objects(directory, config)), "")
    except CheckpointError as e:
        return str(e)


def _objects(directory: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = directory / "config.json"
    if isinstance(config.get("quantization"), dict):
        raise CheckpointError(f"{path}: MLX's `quantization` is not supported")
    for section in SECTIONS:
        part: Any = config
        for key in section:
            part = part.get(key) if isinstance(part, dict) else None
        for key in KEYS:
            if isinstance(part, dict) and isinstance(part.get(key), dict):
                yield f"{path}: {'.'.join((*section, key))}", part[key]
    if (directory / "hf_quant_config.json").exists():
        raise CheckpointError(f"{directory / 'hf_quant_config.json'}: ModelOpt is not supported")
    for name in FILES:
        file = directory / name
        if file.exists():
            try:
                raw = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as e:
                raise CheckpointError(f"{file}: cannot be read as JSON ({e})") from None
            if not isinstance(raw, dict):
                raise CheckpointError(f"{file}: is not an object")
            yield str(file), raw


def _read(r: _Reader) -> QuantisationSettings:
    method = r.raw.get("quant_method")
    if method is None and "config_groups" in r.raw:
        method = "compressed-tensors"
    elif method is None and "desc_act" in r.raw:
        method = "gptq"
    readers = {
        "compressed-tensors": _compressed_tensors,
        "auto-round": _auto_round,
        "gptq": _gptq,
        "fp8": _fp8,
    }
    if method not in readers:
        raise r.refuse(f"quant_method {method!r}")
    return readers[method](r)


def _compressed_tensors(r: _Reader) -> QuantisationSettings:
    kind = r.only("format", ("pack-quantized", "float-quantized"))
    r.only("quantization_status", ("compressed",))
    r.empty("sparsity_config", "transform_config", "kv_cache_scheme")
    groups = r.raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise r.refuse("config_groups without a group")
    parts = []
    for group in groups.values():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise r.refuse("a group of config_groups without weights")
        if group.get("format") not in (None, kind):
            raise r.refuse(f"format {group['format']!r} of a group")
        if group.get("output_activations"):
            raise r.refuse("quantisation of output activations")
        parts.append((group["weights"], group.get("input_activations")))
    if any(part != parts[0] for part in parts):
        raise r.refuse("config_groups with groups that differ")
    weights, activations = _Reader(parts[0][0], r.where), parts[0][1]
    if weights.raw.get("dynamic", False) is not False:
        raise r.refuse("weights with dynamic scales")
    if kind == "pack-quantized":
        return _pack_quantized(weights, activations)
    return _float_quantized(weights, activations)


def _pack_quantized(r: _Reader, activations: object) -> QuantisationSettings:
    if activations:
        raise r.refuse("quantisation of activations beside integer weights")
    bits = r.only("num_bits", (4, 8))
    r.only("type", ("int",))
    r.only("strategy", ("group",))
    r.only("actorder", (None, False, "weight", "static"))
    group = r.raw.get("group_size")
    if type(group) is not int or group < 1:
        raise r.refuse(f"group_size {group!r}")
    return QuantisationSettings(
        "compressed-tensors",
        "packed",
        bits,
        group,
        symmetric=r.only("symmetric", (True, False), True),
    )


def _float_quantized(r: _Reader, activations: object) -> QuantisationSettings:
    r.only("num_bits", (8,))
    r.only("type", ("float",))
    r.only("symmetric", (True,), True)
    strategy = r.only("strategy", ("channel", "block"))
    dynamic = False
    if activations:
        a = _Reader(activations if isinstance(activations, dict) else {}, r.where)
        if a.raw.get("dynamic") is not True:
            raise r.refuse("activations with a fixed scale")
        if a.raw.get("num_bits") != 8 or a.raw.get("type") != "float":
            raise r.refuse("activations that are not FP8")
        dynamic = True
    block = _block(r, "block_structure") if strategy == "block" else None
    return QuantisationSettings(
        "compressed-tensors",
        "float8",
        block=block,
        per_row=block is None,
        dynamic_activations=dynamic,
    )


def _block(r: _Reader, key: str) -> tuple[int, int]:
    block = r.raw.get(key)
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block):
        rows, columns = block
        if rows > 0 and columns > 0:
            return rows, columns
    raise r.refuse(f"{key} {block!r}")


def _integers(r: _Reader) -> int | None:
    """What AutoRound and GPTQ share: the group's size."""
    r.only("bits", (4,))
    r.only("sym", (True,), True)
    group = r.raw.get("group_size")
    if type(group) is not int or (group < 1 and group != -1):
        raise r.refuse(f"group_size {group!r}")
    return group


def _auto_round(r: _Reader) -> QuantisationSettings:
    packing = r.only("packing_format", tuple(GPTQ_PACKINGS))
    r.only("data_type", ("int",), "int")
    if r.raw.get("act_bits") not in (None, 16, 32):
        raise r.refuse(f"act_bits {r.raw['act_bits']!r}")
    return QuantisationSettings(
        "auto-round", "gptq", 4, _integers(r), zeros_less_one=GPTQ_PACKINGS[packing]
    )


def _gptq(r: _Reader) -> QuantisationSettings:
    r.only("desc_act", (False,), False)
    version = r.only("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return QuantisationSettings("gptq", "gptq", 4, _integers(r), zeros_less_one=version == "gptq")


def _fp8(r: _Reader) -> QuantisationSettings:
    r.only("activation_scheme", ("dynamic",), "dynamic")
    r.only("fmt", ("e4m3", None), "e4m3")
    block = _block(r, "weight_block_size") if r.raw.get("weight_block_size") is not None else None
    return QuantisationSettings("fp8", "float8", block=block, dynamic_activations=True)

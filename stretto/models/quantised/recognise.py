"""Which tensors of a checkpoint are quantised, and how.

A quantised matrix keeps the name of the wide one and comes as several tensors with names of their
own behind it; which ones there are says how it is packed. `quantization_config` gives what tensors
do not show, and grounds to refuse (`settings.py`). From headers alone: called in the server's
process before anything starts, and by the loader. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.errors import CheckpointError
from stretto.kernels.formats import CodeKind, WeightFormat
from stretto.models.checkpoint import StoredTensor
from stretto.models.quantised.settings import QuantisationSettings, StoredKind

Layout = Literal["rows", "columns"]
"""Which of a matrix's sides the words of integer codes run along: a row each (compressed-tensors),
or packed along inputs with outputs side by side (GPTQ)."""

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
OWN_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight_global_scale", "weight_scale_inv", "weight_scale_2", "input_scale",
    "input_global_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
PACKED = {"weight_packed", "weight_scale", "weight_shape"}
GPTQ = {"qweight", "qzeros", "scales"}


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A matrix [outputs, inputs] that is stored quantised."""

    name: str  # of the wide one
    format: WeightFormat
    shape: tuple[int, int]
    layout: Layout
    codes: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None = None  # zero points (A), which are to be used
    # what must say what is known already, else the matrix is refused
    stated_shape: StoredTensor | None = None
    order: StoredTensor | None = None  # `g_idx`
    zeros_must_be: int | None = None  # every word of `qzeros`
    zeros: StoredTensor | None = None  # `qzeros`

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        found = (self.codes, self.scale, self.zero, self.stated_shape, self.order, self.zeros)
        return tuple(t for t in found if t is not None)


def recognise(
    tensors: Mapping[str, StoredTensor], settings: QuantisationSettings | None
) -> dict[str, QuantisedTensor]:
    """The quantised matrices by the names that wide ones would have; empty if there are none."""
    stems: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in OWN_SUFFIXES or (last == "weight" and stored.dtype.startswith(("F8", "U8"))):
            stems.setdefault(stem, {})[last] = stored
    for stem, parts in stems.items():
        wide = tensors.get(f"{stem}.weight")
        if wide is not None and "weight" not in parts:
            parts["weight"] = wide
    return {f"{stem}.weight": _matrix(stem, parts, settings) for stem, parts in stems.items()}


def _refuse(stored: StoredTensor, why: str) -> CheckpointError:
    return CheckpointError(f"{stored.file}: tensor {stored.name}: {why}")


def _matrix(
    stem: str, parts: Mapping[str, StoredTensor], settings: QuantisationSettings | None
) -> QuantisedTensor:
    suffixes = set(parts)
    first = next(iter(parts.values()))
    for name in ("input_scale", "input_global_scale"):
        if name in parts and not _nvfp4(parts):
            raise _refuse(parts[name], "activations with a fixed scale are not supported")
    if _nvfp4(parts):
        raise _refuse(first, "NVFP4 weights are not supported")
    if "weight" in parts and suffixes & {"weight_packed", "qweight"}:
        raise _refuse(parts["weight"], "is there both wide and packed")
    kind: StoredKind = "float8"
    if suffixes & {"qweight", "qzeros", "scales", "g_idx"}:
        kind = "gptq"
    elif suffixes & {"weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"}:
        kind = "packed"
    if settings is not None and settings.kind != kind:
        raise _refuse(first, f"is not what quantization_config ({settings.method}) says")
    return {"gptq": _gptq, "packed": _packed, "float8": _float8}[kind](stem, parts, settings)


def _nvfp4(parts: Mapping[str, StoredTensor]) -> bool:
    codes = parts.get("weight_packed") or parts.get("weight")
    return (
        "weight_global_scale" in parts
        or "weight_scale_2" in parts
        or (codes is not None and codes.dtype == "U8")
    )


def _complete(parts: Mapping[str, StoredTensor], needed: set[str], more: set[str]) -> None:
    first = next(iter(parts.values()))
    if missing := needed - set(parts):
        raise _refuse(first, f"comes without {', '.join(sorted(missing))}")
    if unknown := set(parts) - needed - more:
        extra = parts[min(unknown)]
        raise _refuse(extra, "is not known beside the other tensors of its matrix")


def _scale_dtype(scale: StoredTensor) -> str:
    if scale.dtype not in FLOATS:
        raise _refuse(scale, f"scales of dtype {scale.dtype} are not supported")
    return FLOATS[scale.dtype]


def _must_be(t: StoredTensor, dtype: str, shape: tuple[int, ...]) -> None:
    if t.dtype != dtype:
        raise _refuse(t, f"has dtype {t.dtype} instead of {dtype}")
    if t.shape != shape:
        raise _refuse(t, f"has shape {list(t.shape)} instead of {list(shape)}")


def _group(scale: StoredTensor, inputs: int, groups: int, stated: int | None) -> int:
    if groups < 1 or inputs % groups:
        raise _refuse(scale, f"{groups} scales do not divide {inputs} inputs into equal groups")
    group = inputs // groups
    if stated is not None and stated not in (group, -1):
        raise _refuse(scale, f"has groups of {group} inputs, but group_size is {stated}")
    return group


def _packed(
    stem: str, parts: Mapping[str, StoredTensor], settings: QuantisationSettings | None
) -> QuantisedTensor:
    """compressed-tensors, `pack-quantized`."""
    _complete(parts, PACKED, {"weight_zero_point", "weight_g_idx"})
    codes, scale, shape = parts["weight_packed"], parts["weight_scale"], parts["weight_shape"]
    zero, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    bits = 4 if settings is None else settings.bits
    if codes.dtype != "I32" or len(codes.shape) != 2:
        raise _refuse(codes, f"is {codes.dtype} {list(codes.shape)} instead of words of a matrix")
    outputs, inputs = codes.shape[0], codes.shape[1] * (32 // bits)
    _must_be(shape, "I64", (2,))
    if len(scale.shape) != 2 or scale.shape[0] != outputs:
        raise _refuse(scale, f"has shape {list(scale.shape)} for a matrix of {outputs} outputs")
    group = _group(scale, inputs, scale.shape[1], settings.group if settings else None)
    if settings is not None and settings.symmetric is (zero is not None):
        symmetry = "symmetric" if settings.symmetric else "not symmetric"
        raise _refuse(codes, f"quantization_config says {symmetry}, which its tensors contradict")
    if zero is not None:
        _must_be(zero, "I32", (-(-outputs // (32 // bits)), scale.shape[1]))
    if order is not None:
        _must_be(order, "I32", (inputs,))
    kind: CodeKind = "int4" if bits == 4 else "int8"
    return QuantisedTensor(
        f"{stem}.weight",
        WeightFormat(kind, group, symmetric=zero is None, scale_dtype=_scale_dtype(scale)),
        (outputs, inputs), "rows", codes, scale, zero, stated_shape=shape, order=order,
    )  # fmt: skip


def _gptq(
    stem: str, parts: Mapping[str, StoredTensor], settings: QuantisationSettings | None
) -> QuantisedTensor:
    """GPTQ's packing, which AutoRound writes too."""
    _complete(parts, GPTQ, {"g_idx"})
    codes, zeros, scale = parts["qweight"], parts["qzeros"], parts["scales"]
    order = parts.get("g_idx")
    if codes.dtype != "I32" or len(codes.shape) != 2 or len(scale.shape) != 2:
        raise _refuse(codes, f"is {codes.dtype} {list(codes.shape)} instead of words of a matrix")
    if codes.shape[1] * 8 == scale.shape[1]:
        raise _refuse(codes, "AWQ's own packing (GEMM) is not supported")
    inputs, outputs = codes.shape[0] * 8, codes.shape[1]
    if scale.shape[1] != outputs:
        raise _refuse(scale, f"has shape {list(scale.shape)} for a matrix of {outputs} outputs")
    group = _group(scale, inputs, scale.shape[0], settings.group if settings else None)
    _must_be(zeros, "I32", (scale.shape[0], outputs // 8))
    if order is not None:
        _must_be(order, "I32", (inputs,))
    one_less = settings is None or settings.zeros_less_one
    return QuantisedTensor(
        f"{stem}.weight",
        WeightFormat("int4", group, scale_dtype=_scale_dtype(scale)),
        (outputs, inputs), "columns", codes, scale,
        order=order, zeros=zeros, zeros_must_be=0x77777777 if one_less else 0x88888888,
    )  # fmt: skip


def _float8(
    stem: str, parts: Mapping[str, StoredTensor], settings: QuantisationSettings | None
) -> QuantisedTensor:
    """FP8 with a scale per row or per block, in either spelling."""
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    _complete(parts, {"weight", name}, set())
    codes, scale = parts["weight"], parts[name]
    if codes.dtype != "F8_E4M3" or len(codes.shape) != 2:
        raise _refuse(codes, f"is {codes.dtype} {list(codes.shape)} beside {name}")
    outputs, inputs = codes.shape
    in_blocks = settings is not None and settings.block is not None
    if name == "weight_scale" and scale.shape == (outputs, 1) and not in_blocks:
        form = WeightFormat("float8", 0)
    elif settings is not None and settings.per_row:
        raise _refuse(scale, f"has shape {list(scale.shape)} instead of {[outputs, 1]}")
    else:
        form = WeightFormat("float8", *_block(codes, scale, settings))
    _scale_dtype(scale)
    return QuantisedTensor(f"{stem}.weight", form, (outputs, inputs), "rows", codes, scale)


def _block(
    codes: StoredTensor, scale: StoredTensor, settings: QuantisationSettings | None
) -> tuple[int, int]:
    """Inputs and outputs of a block."""
    rows, columns = (128, 128) if settings is None or settings.block is None else settings.block
    blocks = -(-codes.shape[0] // rows), -(-codes.shape[1] // columns)
    if scale.shape != blocks:
        raise _refuse(
            scale,
            f"has shape {list(scale.shape)}, but {list(codes.shape)} in blocks of {rows} x "
            f"{columns} need {list(blocks)}",
        )
    return columns, rows


def describe(quantised: Mapping[str, QuantisedTensor]) -> str:
    """The formats, most weights first; empty if all weights are wide."""
    sizes: dict[str, int] = {}
    for q in quantised.values():
        sizes[str(q.format)] = sizes.get(str(q.format), 0) + q.shape[0] * q.shape[1]
    return "; ".join(sorted(sizes, key=lambda form: -sizes[form]))

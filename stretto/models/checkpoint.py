"""The files of a checkpoint: which tensors lie where, read from the safetensors headers and checked
byte by byte. No weight is read here. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from stretto.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # the format's own limit

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's place in its file; `start` counts from the beginning of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The tensors of a checkpoint directory: one model.safetensors, or shards listed in an
    index."""

    directory: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, directory: str | Path) -> CheckpointFiles:
        """Read and check all headers; no weight is read."""
        folder = Path(directory)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such directory")
        if (folder / INDEX).exists():
            return cls(folder, _open_shards(folder))
        if (folder / SINGLE).exists():
            return cls(folder, read_header(folder / SINGLE))
        raise CheckpointError(f"{folder}: has neither {INDEX} nor {SINGLE}")


def has_weights(directory: Path) -> bool:
    """Whether there are any: random ones need none."""
    return any((directory / name).exists() for name in (INDEX, SINGLE))


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    where = _read_index(folder / INDEX)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name, file in where.items():
        if file not in shards:
            if not (folder / file).is_file():
                raise CheckpointError(
                    f"{folder / file}: no such file; {INDEX} lists it as the home of {name}"
                )
            shards[file] = read_header(folder / file)
        if name not in shards[file]:
            raise CheckpointError(
                f"{folder / file}: has no tensor {name}, which {INDEX} places there"
            )
    for file, tensors in shards.items():
        for name in tensors:
            if where.get(name) != file:
                raise CheckpointError(
                    f"{folder / file}: holds {name}, which {INDEX} does not place there"
                )
    return {name: shards[file][name] for name, file in where.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
    where = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for name, file in where.items():
        # A shard lies beside its index; anything else is a path we were not asked to read.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: {name} is placed in {file!r}, which is not a file name")
    return where


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, with every length, dtype, shape and byte range
    checked."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little") if size >= 8 else 0
            if size < 8 or not 0 < length <= min(MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file "
                    f"(its {size} bytes cannot hold a header of {length} bytes)"
                )
            raw = json.loads(f.read(length))
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the header is not valid JSON ({e})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    tensors = {
        name: _stored(path, name, entry, 8 + length, size)
        for name, entry in raw.items()
        if name != "__metadata__"
    }
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _stored(path: Path, name: str, entry: object, data: int, size: int) -> StoredTensor:
    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name}: {what}")

    if not isinstance(entry, dict):
        raise bad("its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise bad(f"unknown dtype {dtype!r}")
    sizes, ends = _naturals(shape), _naturals(offsets)
    if sizes is None:
        raise bad(f"shape {shape!r} is not a list of sizes")
    if ends is None or len(ends) != 2 or ends[0] > ends[1]:
        raise bad(f"data_offsets {offsets!r} are not a byte range")
    start, end = ends
    need = prod(sizes) * ITEM_BYTES[dtype]
    if end - start != need:
        raise bad(f"{dtype} {shape} takes {need} bytes, its byte range holds {end - start}")
    if data + end > size:
        raise bad(f"needs bytes up to {data + end}, but the file ends at {size}: truncated?")
    return StoredTensor(name, path, dtype, tuple(sizes), data + start, need)


def _naturals(value: object) -> list[int] | None:
    good = isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 63 for i in value)
    return value if good and isinstance(value, list) else None


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    """The tensors must tile the file: what overlaps or belongs to none is corrupt."""
    end = data
    for t in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if t.start != end:
            what = (
                "overlaps the tensor before it"
                if t.start < end
                else f"leaves {t.start - end} bytes before it"
            )
            raise CheckpointError(f"{path}: tensor {t.name}: {what}")
        end = t.start + t.nbytes
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes at the end belong to no tensor")

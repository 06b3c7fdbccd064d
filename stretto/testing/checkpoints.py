"""Write small checkpoints of random weights in a released format: for tests, for demonstrations on
a CPU, and for families outside the package.

A tensor is a function of the seed and its name alone, so the same seed gives the same bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.embedded import RANDOM
from stretto.models.random_weights import Shape, spread

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def random_weights(shapes: Mapping[str, Shape], seed: int) -> Weights:
    return {name: random_tensor(name, shape, seed) for name, shape in shapes.items()}


def random_tensor(name: str, shape: Shape, seed: int) -> Array:
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, std = spread(name, shape)
    return np.float32(mean) + np.float32(std) * noise.standard_normal(shape, dtype=np.float32)


def write_weights(folder: Path, weights: Weights, shards: int | None = None) -> None:
    """model.safetensors, or so many shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards is None:
        _save(folder / "model.safetensors", weights)
        return
    if not 1 <= shards <= len(weights):
        raise ValueError(f"shards must be between 1 and {len(weights)}, got {shards}")
    total = sum(w.nbytes for w in weights.values())
    parts: list[Weights] = [{} for _ in range(shards)]
    at = done = 0
    for left, (name, w) in zip(range(len(weights), 0, -1), weights.items(), strict=True):
        due = min(done * shards // total, at + 1)  # a large tensor skips no shard
        at = max(at, due, shards - left)  # and none stays empty
        parts[at][name] = w
        done += w.nbytes
    where: dict[str, str] = {}
    for i, part in enumerate(parts, start=1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        _save(folder / file, part)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def _save(file: Path, weights: Weights) -> None:
    from safetensors.numpy import save

    file.write_bytes(save(weights, metadata={"format": "pt"}))


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """config.json, which says that the weights are random. Comes last: a directory that has one is
    complete."""
    write_json(folder / "config.json", {**config, RANDOM: True})


def padding_row(embedding: Array, weights: Weights, pad: int) -> Array:
    """The talker's input row of the padding token, less the mean row, of length one. A codec head
    row that equals it lets speech end some frames after its text.

    Float64 and the rounding hide what differs between CPUs (the order of a product's sums, the last
    bit of `exp`), so the same seed gives the same bytes on all of them."""
    fc1, fc2 = "talker.text_projection.linear_fc1", "talker.text_projection.linear_fc2"
    w = {name: weights[name].astype(np.float64) for name in
         (f"{fc1}.weight", f"{fc1}.bias", f"{fc2}.weight")}  # fmt: skip
    x = embedding.astype(np.float64) @ w[f"{fc1}.weight"].T + w[f"{fc1}.bias"]
    rows = (x / (1 + np.exp(-x))) @ w[f"{fc2}.weight"].T
    row = rows[pad] - rows.mean(axis=0)
    row /= np.linalg.norm(row)
    return np.asarray(np.round(row, 6), np.float32)

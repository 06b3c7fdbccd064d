"""What writers of tiny checkpoints have in common. Needs numpy; no torch."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.models.shapes import Shape, spread

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


def random_tensor(name: str, shape: Shape, seed: int) -> Array:
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, std = spread(name, shape)
    return np.float32(mean) + np.float32(std) * noise.standard_normal(shape, dtype=np.float32)


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

"""What writers of tiny checkpoints have in common. Needs numpy; no torch."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.models.shapes import Shape, spread

Weights = dict[str, npt.NDArray[np.float32]]


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


def random_tensor(name: str, shape: Shape, seed: int) -> npt.NDArray[np.float32]:
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, std = spread(name, shape)
    return np.float32(mean) + np.float32(std) * noise.standard_normal(shape, dtype=np.float32)

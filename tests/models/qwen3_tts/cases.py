"""What the golden files are about: tiny checkpoints of all kinds, and requests in every mode and
both layouts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from stretto.testing.qwen3_tts import write_tiny

GOLDEN = Path(__file__).parent / "golden"
KINDS = (
    ("custom_voice", "1b7"),
    ("custom_voice", "0b6"),
    ("base", "1b7"),
    ("base", "0b6"),
    ("voice_design", "1b7"),
)
SEED = 7
NOISE_SAMPLES = 24000 * 3 + 17
FILES = ("model.safetensors", "speech_tokenizer/model.safetensors")


def write(root: Path, kind: str, size: str) -> Path:
    folder = root / f"{kind}-{size}"
    write_tiny(folder, 0, kind, size)  # type: ignore[arg-type]
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def clip(samples: int) -> np.ndarray:
    """A sound that changes: noise under a slow envelope."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal(samples, dtype=np.float32) * np.float32(0.1)
    return (
        noise * np.float32(0.2) + noise * np.sin(np.arange(samples, dtype=np.float32) / 9000) ** 2
    )


def cases(kind: str, size: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)

    def some(n: int) -> list[int]:
        return rng.integers(300, 1800, n).tolist()

    text, words, ref_text = some(9), some(7), some(6)
    hidden = 48 if size == "1b7" else 32
    vector = rng.standard_normal(hidden).astype(np.float32).tolist()
    short, long = (rng.integers(0, 2048, (n, 16)).tolist() for n in (11, 30))
    of: dict[str, list[dict[str, Any]]] = {
        "custom_voice": [
            {"speaker": "Vivian"},
            {"speaker": "eric"},
            {"speaker": "dylan", "language": "english"},
            {"speaker": "ryan", "language": "Chinese", "instruct": words},
        ],
        "base": [
            {"vector": vector, "language": "french"},
            {"vector": vector, "ref_codes": short, "ref_text": ref_text},
            {"vector": vector, "ref_codes": long, "ref_text": ref_text, "language": "german"},
        ],
        "voice_design": [{"instruct": words}, {"instruct": words, "language": "japanese"}],
    }
    return [
        {"text": text, "whole": whole, "max_new": 12, **c}
        for c in of[kind]
        for whole in (False, True)
    ]

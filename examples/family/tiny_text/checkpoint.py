"""Writes a tiny checkpoint with random weights: `python -m tiny_text.checkpoint DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from stretto.models.weights import build, tensor_shapes
from stretto.testing.checkpoints import random_weights, write_config, write_json, write_weights
from stretto.testing.tiny_tokenizer import (
    CHAT_TEMPLATE,
    token_ids,
    tokenizer_config,
    tokenizer_json,
)
from tiny_text.config import TinyTextConfig
from tiny_text.model import TinyTextModel

CONFIG = {
    "model_type": "tiny_text",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}


def write_tiny(directory: str | Path, seed: int = 0) -> None:
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    ids = token_ids()
    raw = {**CONFIG, "vocab_size": len(ids), "eos_token_id": ids["<|im_end|>"]}
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_config(folder, raw)
    config = TinyTextConfig.read(folder)
    model = build(lambda: TinyTextModel(config), "meta", torch.float32)
    write_weights(folder, random_weights(tensor_shapes(model, ""), seed))


if __name__ == "__main__":
    write_tiny(sys.argv[1])

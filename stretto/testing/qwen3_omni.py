"""Tiny Qwen3-Omni checkpoints: random models in the released format, small enough for tests and
demonstrations on a CPU; and the released configuration, for random weights of full size.

The tiny configuration is the released one with widths, depths, expert counts and the text
vocabulary shrunk; all parts and all structural numbers stay. Every weight is random at a size where
it matters, so that a mistake in any path shows. Called by the command line, tests and
benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stretto.kernels.formats import WeightFormat
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.weights import build, tensor_shapes
from stretto.testing.checkpoints import (
    Weights,
    merged,
    padding_row,
    random_weights,
    write_config,
    write_json,
    write_weights,
)
from stretto.testing.tiny_tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL,
    WORDS,
    token_ids,
    tokenizer_config,
    tokenizer_json,
    write_vocabulary,
)

FORMATS = ("bf16", "fp8", "int4", "int4-talker")

VOCAB_SIZE = 1920  # the tokenizer's 1902 ids and a few that no text has, as in the released model
_MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "interleaved": True}
_LM = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

# What differs from the released configuration besides token ids.
SHRUNK: dict[str, Any] = {
    "dtype": "float32",
    "thinker_config": {
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "downsample_hidden_size": 8,
            "output_dim": 64,
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 96,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 2, 3],
        },
        "text_config": {
            **_LM,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 6,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 8192,
            "rope_scaling": _MROPE,
        },
    },
    "talker_config": {
        "accept_hidden_layer": 4,
        "thinker_hidden_size": 64,
        "text_config": {
            **_LM,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 8192,
            "rope_scaling": _MROPE,
        },
        "code_predictor_config": {
            **_LM,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
        },
    },
    "code2wav_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "decoder_dim": 64,
    },
}

# The released generation config; it is about the talker only.
GENERATION = {
    "talker_max_new_tokens": 4096,
    "talker_repetition_penalty": 1.05,
    "talker_temperature": 0.9,
    "talker_top_k": 50,
    "talker_top_p": 1.0,
}

PREPROCESSOR: dict[str, Any] = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "right",
    "padding_value": 0.0,
    "dither": 0.0,
    "return_attention_mask": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def released_config() -> dict[str, Any]:
    """config.json of the released model."""
    text = resources.files(__package__).joinpath("qwen3_omni.json").read_text(encoding="utf-8")
    raw: dict[str, Any] = json.loads(text)
    return raw


def released_formats(name: str) -> dict[str, WeightFormat]:
    """How the quantised checkpoints that people have keep the released model's parts, by the names
    of `FORMATS`."""
    int4 = WeightFormat("int4", 32, scale_dtype="bfloat16")
    blocks = WeightFormat("float8", 128, 128)
    thinker, talker = (
        [f"{stage}.{part}" for part in ("attention", "experts")] for stage in ("thinker", "talker")
    )
    made: dict[str, dict[str, WeightFormat]] = {
        "bf16": {},
        "fp8": dict.fromkeys((*thinker, *talker), blocks),
        "int4": dict.fromkeys(thinker, int4),
        "int4-talker": dict.fromkeys((*thinker, *talker), int4),
    }
    return made[name]


def tiny_config() -> dict[str, Any]:
    """config.json of the tiny model."""
    ids = token_ids()
    media = {
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }
    tokens = {
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "thinker_config": {
            **media,
            "vision_end_token_id": ids["<|vision_end|>"],
            "user_token_id": ids["user"],
        },
        "talker_config": media,
    }
    return merged(merged(released_config(), SHRUNK), tokens)


def write_tiny(
    directory: str | Path, seed: int = 0, shards: int = 3, changes: dict[str, Any] | None = None
) -> None:
    """Write the tiny checkpoint into `directory`. The same seed gives the same bytes. `changes` to
    its config make another one."""
    folder = Path(directory)
    config = merged(tiny_config(), changes or {})
    write_weights(folder, tiny_weights(parse(config, "the tiny config"), seed), shards)

    write_json(folder / "generation_config.json", GENERATION)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_vocabulary(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_config(folder, config)


def checkpoint_shapes(config: OmniConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this configuration: what the three modules take."""
    modules: tuple[tuple[str, Callable[[], nn.Module]], ...] = (
        ("thinker.", lambda: Thinker(config)),
        ("talker.", lambda: Talker(config)),
        ("code2wav.", lambda: Code2Wav(config.code2wav)),
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, make in modules:
        shapes |= tensor_shapes(build(make, "meta", torch.float32), prefix)
    return shapes


def tiny_weights(config: OmniConfig, seed: int) -> Weights:
    """Random weights, each tensor a function of the seed and its name alone."""
    made = random_weights(checkpoint_shapes(config), seed)
    _steer_text(made, config)
    _steer_speech(made, config)
    return made


def _steer_text(weights: Weights, config: OmniConfig) -> None:
    """Make greedy answers varied words that end now and then, but not at once."""
    head, embed = weights["thinker.lm_head.weight"], weights["thinker.model.embed_tokens.weight"]
    ids = token_ids()
    words = [i for t, i in ids.items() if t.startswith("Ġ") and t[1:] in WORDS]
    others = np.setdiff1d(np.arange(len(head)), words)
    never = [*range(len(ids), len(head)), *(ids[t] for t in SPECIAL)]
    head[others] *= 0.6
    head[never] *= 0.1
    head[words] -= 0.1 * embed[words]  # away from what was just said: fewer loops
    # A random row would win once in a vocabulary; a longer one does so every few dozen tokens. The
    # first token of an answer follows a newline, so a row that points away from the newline does
    # not end it there.
    head[config.tokens.im_end] *= 26.0
    head[config.tokens.im_end] -= 0.1 * embed[ids["Ċ"]]


def _steer_speech(weights: Weights, config: OmniConfig) -> None:
    """Let speech end some frames after its text: the end code's row looks for the padding text
    row."""
    row = padding_row(weights["thinker.model.embed_tokens.weight"], weights, config.tokens.tts_pad)
    weights["talker.codec_head.weight"][config.talker.codec.eos] = row

"""Tiny Qwen3-TTS checkpoints: random models in the released format, small enough for tests and
demonstrations on a CPU; and the released configurations, for random weights of full size.

A tiny configuration is the released one with widths, depths and the text vocabulary shrunk; all
parts and all structural numbers stay. Called by the command line, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stretto.models.qwen3_tts.config import CODEC, Kind, TtsConfig, parse
from stretto.models.qwen3_tts.encoder import CodecEncoder
from stretto.models.qwen3_tts.speaker import SpeakerEncoder
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.qwen3_tts.vocoder import CodecDecoder
from stretto.models.random_weights import Shape
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
from stretto.testing.tiny_tokenizer import token_ids, tokenizer_config, write_vocabulary

VOCAB_SIZE = 1920  # the tokenizer's 1902 ids and a few that no text has, as in the released model
LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069, "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}  # fmt: skip
SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875, "dylan": 2878,
}  # fmt: skip
DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
SIZES = {"0b6": (1024, 3072), "1b7": (2048, 6144)}
"""The talker's width, and its MLP's, by `tts_model_size`."""

SCALE = 0.55  # of the row that ends speech

GENERATION = {
    "do_sample": True, "top_k": 50, "top_p": 1.0, "temperature": 0.9, "repetition_penalty": 1.05,
    "subtalker_dosample": True, "subtalker_top_k": 50, "subtalker_top_p": 1.0,
    "subtalker_temperature": 0.9,
    "max_new_tokens": 8192,
}  # fmt: skip

_LM = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MROPE = {"interleaved": True, "rope_type": "default", "type": "default"}
SHRUNK: dict[str, Any] = {
    "talker_config": {
        **_LM, "intermediate_size": 80, "num_hidden_layers": 3, "text_hidden_size": 40,
        "text_vocab_size": VOCAB_SIZE,
        "rope_scaling": {**_MROPE, "mrope_section": [4, 2, 2]},
        "code_predictor_config": {**_LM, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2},
    },
}  # fmt: skip
SHRUNK_SPEAKER = {
    "enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 8, "enc_res2net_scale": 4,
    "enc_se_channels": 8,
}  # fmt: skip
SHRUNK_CODEC: dict[str, Any] = {
    "decoder_config": {
        "codebook_dim": 24, "latent_dim": 40, "hidden_size": 32, "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 3,
        "decoder_dim": 64,
    },
    "encoder_config": {
        "num_filters": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 48, "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16, "upsample_groups": 32,
    },
}  # fmt: skip


def released_config(kind: Kind = "custom_voice", size: str = "1b7") -> dict[str, Any]:
    """config.json of a released model."""
    hidden, mlp = SIZES[size]
    common = {
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False, "num_code_groups": 16,
    }  # fmt: skip
    predictor = {
        **common, "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "max_position_embeddings": 65536, "rope_scaling": None,
        "model_type": "qwen3_tts_talker_code_predictor",
    }  # fmt: skip
    custom = kind == "custom_voice"
    talker = {
        **common, "vocab_size": 3072, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": 28,
        "max_position_embeddings": 32768, "text_hidden_size": 2048, "text_vocab_size": 151936,
        "rope_scaling": {**_MROPE, "mrope_section": [24, 20, 20]}, "position_id_per_seconds": 13,
        "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
        "codec_language_id": LANGUAGES, "spk_id": SPEAKERS if custom else {},
        "spk_is_dialect": {s: DIALECTS.get(s, False) for s in SPEAKERS} if custom else {},
        "code_predictor_config": predictor, "model_type": "qwen3_tts_talker",
    }  # fmt: skip
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_size": size,
        "tts_model_type": kind,
        "talker_config": talker, "im_start_token_id": 151644, "im_end_token_id": 151645,
        "assistant_token_id": 77091,
        "tts_pad_token_id": 151671, "tts_bos_token_id": 151672, "tts_eos_token_id": 151673,
        "transformers_version": "4.57.3",
    }  # fmt: skip
    if kind == "base":
        config["speaker_encoder_config"] = {"enc_dim": hidden, "sample_rate": 24000}
    return config


def released_codec() -> dict[str, Any]:
    """config.json of the released codec."""
    decoder = {
        "codebook_size": 2048, "codebook_dim": 512, "latent_dim": 1024, "hidden_size": 512,
        "head_dim": 64,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "sliding_window": 72, "rope_theta": 10000, "rms_norm_eps": 1e-5, "num_quantizers": 16,
        "num_semantic_quantizers": 1, "semantic_codebook_size": 4096, "upsample_rates": [8, 5, 4,
        3],
        "upsampling_ratios": [2, 2], "decoder_dim": 1536, "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000, "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    encoder = {
        "num_filters": 64, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 2048, "codebook_dim": 256,
        "vector_quantization_hidden_dimension": 256, "num_quantizers": 32, "codebook_size": 2048,
        "upsample_groups": 512, "sliding_window": 250, "rope_theta": 10000.0, "norm_eps": 1e-5,
        "frame_rate": 12.5,
        "upsampling_ratios": [8, 6, 5, 4], "kernel_size": 7, "last_kernel_size": 3,
        "residual_kernel_size": 3,
        "num_residual_layers": 1, "compress": 2, "pad_mode": "constant", "use_causal_conv": True,
        "model_type": "mimi",
    }  # fmt: skip
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"], "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16, "input_sample_rate": 24000, "output_sample_rate": 24000,
        "decode_upsample_rate": 1920, "encode_downsample_rate": 1920, "encoder_config": encoder,
        "decoder_config": decoder, "transformers_version": "4.57.3",
    }  # fmt: skip


def tiny_config(kind: Kind = "custom_voice", size: str = "1b7") -> dict[str, Any]:
    """As released, the predictor of the larger size is narrower than its talker."""
    ids, hidden = token_ids(), 48 if size == "1b7" else 32
    tokens = {
        "im_start_token_id": ids["<|im_start|>"], "im_end_token_id": ids["<|im_end|>"],
        "assistant_token_id": ids["assistant"], "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"], "tts_eos_token_id": ids["<tts_text_eod>"],
    }  # fmt: skip
    config = merged(merged(released_config(kind, size), SHRUNK), tokens)
    config["talker_config"]["hidden_size"] = hidden
    if kind == "base":
        config["speaker_encoder_config"] = {
            "enc_dim": hidden,
            "sample_rate": 24000,
            **SHRUNK_SPEAKER,
        }
    return config


def tiny_codec() -> dict[str, Any]:
    return merged(released_codec(), SHRUNK_CODEC)


def write_tiny(
    directory: str | Path, seed: int = 0, kind: Kind = "custom_voice", size: str = "1b7"
) -> None:
    """Write a tiny checkpoint into `directory`. The same seed gives the same bytes."""
    folder = Path(directory)
    config, codec = tiny_config(kind, size), tiny_codec()
    parsed = parse(config, codec, "the tiny config", "the tiny codec")
    write_weights(folder, _model(parsed, seed))
    write_weights(folder / CODEC, _codec(parsed, seed))
    write_text_files(folder)
    write_json(folder / CODEC / "config.json", codec)
    write_config(folder, config)


def write_text_files(folder: Path) -> None:
    """The tokenizer, in the three files that the released models have."""
    write_json(folder / "generation_config.json", GENERATION)
    write_json(folder / "tokenizer_config.json", {**tokenizer_config(), "chat_template": None})
    write_vocabulary(folder)


def write_design(directory: str | Path, seed: int = 0) -> None:
    write_tiny(directory, seed, "voice_design")


def write_base(directory: str | Path, seed: int = 0) -> None:
    write_tiny(directory, seed, "base")


def write_small(directory: str | Path, seed: int = 0) -> None:
    write_tiny(directory, seed, "custom_voice", "0b6")


def write_small_base(directory: str | Path, seed: int = 0) -> None:
    write_tiny(directory, seed, "base", "0b6")


def model_shapes(config: TtsConfig) -> dict[str, Shape]:
    """Every tensor of model.safetensors."""
    shapes = _shapes(lambda: Talker(config), "talker.")
    speaker = config.speaker
    if speaker is not None:
        shapes |= _shapes(lambda: SpeakerEncoder(speaker), "speaker_encoder.")
    return shapes


def codec_shapes(config: TtsConfig) -> dict[str, Shape]:
    """Every tensor of speech_tokenizer/model.safetensors."""
    decoder = _shapes(lambda: CodecDecoder(config.vocoder), "decoder.")
    return decoder | _shapes(lambda: CodecEncoder(config.encoder), "encoder.")


def _shapes(make: Callable[[], nn.Module], prefix: str) -> dict[str, Shape]:
    return tensor_shapes(build(make, "meta", torch.float32), prefix)


def _model(config: TtsConfig, seed: int) -> Weights:
    weights = random_weights(model_shapes(config), seed)
    _steer(weights, config)
    return weights


def _steer(weights: Weights, config: TtsConfig) -> None:
    """Let speech end some frames after its text: the end code's row looks for the padding text
    row."""
    row = padding_row(weights["talker.model.text_embedding.weight"], weights, config.tokens.tts_pad)
    weights["talker.codec_head.weight"][config.talker.codec.eos] = np.float32(SCALE) * row


def _codec(config: TtsConfig, seed: int) -> Weights:
    weights = random_weights(codec_shapes(config), seed)
    for name, values in weights.items():
        if name.endswith("cluster_usage"):
            weights[name] = np.abs(values) + np.float32(0.5)
        elif name.endswith("initialized"):
            weights[name] = np.ones_like(values)
    return weights

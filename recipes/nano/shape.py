"""The checkpoint's shape: its config.json, derived from the released one, and its special token
ids.

Used by every step that trains or writes weights."""

from __future__ import annotations

from typing import Any

from stretto import embedded
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.testing.qwen3_omni import released_config
from stretto.testing.tiny_tokenizer import SPECIAL

NUM_BPE = 2048
VOCAB = 2112  # the tokenizer's ids and a few that no text has
CODES, GROUPS = 512, 16
SENTENCE = 90
"""Characters that are read aloud at once: the longest sentences of the training have so many."""
HIDDEN = 256
HEAD = 64
_MROPE = {"rope_type": "default", "mrope_section": [12, 10, 10], "interleaved": True}
_LM = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "hidden_size": HIDDEN}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}

_CHANGES: dict[str, Any] = {
    "dtype": "bfloat16",
    embedded.DECLARATION: {"sentence": SENTENCE, "normalise": "en"},
    "thinker_config": {
        "audio_config": {
            "d_model": 192,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 512,
            "downsample_hidden_size": 48,
            "output_dim": HIDDEN,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,  # nothing trains it: only as large as the layout needs
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1],
        },
        "text_config": {
            **_LM,
            **_MOE,
            "vocab_size": VOCAB,
            "intermediate_size": 512,
            "num_hidden_layers": 5,
            "moe_intermediate_size": 256,
            "max_position_embeddings": 4096,
            "rope_scaling": _MROPE,
        },
    },
    "talker_config": {
        "accept_hidden_layer": 3,
        "thinker_hidden_size": HIDDEN,
        "codec_pad_id": CODES,
        "codec_bos_id": CODES + 1,
        "codec_eos_token_id": CODES + 2,
        "codec_nothink_id": CODES + 3,
        "codec_think_bos_id": CODES + 4,
        "codec_think_eos_id": CODES + 5,
        "speaker_id": {
            "nano": CODES + 16,
            "ethan": CODES + 16,
        },  # "ethan" is what clients of Qwen3-Omni ask for
        "text_config": {
            **_LM,
            **_MOE,
            "vocab_size": CODES + 1024,  # the last 1024 are never drawn, but for the end code
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "moe_intermediate_size": 192,
            "shared_expert_intermediate_size": 512,
            "max_position_embeddings": 4096,
            "rope_scaling": _MROPE,
        },
        "code_predictor_config": {
            **_LM,
            "vocab_size": CODES,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "max_position_embeddings": 64,
            "layer_types": ["full_attention"] * 3,
        },
    },
    "code2wav_config": {
        "codebook_size": CODES,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "decoder_dim": 256,
        "sliding_window": 72,
    },
}


def special_ids() -> dict[str, int]:
    return {token: NUM_BPE + i for i, token in enumerate(SPECIAL)}


def config_json(roles: dict[str, int]) -> dict[str, Any]:
    """config.json; `roles` are the ids of the three role words, which the tokenizer decides."""
    ids = special_ids()
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
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        **{f"{role}_token_id": i for role, i in roles.items()},
        "thinker_config": {
            **media,
            "vision_end_token_id": ids["<|vision_end|>"],
            "user_token_id": roles["user"],
        },
        "talker_config": media,
    }
    return _merged(_merged(released_config(), _CHANGES), tokens)


def config(roles: dict[str, int]) -> OmniConfig:
    return parse(config_json(roles), "the nano config")


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        # Voices are replaced, not added to.
        deep = isinstance(old, dict) and isinstance(value, dict) and key != "speaker_id"
        result[key] = _merged(old, value) if deep else value
    return result

"""Reading config.json: the released values, and an error that names the field for everything
wrong."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import CheckpointError, Invalid
from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens, conv_length, parse
from stretto.testing.qwen3_omni import released_config, tiny_config


def changed(path: str, value: object) -> dict[str, Any]:
    """The released config with one dotted field set, or removed when the value is ..."""
    raw = copy.deepcopy(released_config())
    *parents, key = path.split(".")
    section = raw
    for p in parents:
        section = section[p]
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return raw


def test_released_values() -> None:
    c = parse(released_config())
    t, s, p = c.thinker.text, c.talker.text, c.talker.predictor
    assert (t.num_layers, t.hidden_size, t.num_heads, t.num_kv_heads, t.head_dim) == (
        48,
        2048,
        32,
        4,
        128,
    )
    assert (s.num_layers, s.hidden_size, s.num_heads, s.num_kv_heads, s.head_dim) == (
        20,
        1024,
        16,
        2,
        128,
    )
    assert (p.num_layers, p.hidden_size, p.num_heads, p.num_kv_heads, p.dense_size) == (
        5,
        1024,
        16,
        8,
        3072,
    )
    assert t.moe is not None
    assert s.moe is not None
    assert (t.moe.num_experts, t.moe.top_k, t.moe.expert_size, t.moe.shared_size) == (
        128,
        8,
        768,
        None,
    )
    assert (s.moe.num_experts, s.moe.top_k, s.moe.expert_size, s.moe.shared_size) == (
        128,
        6,
        384,
        768,
    )
    assert t.mrope_section == s.mrope_section == (24, 20, 20)
    assert p.mrope_section is None
    assert p.moe is None
    assert (t.rope_theta, s.rope_theta, p.rope_theta, c.code2wav.rope_theta) == (1e6, 1e6, 1e6, 1e4)
    assert (t.rms_eps, c.code2wav.rms_eps) == (1e-6, 1e-5)
    assert (c.tokens.im_start, c.tokens.im_end, c.tokens.audio_pad, c.tokens.tts_eos) == (
        151644,
        151645,
        151675,
        151673,
    )
    assert (c.talker.codec.eos, c.talker.accept_layer, c.talker.positions_per_second) == (
        2150,
        24,
        13.0,
    )
    assert c.thinker.vision.deepstack_layers == (8, 16, 24)
    assert c.code2wav.samples_per_frame == 1920
    assert c.code2wav.samples_dropped == 555


@pytest.mark.skipif(
    "STRETTO_TEST_SIZES" in os.environ, reason="about the tiny checkpoint's own sizes"
)
def test_reads_a_checkpoint(tiny_dir: Path) -> None:
    assert OmniConfig.read(tiny_dir) == parse(tiny_config())


def test_agrees_with_the_reference_library(tiny_dir: Path, tmp_path: Path) -> None:
    """The same file, saved again by transformers in its newer style, means the same."""
    from transformers import Qwen3OmniMoeConfig

    Qwen3OmniMoeConfig.from_pretrained(tiny_dir).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved["thinker_config"]["text_config"]
    assert OmniConfig.read(tmp_path) == OmniConfig.read(tiny_dir)


def leaves(raw: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in raw.items():
        path = f"{prefix}{key}"
        found += leaves(value, f"{path}.") if isinstance(value, dict) else [path]
    return found


def attempt(raw: object) -> tuple[OmniConfig | None, str | None]:
    try:
        return parse(raw, "here/config.json"), None
    except CheckpointError as e:
        return None, str(e)


def test_a_missing_field_is_named() -> None:
    """Every field, removed one at a time: either nothing depends on it, or the error names it. No
    default steps in."""
    plain = parse(released_config())
    needed = 0
    for path in leaves(released_config()):
        result, error = attempt(changed(path, ...))
        if error is None:
            assert result == plain or path.startswith("talker_config.speaker_id."), path
        else:
            assert error.startswith("here/config.json: ")
            assert path.split(".")[-1].removeprefix("num_") in error, path
            needed += 1
    assert needed >= 99


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "llama", "model_type must be 'qwen3_omni_moe', got 'llama'"),
        ("thinker_config", [], "thinker_config. must be an object"),
        (
            "thinker_config.text_config.hidden_size",
            "2048",
            "thinker_config.text_config.hidden_size must be an integer",
        ),
        (
            "thinker_config.text_config.hidden_size",
            True,
            "hidden_size must be an integer, got True",
        ),
        (
            "thinker_config.text_config.num_hidden_layers",
            0,
            "num_hidden_layers must be at least 1, got 0",
        ),
        ("thinker_config.text_config.rms_norm_eps", "small", "rms_norm_eps must be a number"),
        (
            "thinker_config.text_config.norm_topk_prob",
            1,
            "norm_topk_prob must be true or false, got 1",
        ),
        (
            "thinker_config.text_config.num_key_value_heads",
            5,
            "must be a multiple of num_key_value_heads (5)",
        ),
        (
            "thinker_config.text_config.num_experts_per_tok",
            129,
            "num_experts_per_tok (129) exceeds num_experts (128)",
        ),
        (
            "thinker_config.text_config.rope_scaling",
            {"mrope_section": [24, 20, 19]},
            "sum to head_dim/2 = 64",
        ),
        ("thinker_config.text_config.hidden_act", "gelu", "other than silu"),
        (
            "thinker_config.audio_token_id",
            152064,
            "audio_token_id is 152064, outside the vocabulary of 152064",
        ),
        ("tts_pad_token_id", -1, "tts_pad_token_id must be at least 0"),
        (
            "thinker_config.audio_config.n_window_infer",
            750,
            "n_window_infer (750) must be a multiple",
        ),
        (
            "thinker_config.audio_config.output_dim",
            1024,
            "thinker_config.audio_config.output_dim is 1024",
        ),
        ("thinker_config.vision_config.num_position_embeddings", 2000, "must be a square"),
        ("thinker_config.vision_config.deepstack_visual_indexes", [8, 16, 27], "exceeds depth 27"),
        (
            "thinker_config.vision_config.deepstack_visual_indexes",
            "8",
            "must be a list of integers",
        ),
        (
            "talker_config.codec_eos_token_id",
            3072,
            "codec_eos_token_id is 3072, outside the vocabulary of 3072",
        ),
        ("talker_config.speaker_id", {}, "speaker_id must name at least one voice"),
        (
            "talker_config.speaker_id",
            {"ethan": 4000},
            "talker_config.speaker_id.ethan is 4000, outside",
        ),
        ("talker_config.thinker_hidden_size", 1024, "thinker_hidden_size must equal"),
        (
            "talker_config.accept_hidden_layer",
            49,
            "accept_hidden_layer (49) exceeds the thinker's 48 layers",
        ),
        (
            "talker_config.code_predictor_config.hidden_size",
            512,
            "code_predictor_config.hidden_size must equal",
        ),
        (
            "code2wav_config.num_quantizers",
            8,
            "num_quantizers must equal the talker's num_code_groups (16)",
        ),
        ("code2wav_config.num_key_value_heads", 8, "num_key_value_heads other than"),
        ("code2wav_config.codebook_size", 1024, "codebook_size is smaller"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(changed(path, value), "here/config.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("here/config.json: ")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        OmniConfig.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        OmniConfig.read(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        OmniConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="the top level must be an object"):
        OmniConfig.read(tmp_path)


def test_voices() -> None:
    talker = parse(released_config()).talker
    assert talker.speaker_id("Chelsie") == talker.speaker_id("chelsie") == 2301
    assert talker.default_voice == "ethan"
    with pytest.raises(
        Invalid, match="unknown voice 'nobody'; this model has chelsie, ethan, aiden"
    ) as caught:
        talker.speaker_id("nobody")
    assert caught.value.param == "voice"


def test_names_of_one_voice() -> None:
    """The first one is its name, the others are aliases."""
    config = released_config()
    config["talker_config"]["speaker_id"] = {"Nano": 2301, "ethan": 2301, "aiden": 2303, "n": 2301}
    talker = parse(config).talker
    assert (talker.voices, talker.default_voice) == (("nano", "aiden"), "nano")
    assert talker.voice_aliases == {"ethan": "nano", "n": "nano"}
    assert talker.speaker_id("Ethan") == 2301
    with pytest.raises(Invalid, match="this model has nano, aiden"):
        talker.speaker_id("nobody")


def test_audio_token_counts() -> None:
    """Against the reference's own formula, for every length up to fifty seconds."""
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    assert [audio_tokens(n) for n in range(1, 5001)] == [
        _get_feat_extract_output_lengths(n) for n in range(1, 5001)
    ]
    assert audio_tokens(0) == 0
    assert conv_length(128) == 16


@pytest.mark.parametrize("huge", [10**30, float("nan"), float("inf")])
def test_sizes_beyond_all_bounds_are_refused(huge: float) -> None:
    """Every number, one at a time: refused, or nothing depends on it. Nothing is built from such a
    size."""
    raw, refused = released_config(), 0
    plain = parse(raw)
    for path in leaves(raw):
        value = raw
        for key in path.split("."):
            value = value[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        result, error = attempt(changed(path, huge))
        assert error is not None or result == plain, path
        refused += error is not None
    assert refused >= 90


@pytest.mark.parametrize(
    "path",
    [
        "thinker_config.text_config.num_hidden_layers", "thinker_config.text_config.num_experts",
        "thinker_config.audio_config.encoder_layers", "thinker_config.vision_config.depth",
        "talker_config.text_config.num_hidden_layers",
        "talker_config.code_predictor_config.num_hidden_layers",
        "talker_config.num_code_groups", "code2wav_config.num_hidden_layers",
    ],
)  # fmt: skip
def test_a_million_layers_are_refused_before_one_is_made(path: str) -> None:
    with pytest.raises(CheckpointError, match=f"{path} must be at most 1,024"):
        parse(changed(path, 10**6), "here/config.json")

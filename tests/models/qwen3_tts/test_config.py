"""Configurations: what is read of the released ones, and errors that name the field."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.errors import CheckpointError, Invalid
from stretto.models.qwen3_tts.config import parse
from stretto.models.qwen3_tts.params import ClonedVoice
from stretto.params import Params, RequestOptions, SpeechStyle
from stretto.registry import open_model
from stretto.testing.qwen3_tts import (
    codec_shapes,
    model_shapes,
    released_codec,
    released_config,
    tiny_codec,
    tiny_config,
)
from tests.models.qwen3_tts.conftest import Checkpoint
from tests.models.sizes import shapes_digest


@pytest.mark.parametrize(
    ("kind", "size", "parameters", "tensors", "digest"),
    [
        ("custom_voice", "0b6", 905_788_672, 402, "a5a95b28c38ed745"),
        ("base", "0b6", 914_643_008, 478, "29fccd65c814acdf"),
        ("custom_voice", "1b7", 1_916_676_352, 404, "c0bbb7444d8ff881"),
        ("voice_design", "1b7", 1_916_676_352, 404, "c0bbb7444d8ff881"),
        ("base", "1b7", 1_928_677_440, 480, "8b6b4ab28af6c84e"),
    ],
)
def test_released_shapes_are_of_the_published_size(
    kind: Any, size: str, parameters: int, tensors: int, digest: str
) -> None:
    """Names and shapes come from the modules; the digests are of lists written by hand."""
    config = parse(released_config(kind, size), released_codec())
    shapes, codec = model_shapes(config), codec_shapes(config)
    assert (sum(map(prod, shapes.values())), len(shapes)) == (parameters, tensors)
    assert (sum(map(prod, codec.values())), len(codec)) == (170_557_441, 496)
    assert (shapes_digest(shapes), shapes_digest(codec)) == (digest, "1da36514b58ac7bc")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model_type", "qwen3_omni_moe", "model_type"),
        ("tts_model_type", "sing", "tts_model_type"),
        ("tts_model_size", None, "tts_model_size is missing"),
        ("talker_config.head_dim", None, "talker_config.head_dim is missing"),
        ("talker_config.text_vocab_size", None, "talker_config.text_vocab_size is missing"),
        ("talker_config.codec_eos_token_id", 4000, "talker_config.codec_eos_token_id"),
        ("talker_config.rope_scaling.mrope_section", [1, 1, 1], "mrope_section"),
        ("talker_config.spk_id", {}, "talker_config.spk_id"),
        ("talker_config.spk_is_dialect", {"eric": "martian"}, "spk_is_dialect"),
        ("talker_config.code_predictor_config", 5, "talker_config.code_predictor_config."),
        ("tts_pad_token_id", 10**6, "tts_pad_token_id"),
        ("codec.model_type", "mimi", "model_type"),
        ("codec.decoder_config.codebook_dim", None, "decoder_config.codebook_dim is missing"),
        ("codec.decoder_config.num_quantizers", 8, "num_quantizers"),
        ("codec.decode_upsample_rate", 2000, "decode_upsample_rate"),
        ("codec.output_sample_rate", 16000, "output_sample_rate"),
        ("codec.encoder_valid_num_quantizers", 8, "encoder_valid_num_quantizers"),
    ],
)
def test_errors_name_the_field(path: str, value: Any, named: str) -> None:
    files = {"model": tiny_config(), "codec": tiny_codec()}
    *way, last = (path if path.startswith("codec.") else f"model.{path}").split(".")
    files = copy.deepcopy(files)
    at: Any = files
    for key in way:
        at = at[key]
    at[last] = value
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        parse(files["model"], files["codec"])


def test_languages_and_voices() -> None:
    config = parse(tiny_config(), tiny_codec())
    assert config.language_id(None, "ryan") is None
    assert config.language_id("Chinese", "ryan") == 2055
    assert config.language_id("auto", "Eric") == config.language_id("chinese", "eric") == 2062, (
        "a dialect of its own"
    )
    assert config.language_id("english", "eric") == 2050
    for wrong in ("klingon", "sichuan_dialect"):
        with pytest.raises(Invalid, match="unknown language"):
            config.language_id(wrong, None)
    assert config.speaker_id("VIVIAN") == 3065
    with pytest.raises(Invalid, match="unknown voice"):
        config.speaker_id("nobody")
    assert config.takes_instructions
    assert not parse(tiny_config(size="0b6"), tiny_codec()).takes_instructions


def test_the_checkpoints_own_sampling_is_the_default(tts: Checkpoint, tmp_path: Path) -> None:
    """Of code 0 and of the other codes, where a request says nothing; what it says counts for code
    0."""
    folder = tmp_path / "changed"
    shutil.copytree(tts("custom_voice"), folder)
    file = folder / "generation_config.json"
    assert open_model(folder).info.defaults == Params(max_frames=8191), (
        "as released: 8192 picks, the last one the end"
    )
    read = {
        "temperature": 0.6,
        "top_k": 7,
        "top_p": 0.8,
        "repetition_penalty": 1.2,
        "max_new_tokens": 100,
    }
    file.write_text(
        json.dumps(
            {**read, "subtalker_temperature": 0.3, "subtalker_top_k": 3, "subtalker_top_p": 0.4}
        )
    )
    model = open_model(folder)
    params = talker_params(model, model.info.defaults)
    assert params.max_frames == 99
    assert drawn(params.code0) == (0.6, 7, 0.8, 1.2)
    assert drawn(params.residual) == (0.3, 3, 0.4, 1.0)
    changed = replace(model.info.defaults, speech_temperature=0.2, speech_top_k=5)
    assert drawn(talker_params(model, changed).code0) == (0.2, 5, 0.8, 1.2)
    file.write_text(json.dumps({"do_sample": False, "subtalker_dosample": False}))
    params = talker_params(model := open_model(folder), model.info.defaults)
    assert (params.code0.temperature, params.residual.temperature) == (0.0, 0.0)
    for wrong, named in (
        ({"top_p": "high"}, "top_p must be"),
        ({"subtalker_top_p": 3}, "subtalker_top_p must be"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=named):
            open_model(folder)


def test_what_a_request_tells_the_stages(tts: Checkpoint) -> None:
    """At least two frames, as the model was made; a complete text whole, but for cloned voices; the
    vocoder hears a cloned voice first."""
    for kind, whole in (("custom_voice", True), ("voice_design", True), ("base", False)):
        read = talker_params(open_model(tts(kind)), Params())
        assert (read.min_frames, read.whole) == (2, whole)
    model = open_model(tts("base"))
    assert talker_params(model, Params(max_frames=1)).min_frames == 1
    voice = ClonedVoice(bytes(4 * 48), bytes(2 * 16 * 3), (1, 2))
    read = model.stage_params(
        RequestOptions(
            "tts",
            Params(seed=3),
            style=SpeechStyle(voice=msgspec.msgpack.encode(voice)),
            tts_ids=(1,),
            tts_streaming=True,
        )
    )
    assert (read["talker"].cloned, read["talker"].whole) == (voice, False)  # type: ignore[attr-defined]
    assert read["code2wav"].codes == voice.codes  # type: ignore[attr-defined]


def talker_params(model: Any, params: Params) -> Any:
    options = RequestOptions("tts", replace(params, seed=3), tts_ids=(1,))
    return model.stage_params(options)["talker"]


def drawn(s: Any) -> tuple[float, int, float, float]:
    return s.temperature, s.top_k, s.top_p, s.repetition_penalty


def test_a_million_layers_are_refused_before_one_is_made() -> None:
    raw, codec = released_config("base", "1b7"), released_codec()
    for where, path in (
        (raw, "talker_config.num_hidden_layers"),
        (raw, "talker_config.code_predictor_config.num_hidden_layers"),
        (raw, "talker_config.num_code_groups"),
        (codec, "decoder_config.num_hidden_layers"),
        (codec, "decoder_config.num_quantizers"),
        (codec, "encoder_config.num_hidden_layers"),
    ):
        *parents, key = path.split(".")
        wrong = copy.deepcopy(where)
        section = wrong
        for parent in parents:
            section = section[parent]
        section[key] = 10**6
        with pytest.raises(CheckpointError, match=f"{path} must be at most 1,024"):
            parse(wrong if where is raw else raw, wrong if where is codec else codec)

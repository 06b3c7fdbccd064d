"""The tiny checkpoint: complete, reproducible, alive, and readable by the reference library."""

from __future__ import annotations

import filecmp
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.testing.qwen3_omni import (
    checkpoint_shapes,
    released_config,
    tiny_config,
    tiny_weights,
    write_tiny,
)
from stretto.testing.tiny_tokenizer import (
    CHAT_TEMPLATE,
    ROLES,
    SPECIAL,
    WORDS,
    byte_letters,
    token_ids,
    tokenizer_json,
)
from tests.models.sizes import shapes_digest
from tests.oracle import PromptMaker, example_prompts, generate

TOKENIZER = Tokenizer.from_str(tokenizer_json())


@pytest.mark.parametrize(
    ("raw", "digest"),
    [(tiny_config(), "d5e12726695dff64"), (released_config(), "219440fda6cabe6e")],
    ids=["tiny", "released"],
)
def test_modules_take_the_tensors_of_the_released_layout(raw: dict[str, Any], digest: str) -> None:
    """Names and shapes come from the modules; the digests are of lists written by hand."""
    assert shapes_digest(checkpoint_shapes(parse(raw))) == digest


def test_released_model_has_the_published_size() -> None:
    shapes = checkpoint_shapes(parse(released_config()))
    assert len(shapes) == 28_010
    assert sum(math.prod(s) for s in shapes.values()) == 35_259_818_545


def test_files_are_complete(tiny_dir: Path, tiny_config: OmniConfig) -> None:
    index = json.loads((tiny_dir / "model.safetensors.index.json").read_text())
    shapes = checkpoint_shapes(tiny_config)
    assert set(index["weight_map"]) == set(shapes)
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert index["metadata"]["total_size"] == 4 * sum(math.prod(s) for s in shapes.values()) < 30e6
    for name in (
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer_config.json",
        "vocab.json",
    ):
        assert json.loads((tiny_dir / name).read_text())


@pytest.mark.skipif(
    "STRETTO_TEST_SIZES" in os.environ, reason="about the tiny checkpoint's own sizes"
)
def test_same_seed_same_bytes(tiny_dir: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "again", seed=0)
    names = sorted(p.name for p in tiny_dir.iterdir())
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == names
    same, differ, failed = filecmp.cmpfiles(tiny_dir, tmp_path / "again", names, shallow=False)
    assert (sorted(same), differ, failed) == (names, [], [])


@pytest.mark.parametrize("cpu", ["Prescott", "Haswell"])
def test_same_bytes_with_the_matrix_products_of_another_cpu(
    cpu: str, tiny_dir: Path, tmp_path: Path
) -> None:
    write = "import sys; from stretto.registry import write_tiny; write_tiny(sys.argv[1])"
    env = os.environ | {"OPENBLAS_CORETYPE": cpu}
    subprocess.run([sys.executable, "-c", write, str(tmp_path)], env=env, check=True)
    names = [p.name for p in tiny_dir.glob("*.safetensors")]
    assert filecmp.cmpfiles(tiny_dir, tmp_path, names, shallow=False) == (names, [], [])


def test_other_seed_changes_every_tensor(tiny_config: OmniConfig) -> None:
    one, two = tiny_weights(tiny_config, 0), tiny_weights(tiny_config, 1)
    assert not [name for name in one if np.array_equal(one[name], two[name])]


@pytest.mark.parametrize("shards", [1, 7])
def test_any_number_of_shards(shards: int, tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == shards


def test_nothing_is_dead(tiny_config: OmniConfig) -> None:
    """Scales, gammas and biases are far from the values that would make their path vanish."""
    weights = tiny_weights(tiny_config, 0)
    for name, w in weights.items():
        assert np.isfinite(w).all(), name
        assert np.abs(w).max() > 0.01 if w.size > 1 else w.any(), name
        if name.endswith((".scale", ".gamma")):
            assert 0.05 < np.abs(w).mean() < 1.0, name


def test_structure_is_the_released_one(tiny_config: OmniConfig) -> None:
    real = parse(released_config())
    assert tiny_config.talker.codec == real.talker.codec
    assert tiny_config.talker.speakers == real.talker.speakers
    assert tiny_config.talker.num_code_groups == real.talker.num_code_groups == 16
    assert tiny_config.talker.text.vocab_size == 3072
    assert tiny_config.talker.predictor.vocab_size == tiny_config.code2wav.codebook_size == 2048
    for c in (tiny_config.code2wav, real.code2wav):
        assert (c.samples_per_frame, c.samples_dropped, c.window) == (1920, 555, 72)
    assert tiny_config.thinker.audio.window_frames == real.thinker.audio.window_frames == 800
    assert tiny_config.thinker.audio.chunk_frames == real.thinker.audio.chunk_frames == 100
    levels = len(tiny_config.thinker.vision.deepstack_layers)
    assert (
        levels == len(real.thinker.vision.deepstack_layers) == 3 < tiny_config.talker.accept_layer
    )


def test_reference_loads_it_and_answers(oracle: Any, prompts: PromptMaker) -> None:
    """Loading asserts that no key is missing or unexpected; an answer is varied and inside the
    clamp."""
    run = generate(oracle, example_prompts(prompts)["system"], max_text=40, max_frames=40)
    assert run.text[-1] == oracle.config.im_end_token_id
    assert len(run.text) > 5 < len(set(run.text))
    assert len(run.codes) == len(run.first_codes) - 1 >= len(run.text) - 1
    assert all(run.codes[:, g].unique().numel() > len(run.codes) // 2 for g in range(16))
    assert run.waveform.numel() == 1920 * len(run.codes) - 555
    assert run.waveform.std() > 0.02
    assert run.waveform.abs().max() < 0.95


@pytest.mark.parametrize("seed", [0, 3])
def test_waveform_never_meets_the_clamp(seed: int, tiny_config: OmniConfig, oracle: Any) -> None:
    if seed == 0:
        vocoder = oracle.code2wav
    else:
        weights = tiny_weights(tiny_config, seed)
        vocoder = type(oracle.code2wav)._from_config(
            oracle.config.code2wav_config, attn_implementation="eager"
        )
        mine = {
            k.removeprefix("code2wav."): torch.from_numpy(v)
            for k, v in weights.items()
            if "code2wav." in k
        }
        missing, unexpected = vocoder.load_state_dict(mine, strict=False)
        assert not unexpected
        assert all("inv_freq" in k or k == "code_offset" for k in missing)
    codes = torch.randint(0, 2048, (1, 16, 30), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        wave = vocoder.eval()(codes.to(vocoder.device))
    assert wave.std() > 0.02
    assert wave.abs().max() < 0.95


def test_ids_agree_with_the_tokenizer(tiny_config: OmniConfig, tiny_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    t = tiny_config.tokens
    expected = {
        "<|im_start|>": t.im_start, "<|im_end|>": t.im_end, "system": t.system, "user": t.user,
        "assistant": t.assistant, "<|audio_start|>": t.audio_start, "<|audio_pad|>": t.audio_pad,
        "<|vision_start|>": t.vision_start, "<|image_pad|>": t.image_pad,
        "<|video_pad|>": t.video_pad,
        "<tts_pad>": t.tts_pad, "<tts_text_bos>": t.tts_bos, "<tts_text_eod>": t.tts_eos,
    }  # fmt: skip
    assert {token: tokenizer.token_to_id(token) for token in expected} == expected
    assert tokenizer.get_vocab() == token_ids()
    assert tokenizer.get_vocab_size() <= tiny_config.thinker.text.vocab_size


def test_roles_words_and_newline_are_one_token() -> None:
    for text in [*ROLES, "\n", *WORDS, *(f" {w}" for w in WORDS)]:
        assert len(TOKENIZER.encode(text).ids) == 1, text
    assert TOKENIZER.encode("<|im_start|>assistant\n").tokens == ["<|im_start|>", "assistant", "Ċ"]
    for token in SPECIAL:
        assert TOKENIZER.encode(f"a{token}b").tokens == ["a", token, "b"]


def test_tool_tokens_are_shown_and_markers_are_not() -> None:
    ids = TOKENIZER.encode(
        "<think>a</think><tool_call>b</tool_call><|audio_start|><tts_pad><|im_end|>"
    ).ids
    assert (
        TOKENIZER.decode(ids, skip_special_tokens=True)
        == "<think>a</think><tool_call>b</tool_call>"
    )


@given(st.text() | st.text(alphabet=st.sampled_from("the water \n\t'sé日🎵\u0301<|im_end|>")))
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.binary(max_size=40))
def test_any_bytes_have_tokens(data: bytes) -> None:
    """Byte tokens in any order decode as UTF-8 with replacement: no id is without text."""
    letters, ids = byte_letters(), token_ids()
    text = TOKENIZER.decode([ids[letters[b]] for b in data])
    assert text == data.decode("utf-8", errors="replace")


# The chat template


def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return env.from_string(CHAT_TEMPLATE).render(messages=messages, **kwargs)


def test_template_turns() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}],
        },
        {"role": "user", "content": "  spaces\nstay  "},
    ]
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi you<|im_end|>\n<|im_start|>user\n  spaces\nstay  <|im_end|>\n"
    )
    assert render(messages) == expected
    assert render(messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("audio", "input_audio", "audio_url"), "<|audio_start|><|audio_pad|><|audio_end|>"),
        (("image", "image_url"), "<|vision_start|><|image_pad|><|vision_end|>"),
        (("video", "video_url"), "<|vision_start|><|video_pad|><|vision_end|>"),
    ],
)
def test_template_media(kinds: tuple[str, ...], expected: str) -> None:
    for kind in kinds:
        content = [
            {"type": "text", "text": "see"},
            {"type": kind, kind: {"url": "x"}},
            {"type": "text", "text": "?"},
        ]
        assert (
            render([{"role": "user", "content": content}])
            == f"<|im_start|>user\nsee{expected}?<|im_end|>\n"
        )


def test_template_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    spelled = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    text = render(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [call, spelled]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "Done", "tool_calls": [call]},
        ],
        tools=[tool],
    )
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == tool
    assert rest == (
        "<|im_start|>user\nGo<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nDone\n<tool_call>\n{"name": "f", "arguments": {"x": '
        "1}}\n</tool_call><|im_end|>\n"
    )
    assert render([{"role": "user", "content": "Go"}], tools=[tool]).startswith(
        "<|im_start|>system\n# Tools\n"
    )


def test_reference_library_reads_tokenizer_and_template(tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_dir)
    messages = [
        {"role": "system", "content": "You are a voice."},
        {
            "role": "user",
            "content": [
                {"type": "audio", "audio": "x"},
                {"type": "text", "text": "Héllo e\u0301 日本"},
            ],
        },
    ]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render(messages, add_generation_prompt=True)
    ids = TOKENIZER.encode(text).ids
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert (theirs.image_token, theirs.audio_token, theirs.video_token) == (
        "<|image_pad|>", "<|audio_pad|>", "<|video_pad|>",
    )  # fmt: skip
    assert (theirs.vision_bos_token, theirs.vision_eos_token) == (
        "<|vision_start|>",
        "<|vision_end|>",
    )
    assert (theirs.audio_bos_token, theirs.audio_eos_token) == ("<|audio_start|>", "<|audio_end|>")
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_reference_library_reads_preprocessor_and_generation_config(tiny_dir: Path) -> None:
    from transformers import AutoFeatureExtractor, GenerationConfig

    audio = AutoFeatureExtractor.from_pretrained(tiny_dir)
    assert type(audio).__name__ == "WhisperFeatureExtractor"
    assert (audio.feature_size, audio.sampling_rate, audio.hop_length, audio.n_fft) == (
        128,
        16000,
        160,
        400,
    )
    assert GenerationConfig.from_pretrained(tiny_dir).to_dict()["talker_max_new_tokens"] == 4096

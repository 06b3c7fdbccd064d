"""Prompts from messages: equal to the reference processor, and clear about what is wrong with a
request."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from stretto.errors import CheckpointError, Invalid, MediaError, TooLong
from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.preprocess.audio import decode_pcm16
from stretto.preprocess.media import Budget, MediaLimits, load_image, open_image
from stretto.preprocess.mel import mel
from stretto.preprocess.prompt import Prompt
from tests.preprocess.samples import (
    FIXED,
    b64,
    data_uri,
    image_file,
    picture,
    sound_file,
    tone,
    video_file,
)

Part = dict[str, Any]


class GridsOnly:
    """Stands in for the reference's video processor, which needs torchvision: knows the grids,
    makes no pixels."""

    merge_size = temporal_patch_size = 2

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        return {"video_grid_thw": np.array(videos)}


class Processor(Qwen3OmniMoeProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


@pytest.fixture(scope="module")
def processor(tiny_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    images = Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 3136, "longest_edge": 12_845_056},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    sound = WhisperFeatureExtractor(feature_size=128)
    return Processor(images, GridsOnly(), sound, tokenizer, chat_template=tokenizer.chat_template)


def user(*parts: Part | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


def sound_part(samples: np.ndarray, rate: int = 16_000) -> Part:
    wav = sound_file(samples, rate, subtype="FLOAT")
    return {"type": "input_audio", "input_audio": {"data": b64(wav), "format": "wav"}}


def image_part(**size: int) -> Part:
    return {
        "type": "image_url",
        "image_url": {"url": data_uri(image_file(picture(**size)), "image/png")},
    }


def video_part(data: bytes) -> Part:
    return {"type": "video_url", "video_url": {"url": data_uri(data, "video/mp4")}}


def reference(processor: Any, messages: list[dict[str, Any]], **media: Any) -> Any:
    turns = [
        {
            "role": m["role"],
            "content": m["content"]
            if isinstance(m["content"], str)
            else [p if p["type"] == "text" else {"type": p["type"]} for p in m["content"]],
        }
        for m in messages
    ]
    text = processor.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    return processor(text=text, return_tensors="np", **media)


def ends_well(prompt: Prompt, config: OmniConfig) -> bool:
    return prompt.ids[-3:-1] == (config.tokens.im_start, config.tokens.assistant)


# Equal to the reference


def test_text(builder: PromptBuilder, processor: Any) -> None:
    messages = [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": "Hello there, what is the weather? 日本 😀\n"},
        {"role": "assistant", "content": " Fine.\n\n"},
        {"role": "user", "content": "Thanks"},
    ]
    prompt = builder.build(messages)
    assert list(prompt.ids) == reference(processor, messages)["input_ids"][0].tolist()
    assert ends_well(prompt, builder.config)
    assert (prompt.audios, prompt.images, prompt.videos, prompt.audio_in_video) == (
        (),
        (),
        (),
        False,
    )


@pytest.mark.parametrize("seconds", [0.02, 0.5, 1.0, 1.237, 3.0])
def test_audio(seconds: float, builder: PromptBuilder, processor: Any) -> None:
    samples = tone(seconds)
    messages = [user(sound_part(samples), "What was that?")]
    prompt = builder.build(messages)
    theirs = reference(processor, messages, audio=[samples])
    assert list(prompt.ids) == theirs["input_ids"][0].tolist()
    assert np.abs(prompt.audios[0].mel - theirs["input_features"][0]).max() < 1e-4
    assert prompt.ids.count(builder.config.tokens.audio_pad) == audio_tokens(len(samples) // 160)


def test_images(builder: PromptBuilder, processor: Any) -> None:
    messages = [user(image_part(width=90, height=70), "and", image_part(width=200, height=40), "?")]
    prompt = builder.build(messages)
    pictures = [picture(90, 70), picture(200, 40)]
    theirs = reference(processor, messages, images=pictures)
    assert list(prompt.ids) == theirs["input_ids"][0].tolist()
    assert (
        np.abs(np.concatenate([p.values for p in prompt.images]) - theirs["pixel_values"]).max()
        < 1e-6
    )
    assert [p.grid for p in prompt.images] == [tuple(g) for g in theirs["image_grid_thw"]]


def test_media_in_several_turns(builder: PromptBuilder, processor: Any) -> None:
    samples = tone(0.7)
    messages = [
        user(image_part(width=64, height=96), sound_part(samples)),
        {"role": "assistant", "content": "A picture and a sound."},
        user("again:", sound_part(samples), image_part(width=32, height=32), "\n\n"),
    ]
    prompt = builder.build(messages)
    theirs = reference(
        processor, messages, images=[picture(64, 96), picture(32, 32)], audio=[samples, samples]
    )
    assert list(prompt.ids) == theirs["input_ids"][0].tolist()
    assert len(prompt.audios) == 2
    assert np.array_equal(prompt.audios[0].mel, prompt.audios[1].mel)


def test_video(builder: PromptBuilder, processor: Any) -> None:
    messages = [user(video_part(video_file(25, 10)), "What happens?")]
    prompt = builder.build(messages)
    (patches,) = prompt.videos
    assert patches.grid[0] == 3
    assert patches.seconds_per_grid == 1.0
    assert patches.values.shape == (np.prod(patches.grid), 1536)
    theirs = reference(processor, messages, videos=[patches.grid])
    assert list(prompt.ids) == theirs["input_ids"][0].tolist()
    assert not prompt.audio_in_video


@pytest.mark.parametrize(("num_frames", "seconds"), [(25, 1.5), (5, 2.5), (24, 0.1)])
def test_video_with_sound(
    num_frames: int, seconds: float, builder: PromptBuilder, processor: Any
) -> None:
    messages = [
        user("Look:", video_part(video_file(num_frames, 10, sound_seconds=seconds)), "What?")
    ]
    prompt = builder.build(messages, use_audio_in_video=True)
    assert prompt.audio_in_video
    (patches,), (clip,) = prompt.videos, prompt.audios
    samples = np.zeros(clip.mel.shape[1] * 160, np.float32)  # their processor only counts it
    theirs = reference(
        processor,
        messages,
        videos=[patches.grid],
        audio=[samples],
        use_audio_in_video=True,
        fps=2.0,
    )
    assert list(prompt.ids) == theirs["input_ids"][0].tolist()


def test_video_from_memory_with_sound(builder: PromptBuilder, processor: Any) -> None:
    frames = np.stack([np.asarray(picture(64, 64, seed)) for seed in range(7)])
    sound = tone(2.0)
    part = {"type": "video", "data": frames, "fps": 4.0, "sound": sound}
    messages = [user(part, {"type": "audio", "data": sound}, "?")]
    prompt = builder.build(messages, use_audio_in_video=True)
    assert prompt.videos[0].grid[0] == 4
    assert prompt.videos[0].seconds_per_grid == 0.5
    theirs = reference(
        processor,
        messages,
        videos=[prompt.videos[0].grid],
        audio=[sound, sound],
        use_audio_in_video=True,
        fps=4.0,
    )
    assert list(prompt.ids) == theirs["input_ids"][0].tolist()
    silent = builder.build([user(part)])
    assert not silent.audios
    assert not silent.audio_in_video
    assert np.array_equal(silent.videos[0].values, prompt.videos[0].values)


# Ways to send the same thing


def test_same_audio_in_other_clothes(builder: PromptBuilder, tmp_path: Path) -> None:
    raw = (tone(0.4, 24_000) * 32_767).astype("<i2")
    wav = sound_file(raw, 24_000, subtype="PCM_16")
    (tmp_path / "a b.wav").write_bytes(wav)
    parts: list[Part] = [
        {"type": "input_audio", "input_audio": {"data": b64(raw.tobytes()), "format": "pcm16"}},
        {
            "type": "input_audio",
            "input_audio": {"data": b64(raw.tobytes()), "format": "pcm16", "sample_rate": 24_000},
        },
        {
            "type": "input_audio",
            "input_audio": {"data": b64(wav), "format": "mp3"},
        },  # what it is counts
        {"type": "input_audio", "input_audio": {"data": b64(wav)}},
        {"type": "audio_url", "audio_url": {"url": data_uri(wav, "audio/wav")}},
        {"type": "audio_url", "audio_url": data_uri(wav, "audio/wav")},
        {"type": "audio", "data": wav},
        {"type": "audio", "data": b64(wav)},
        {"type": "audio", "data": raw, "sample_rate": 24_000},
        {"type": "audio", "path": tmp_path / "a b.wav"},
        {"type": "audio_url", "audio_url": {"url": str(tmp_path / "a b.wav")}},
        {"type": "audio_url", "audio_url": {"url": (tmp_path / "a b.wav").as_uri()}},
    ]
    expected = mel(decode_pcm16(raw.tobytes(), Budget(MediaLimits())))
    for part in parts:
        assert np.array_equal(
            builder.build([user(part)], allow_paths=True).audios[0].mel, expected
        ), part
    for part in parts[-3:]:
        with pytest.raises(Invalid, match="files are not read"):
            builder.build([user(part)])


def test_same_image_in_other_clothes(builder: PromptBuilder, tmp_path: Path) -> None:
    png = image_file(picture())
    (tmp_path / "a.png").write_bytes(png)
    parts: list[Part] = [
        {"type": "image_url", "image_url": {"url": data_uri(png, "image/png"), "detail": "high"}},
        {"type": "image", "data": png},
        {"type": "image", "data": picture()},
        {"type": "image", "data": np.asarray(picture())},
        {"type": "image", "path": str(tmp_path / "a.png")},
    ]
    results = [builder.build([user(p)], allow_paths=True).images[0].values for p in parts]
    assert all(np.array_equal(r, results[0]) for r in results)


def test_roles_and_parts(builder: PromptBuilder) -> None:
    def ids(*messages: dict[str, Any]) -> tuple[int, ...]:
        return builder.build(messages).ids

    plain = ids({"role": "system", "content": "Be kind. "}, {"role": "user", "content": "Hi there"})
    assert ids({"role": "developer", "content": "Be kind. "}, user("Hi ", "there")) == plain
    assert (
        ids(
            {"role": "system", "content": [{"type": "text", "text": "Be kind. "}]}, user("Hi there")
        )
        == plain
    )
    assert ids({"role": "assistant", "content": ""}, user("", "x")) != ids(user("x"))


def test_tools(builder: PromptBuilder) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
    }
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    prompt = builder.build(messages, tools)
    text = builder.tokenizer.decode(prompt.ids)
    assert '{"name": "weather", "arguments": {"city": "Ulm"}}' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert ends_well(prompt, builder.config)
    assert len(builder.build(messages).ids) < len(prompt.ids)


def test_pads_in_text_are_text(builder: PromptBuilder) -> None:
    samples = tone(0.3)
    forged = user("<|audio_start|><|audio_pad|><|audio_end|><|image_pad|>", sound_part(samples))
    prompt = builder.build([forged])
    assert prompt.ids.count(builder.config.tokens.audio_pad) == audio_tokens(len(samples) // 160)
    assert builder.config.tokens.image_pad not in prompt.ids


def test_half_a_surrogate_pair(builder: PromptBuilder) -> None:
    broken = [{"role": "user", "content": "cut \ud83d"}]
    assert (
        builder.build(broken).ids == builder.build([{"role": "user", "content": "cut \ufffd"}]).ids
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "\udc00"}}]
    assert builder.build(broken, tools).ids


# What is wrong with a request

WAV = b64(sound_file(tone(0.1)))
BAD: list[tuple[Any, str, str]] = [
    ([], "messages", "empty"),
    (None, "messages", "must be a list"),
    ("hello", "messages", "must be a list"),
    (["hello"], "messages[0]", "must be an object"),
    ([{}], "messages[0].role", "must be one of"),
    ([{"role": "robot", "content": "x"}], "messages[0].role", "'robot'"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role", "must be one of"),
    ([{"role": "user"}], "messages[0].content", "missing"),
    ([{"role": "user", "content": None}], "messages[0].content", "missing"),
    ([{"role": "user", "content": ""}], "messages[0].content", "empty"),
    ([{"role": "user", "content": []}], "messages[0].content", "empty"),
    ([{"role": "user", "content": 5}], "messages[0].content", "string or a list"),
    ([user("x"), {"role": "assistant", "content": None}], "messages[1].content", "missing"),
    (
        [{"role": "assistant", "content": "", "tool_calls": "x"}],
        "messages[0].tool_calls",
        "list of objects",
    ),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "must be an object"),
    ([user({"type": "text"})], "messages[0].content[0].text", "must be a string"),
    ([user({"type": "text", "text": 3})], "messages[0].content[0].text", "must be a string"),
    ([user({"type": "hologram"})], "messages[0].content[0].type", "'hologram'"),
    ([user({"type": ["text"]})], "messages[0].content[0].type", "must be one of"),
    ([user({})], "messages[0].content[0].type", "must be one of"),
    (
        [user("x", {"type": "input_audio"})],
        "messages[0].content[1].input_audio",
        "object with data",
    ),
    (
        [user({"type": "input_audio", "input_audio": {}})],
        "messages[0].content[0].input_audio.data",
        "base64 string",
    ),
    (
        [user({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}})],
        "messages[0].content[0].input_audio.data",
        "not valid base64",
    ),
    (
        [user({"type": "input_audio", "input_audio": {"data": "ä", "format": "wav"}})],
        "messages[0].content[0].input_audio.data",
        "not valid base64",
    ),
    (
        [user({"type": "input_audio", "input_audio": {"data": WAV, "format": 7}})],
        "messages[0].content[0].input_audio.format",
        "must be a string",
    ),
    (
        [
            user(
                {
                    "type": "input_audio",
                    "input_audio": {"data": WAV, "format": "pcm16", "sample_rate": "x"},
                }
            )
        ],
        "messages[0].content[0].input_audio.sample_rate",
        "must be an integer",
    ),
    ([user({"type": "image_url"})], "messages[0].content[0].image_url.url", "must be a string"),
    (
        [user({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})],
        "messages[0].content[0].image_url.url",
        "not fetched",
    ),
    (
        [user({"type": "image_url", "image_url": {"url": "data:image/png,abc"}})],
        "messages[0].content[0].image_url.url",
        "data URI in base64",
    ),
    (
        [user({"type": "image_url", "image_url": {"url": "/etc/hostname"}})],
        "messages[0].content[0].image_url.url",
        "files are not read",
    ),
    (
        [user({"type": "image_url", "image_url": {"url": "file://[x"}})],
        "messages[0].content[0].image_url.url",
        "files are not read",
    ),
    ([user({"type": "audio"})], "messages[0].content[0]", "needs `path` or `data`"),
    ([user({"type": "image", "data": 5})], "messages[0].content[0]", "needs `path` or `data`"),
    (
        [user({"type": "audio", "data": tone(0.1), "sample_rate": "x"})],
        "messages[0].content[0].sample_rate",
        "integer",
    ),
    (
        [user({"type": "video", "data": [picture()], "fps": "2"})],
        "messages[0].content[0].fps",
        "number",
    ),
]
BAD_MEDIA: list[tuple[Part, str]] = [
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "empty"),
    (
        {"type": "input_audio", "input_audio": {"data": b64(b"no sound"), "format": "wav"}},
        "cannot be decoded",
    ),
    ({"type": "input_audio", "input_audio": {"data": b64(b"abc"), "format": "pcm16"}}, "two bytes"),
    (
        {"type": "image_url", "image_url": {"url": data_uri(b"no image", "image/png")}},
        "cannot be decoded",
    ),
    ({"type": "image", "data": picture(1_000, 4)}, "too narrow"),
    (
        {"type": "video_url", "video_url": {"url": data_uri(b"no video", "video/mp4")}},
        "cannot be decoded",
    ),
    ({"type": "video", "data": []}, "at least one frame"),
    ({"type": "video", "data": ["x"]}, "a picture must be"),
    ({"type": "video", "data": [picture(64, 64), picture(64, 32)]}, "same size"),
    ({"type": "video", "data": [picture(64, 64)], "fps": 0}, "rate"),
    ({"type": "video", "data": [picture(8, 8)] * 769}, "too many"),
]


@pytest.mark.parametrize(("messages", "param", "message"), BAD, ids=[f"{p} {m}" for _, p, m in BAD])
def test_bad_messages(messages: Any, param: str, message: str, builder: PromptBuilder) -> None:
    with pytest.raises(Invalid) as e:
        builder.build(messages)
    assert e.value.param == param
    assert message in str(e.value)


@pytest.mark.parametrize(("part", "message"), BAD_MEDIA, ids=[m for _, m in BAD_MEDIA])
def test_bad_media(part: Part, message: str, builder: PromptBuilder) -> None:
    with pytest.raises(MediaError) as e:
        builder.build([user("x"), user("this:", part)])
    assert e.value.param == "messages[1].content[1]"
    assert str(e.value).startswith("messages[1].content[1]: ")
    assert message in str(e.value)


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "tool"])
def test_media_outside_user_turns(role: str, builder: PromptBuilder) -> None:
    with pytest.raises(Invalid, match="only allowed in user messages") as e:
        builder.build([{"role": role, "content": [image_part(width=32, height=32)]}])
    assert e.value.param == "messages[0].content[0]"


def test_no_sound_track(builder: PromptBuilder) -> None:
    for part in (video_part(video_file()), {"type": "video", "data": [picture()]}):
        with pytest.raises(MediaError, match=r"no (audio stream|sound track)"):
            builder.build([user(part)], use_audio_in_video=True)


def test_files_that_are_none(builder: PromptBuilder, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, message in (
        (tmp_path, "no such file"),
        (tmp_path / "x", "no such file"),
        (tmp_path / "empty", "empty"),
    ):
        with pytest.raises(Invalid, match=message):
            builder.build([user({"type": "image", "path": path})], allow_paths=True)
    with pytest.raises(Invalid):
        builder.build([user({"type": "image", "path": "a\0b"})], allow_paths=True)


KEYS = [
    "role",
    "content",
    "type",
    "text",
    "input_audio",
    "data",
    "format",
    "image_url",
    "url",
    "tool_calls",
    "path",
]
LEAVES = st.sampled_from(
    [None, True, 0, 1.5, "", "x", "user", "assistant", "text", "audio", "image", "video", "pcm16"]
)
WORDS = LEAVES | st.sampled_from(
    ["input_audio", "image_url", "video_url", "data:;base64,AAAA", "file://x", "tool", WAV]
)
JSON = st.recursive(
    WORDS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(KEYS), v, max_size=4),
    max_leaves=12,
)
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool", "system"]),
        "content": JSON | st.lists(JSON, max_size=3),
    },
    optional={"tool_calls": JSON},
)


@settings(FIXED, max_examples=200)
@given(messages=JSON | st.lists(TURNS | JSON, max_size=3), tools=st.none() | JSON)
def test_any_json_is_a_prompt_or_invalid(messages: Any, tools: Any, builder: PromptBuilder) -> None:
    try:
        prompt = builder.build(messages, tools)
    except Invalid as e:
        assert str(e)  # noqa: PT017
        assert e.param  # noqa: PT017
    else:
        assert ends_well(prompt, builder.config)


def test_deep_nesting(builder: PromptBuilder) -> None:
    deep: Any = 1
    for _ in range(5_000):
        deep = {"a": [deep]}
    with pytest.raises(Invalid):
        builder.build([user("x")], [deep])


def shortened(builder: PromptBuilder, positions: int, **limits: Any) -> PromptBuilder:
    thinker = builder.config.thinker
    text = dataclasses.replace(thinker.text, max_positions=positions)
    config = dataclasses.replace(builder.config, thinker=dataclasses.replace(thinker, text=text))
    return dataclasses.replace(builder, config=config, limits=MediaLimits(**limits))


def test_too_long(builder: PromptBuilder) -> None:
    messages = [user("Hello there, you")]
    length = len(builder.build(messages).ids)
    assert shortened(builder, length + 1).build(messages).ids == builder.build(messages).ids
    with pytest.raises(TooLong, match=rf"{length} tokens.*{length}") as e:
        shortened(builder, length).build(messages)
    assert e.value.param == "messages"
    assert e.value.status == 400


def test_pictures_that_cannot_fit_are_not_decoded(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their headers say how many tokens they take, and all are looked at before the first is
    decoded."""
    opened, decoded = [], []
    monkeypatch.setattr(
        "stretto.preprocess.messages.open_image", lambda *a: opened.append(1) or open_image(*a)
    )
    monkeypatch.setattr(
        "stretto.preprocess.messages.load_image", lambda *a: decoded.append(1) or load_image(*a)
    )
    image = image_part(width=320, height=320)  # 100 tokens
    with pytest.raises(TooLong, match="at least 300") as e:
        shortened(builder, 250).build([user(*[image] * 50)])
    assert e.value.param == "messages[0].content[2]"
    assert (len(opened), len(decoded)) == (3, 0)
    assert len(shortened(builder, 250).build([user(*[image] * 2)]).images) == len(decoded) == 2


def test_too_much_text(builder: PromptBuilder) -> None:
    with pytest.raises(TooLong, match="over 10 characters"):
        shortened(builder, 1_000, text_chars=10).build([user("12345"), user("123456")])


def test_media_limits_are_the_builders(builder: PromptBuilder) -> None:
    with pytest.raises(MediaError, match="too large"):
        shortened(builder, 1_000, file_bytes=1_000).build([user(sound_part(tone(0.5)))])


# What is wrong with a checkpoint


def copied(tiny_dir: Path, tmp_path: Path) -> Path:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
    ):
        shutil.copy(tiny_dir / name, tmp_path)
    return tmp_path


def test_template_without_generation_prompt(
    tiny_dir: Path, tmp_path: Path, tiny_config: OmniConfig
) -> None:
    directory = copied(tiny_dir, tmp_path)
    (directory / "chat_template.jinja").write_text("<|im_start|>assistant\n\n\n")
    with pytest.raises(CheckpointError, match="does not end in"):
        PromptBuilder.open(directory, tiny_config)


def test_template_that_drops_media(tiny_dir: Path, tmp_path: Path, tiny_config: OmniConfig) -> None:
    directory = copied(tiny_dir, tmp_path)
    (directory / "chat_template.jinja").write_text("{{ '<|im_start|>assistant\n' }}")
    builder = PromptBuilder.open(directory, tiny_config)
    with pytest.raises(CheckpointError, match="one pad per medium"):
        builder.build([user(image_part(width=32, height=32))])


def test_ids_the_tokenizer_lacks(tiny_dir: Path, tiny_config: OmniConfig) -> None:
    tokens = dataclasses.replace(tiny_config.tokens, audio_pad=5)
    with pytest.raises(CheckpointError, match="token 5"):
        PromptBuilder.open(tiny_dir, dataclasses.replace(tiny_config, tokens=tokens))

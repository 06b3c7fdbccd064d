"""The model's configuration, read once from a checkpoint's config.json into frozen records.

Nothing else in the package looks at config.json. A field the model needs and the file does not state is an
error that names the field: the defaults of other libraries differ from the released model, so none is guessed.
Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.errors import CheckpointError, Invalid
from stretto.layers.config import DecoderConfig, MoeConfig

SAMPLE_RATE_IN = 16_000
SAMPLE_RATE_OUT = 24_000


@dataclass(frozen=True, slots=True)
class AudioConfig:
    num_mel_bins: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    conv_channels: int
    output_size: int
    chunk_frames: int  # mel frames per convolution chunk (2 * n_window = 100, one second)
    window_frames: int  # mel frames per attention window (n_window_infer = 800, eight seconds)

    @property
    def chunks_per_window(self) -> int:
        return self.window_frames // self.chunk_frames

    @property
    def conv_bins(self) -> int:
        return conv_length(self.num_mel_bins)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    patch_size: int
    temporal_patch: int
    merge: int
    channels: int
    output_size: int
    num_positions: int  # entries of the learned square position table
    deepstack_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Code2WavConfig:
    codebook_size: int
    num_quantizers: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    window: int  # sliding attention window, self included
    rms_eps: float
    rope_theta: float
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int

    @property
    def samples_per_frame(self) -> int:
        n = 1
        for r in self.upsampling_ratios + self.upsample_rates:
            n *= r
        return n

    @property
    def samples_dropped(self) -> int:
        """Samples missing at the start of a stream: n frames make n * samples_per_frame - samples_dropped."""
        drop = 0
        for r in self.upsample_rates:
            drop = drop * r + r
        return drop


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of the text vocabulary that have a meaning of their own."""

    im_start: int
    im_end: int
    system: int
    user: int
    assistant: int
    audio_start: int
    audio_pad: int
    vision_start: int
    image_pad: int
    video_pad: int
    tts_pad: int
    tts_bos: int
    tts_eos: int

    @property
    def media_pads(self) -> tuple[int, int, int]:
        return self.audio_pad, self.image_pad, self.video_pad


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Ids of the talker's vocabulary beyond the codes of codebook 0."""

    pad: int
    bos: int
    eos: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class ThinkerConfig:
    text: DecoderConfig
    audio: AudioConfig
    vision: VisionConfig
    positions_per_second: float


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    text: DecoderConfig
    predictor: DecoderConfig
    num_code_groups: int
    accept_layer: int  # the thinker's hidden_states[accept_layer] feeds the media rows
    thinker_hidden_size: int
    projection_size: int
    codec: CodecIds
    speakers: Mapping[str, int]
    merge: int
    positions_per_second: float

    def speaker_id(self, voice: str) -> int:
        """The codec id of a voice, by case-insensitive name."""
        try:
            return self.speakers[voice.lower()]
        except KeyError:
            raise Invalid(f"unknown voice {voice!r}; this model has {', '.join(self.speakers)}", "voice") from None

    @property
    def default_voice(self) -> str:
        return "ethan" if "ethan" in self.speakers else next(iter(self.speakers))


@dataclass(frozen=True, slots=True)
class OmniConfig:
    thinker: ThinkerConfig
    talker: TalkerConfig
    code2wav: Code2WavConfig
    tokens: TokenIds

    @classmethod
    def read(cls, directory: str | Path) -> OmniConfig:
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; is this a Qwen3-Omni checkpoint directory?") from None
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
        return parse(raw, str(path))

    def with_float8_experts(self) -> OmniConfig:
        """The same model, its thinker's routed experts to be kept as float8."""
        text = self.thinker.text
        assert text.moe is not None
        text = replace(text, moe=replace(text.moe, float8=True))
        return replace(self, thinker=replace(self.thinker, text=text))


def conv_length(n: int) -> int:
    """Length after the audio encoder's three stride-2 convolutions."""
    for _ in range(3):
        n = (n + 1) // 2
    return n


def audio_tokens(mel_frames: int, chunk_frames: int = 100) -> int:
    """Thinker tokens for so many mel frames: 13 per full second, and the tail's convolution length."""
    full, tail = divmod(mel_frames, chunk_frames)
    return full * conv_length(chunk_frames) + conv_length(tail)


class _Section:
    """One JSON object with typed access; errors name the file and the dotted path of the field."""

    def __init__(self, raw: object, where: str, path: str = "") -> None:
        self.where, self.path = where, path
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where}: {path or 'the top level'} must be an object")
        self.raw: dict[str, Any] = raw

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.path}{key} {what}")

    def section(self, key: str) -> _Section:
        return _Section(self.get(key), self.where, f"{self.path}{key}.")

    def get(self, key: str) -> Any:
        if self.raw.get(key) is None:
            raise self.fail(key, "is missing")
        return self.raw[key]

    def integer(self, key: str, low: int = 1) -> int:
        v = self.get(key)
        if isinstance(v, bool) or not isinstance(v, int):
            raise self.fail(key, f"must be an integer, got {v!r}")
        if v < low:
            raise self.fail(key, f"must be at least {low}, got {v}")
        return v

    def id(self, key: str, vocab: int) -> int:
        v = self.integer(key, 0)
        if v >= vocab:
            raise self.fail(key, f"is {v}, outside the vocabulary of {vocab}")
        return v

    def number(self, key: str) -> float:
        v = self.get(key)
        if isinstance(v, bool) or not isinstance(v, int | float):
            raise self.fail(key, f"must be a number, got {v!r}")
        return float(v)

    def flag(self, key: str) -> bool:
        v = self.get(key)
        if not isinstance(v, bool):
            raise self.fail(key, f"must be true or false, got {v!r}")
        return v

    def ints(self, key: str) -> tuple[int, ...]:
        v = self.get(key)
        if not isinstance(v, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in v):
            raise self.fail(key, f"must be a list of integers, got {v!r}")
        return tuple(v)

    def rope(self) -> _Section:
        """`rope_parameters` (transformers 5) or `rope_scaling` beside a flat `rope_theta` (the released file)."""
        if isinstance(self.raw.get("rope_parameters"), dict):
            merged = dict(self.raw["rope_parameters"])
        else:
            merged = dict(self.raw.get("rope_scaling") or {})
        merged.setdefault("rope_theta", self.raw.get("rope_theta"))
        return _Section(merged, self.where, f"{self.path}rope_parameters.")


def _decoder(s: _Section, *, mrope: bool, moe: bool, shared: bool) -> DecoderConfig:
    heads, kv = s.integer("num_attention_heads"), s.integer("num_key_value_heads")
    if heads % kv:
        raise s.fail("num_attention_heads", f"({heads}) must be a multiple of num_key_value_heads ({kv})")
    rope, head_dim = s.rope(), s.integer("head_dim")
    section: tuple[int, int, int] | None = None
    if mrope:
        sizes = rope.ints("mrope_section")
        if len(sizes) != 3 or sum(sizes) * 2 != head_dim:
            raise rope.fail(
                "mrope_section", f"must be three sizes that sum to head_dim/2 = {head_dim // 2}, got {sizes}"
            )
        section = (sizes[0], sizes[1], sizes[2])
    experts = None
    if moe:
        experts = MoeConfig(
            num_experts=s.integer("num_experts" if "num_experts" in s.raw else "num_local_experts"),
            top_k=s.integer("num_experts_per_tok"),
            expert_size=s.integer("moe_intermediate_size"),
            norm_topk=s.flag("norm_topk_prob"),
            shared_size=s.integer("shared_expert_intermediate_size") if shared else None,
        )
        if experts.top_k > experts.num_experts:
            raise s.fail("num_experts_per_tok", f"({experts.top_k}) exceeds num_experts ({experts.num_experts})")
    if s.raw.get("hidden_act", "silu") != "silu" or s.raw.get("attention_bias", False):
        raise s.fail("hidden_act/attention_bias", "other than silu/false is not supported")
    return DecoderConfig(
        vocab_size=s.integer("vocab_size"),
        hidden_size=s.integer("hidden_size"),
        num_layers=s.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        rms_eps=s.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta"),
        mrope_section=section,
        max_positions=s.integer("max_position_embeddings"),
        dense_size=None if moe else s.integer("intermediate_size"),
        moe=experts,
    )


def _audio(s: _Section) -> AudioConfig:
    c = AudioConfig(
        num_mel_bins=s.integer("num_mel_bins"),
        hidden_size=s.integer("d_model"),
        num_layers=s.integer("encoder_layers"),
        num_heads=s.integer("encoder_attention_heads"),
        ffn_size=s.integer("encoder_ffn_dim"),
        conv_channels=s.integer("downsample_hidden_size"),
        output_size=s.integer("output_dim"),
        chunk_frames=2 * s.integer("n_window"),
        window_frames=s.integer("n_window_infer"),
    )
    if c.window_frames % c.chunk_frames:
        raise s.fail("n_window_infer", f"({c.window_frames}) must be a multiple of 2 * n_window ({c.chunk_frames})")
    return c


def _vision(s: _Section) -> VisionConfig:
    c = VisionConfig(
        hidden_size=s.integer("hidden_size"),
        num_layers=s.integer("depth"),
        num_heads=s.integer("num_heads"),
        ffn_size=s.integer("intermediate_size"),
        patch_size=s.integer("patch_size"),
        temporal_patch=s.integer("temporal_patch_size"),
        merge=s.integer("spatial_merge_size"),
        channels=s.integer("in_channels"),
        output_size=s.integer("out_hidden_size"),
        num_positions=s.integer("num_position_embeddings"),
        deepstack_layers=s.ints("deepstack_visual_indexes"),
    )
    if round(c.num_positions**0.5) ** 2 != c.num_positions:
        raise s.fail("num_position_embeddings", f"must be a square, got {c.num_positions}")
    if any(i >= c.num_layers for i in c.deepstack_layers):
        raise s.fail("deepstack_visual_indexes", f"{c.deepstack_layers} exceeds depth {c.num_layers}")
    return c


def _code2wav(s: _Section) -> Code2WavConfig:
    hidden, heads = s.integer("hidden_size"), s.integer("num_attention_heads")
    if s.integer("num_key_value_heads") != heads:
        raise s.fail("num_key_value_heads", "other than num_attention_heads is not supported")
    return Code2WavConfig(
        codebook_size=s.integer("codebook_size"),
        num_quantizers=s.integer("num_quantizers"),
        hidden_size=hidden,
        num_layers=s.integer("num_hidden_layers"),
        num_heads=heads,
        head_dim=hidden // heads,
        ffn_size=s.integer("intermediate_size"),
        window=s.integer("sliding_window"),
        rms_eps=s.number("rms_norm_eps"),
        rope_theta=s.rope().number("rope_theta"),
        upsampling_ratios=s.ints("upsampling_ratios"),
        upsample_rates=s.ints("upsample_rates"),
        decoder_dim=s.integer("decoder_dim"),
    )


def parse(raw: object, where: str = "config.json") -> OmniConfig:
    """The frozen configuration from a parsed config.json; `where` is named in errors."""
    top = _Section(raw, where)
    if top.raw.get("model_type") != "qwen3_omni_moe":
        raise top.fail("model_type", f"must be 'qwen3_omni_moe', got {top.raw.get('model_type')!r}")
    th, ta, cw = top.section("thinker_config"), top.section("talker_config"), top.section("code2wav_config")

    text = _decoder(th.section("text_config"), mrope=True, moe=True, shared=False)
    thinker = ThinkerConfig(
        text=text,
        audio=_audio(th.section("audio_config")),
        vision=_vision(th.section("vision_config")),
        positions_per_second=th.number("position_id_per_seconds"),
    )
    vocab = text.vocab_size
    for name, size in (
        ("audio_config.output_dim", thinker.audio.output_size),
        ("vision_config.out_hidden_size", thinker.vision.output_size),
    ):
        if size != text.hidden_size:
            raise th.fail(name, f"is {size}, but the thinker's hidden_size is {text.hidden_size}")

    speech = _decoder(ta.section("text_config"), mrope=True, moe=True, shared=True)
    predictor = _decoder(ta.section("code_predictor_config"), mrope=False, moe=False, shared=False)
    if predictor.hidden_size != speech.hidden_size:
        raise ta.fail("code_predictor_config.hidden_size", f"must equal the talker's ({speech.hidden_size})")
    codecs = speech.vocab_size
    speakers = ta.get("speaker_id")
    if not isinstance(speakers, dict) or not speakers:
        raise ta.fail("speaker_id", "must name at least one voice")
    talker = TalkerConfig(
        text=speech,
        predictor=predictor,
        num_code_groups=ta.integer("num_code_groups", 2),
        accept_layer=ta.integer("accept_hidden_layer", 0),
        thinker_hidden_size=ta.integer("thinker_hidden_size"),
        projection_size=ta.section("text_config").integer("intermediate_size"),
        codec=CodecIds(
            pad=ta.id("codec_pad_id", codecs),
            bos=ta.id("codec_bos_id", codecs),
            eos=ta.id("codec_eos_token_id", codecs),
            nothink=ta.id("codec_nothink_id", codecs),
            think_bos=ta.id("codec_think_bos_id", codecs),
            think_eos=ta.id("codec_think_eos_id", codecs),
        ),
        speakers={name.lower(): ta.section("speaker_id").id(name, codecs) for name in speakers},
        merge=ta.integer("spatial_merge_size"),
        positions_per_second=ta.number("position_id_per_seconds"),
    )
    if talker.thinker_hidden_size != text.hidden_size:
        raise ta.fail("thinker_hidden_size", f"must equal the thinker's hidden_size ({text.hidden_size})")
    if talker.accept_layer > text.num_layers:
        raise ta.fail("accept_hidden_layer", f"({talker.accept_layer}) exceeds the thinker's {text.num_layers} layers")

    code2wav = _code2wav(cw)
    if code2wav.num_quantizers != talker.num_code_groups:
        raise cw.fail("num_quantizers", f"must equal the talker's num_code_groups ({talker.num_code_groups})")
    if predictor.vocab_size > code2wav.codebook_size:
        raise cw.fail("codebook_size", f"is smaller than the code predictor's vocabulary ({predictor.vocab_size})")

    return OmniConfig(
        thinker=thinker,
        talker=talker,
        code2wav=code2wav,
        tokens=TokenIds(
            im_start=top.id("im_start_token_id", vocab),
            im_end=top.id("im_end_token_id", vocab),
            system=top.id("system_token_id", vocab),
            user=top.id("user_token_id", vocab),
            assistant=top.id("assistant_token_id", vocab),
            audio_start=th.id("audio_start_token_id", vocab),
            audio_pad=th.id("audio_token_id", vocab),
            vision_start=th.id("vision_start_token_id", vocab),
            image_pad=th.id("image_token_id", vocab),
            video_pad=th.id("video_token_id", vocab),
            tts_pad=top.id("tts_pad_token_id", vocab),
            tts_bos=top.id("tts_bos_token_id", vocab),
            tts_eos=top.id("tts_eos_token_id", vocab),
        ),
    )

"""The model's configuration, read once from a checkpoint's config.json into frozen records.

Nothing else in the package looks at config.json. A field the model needs and the file does not
state is an error that names the field: the defaults of other libraries differ from the released
model, so none is guessed. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.errors import CheckpointError, Invalid
from stretto.kernels.formats import FLOAT8_ROWS, WeightFormat
from stretto.layers.config import DecoderConfig
from stretto.models.quantised.placing import Formats, packed_decoder
from stretto.models.section import Section, decoder_config
from stretto.models.speech.config import FrameConfig, VocoderConfig, vocoder_config

SAMPLE_RATE_OUT = 24_000
OPENING_S = 0.024  # of the first frame that code2wav does not sound


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
            raise Invalid(
                f"unknown voice {voice!r}; this model has {', '.join(self.voices)}", "voice"
            ) from None

    @property
    def voices(self) -> tuple[str, ...]:
        """By name; other names of the same voice are aliases."""
        names = {id: name for name, id in reversed(list(self.speakers.items()))}
        return tuple(name for name, id in self.speakers.items() if names[id] == name)

    @property
    def voice_aliases(self) -> dict[str, str]:
        names = {self.speakers[name]: name for name in self.voices}
        return {name: names[id] for name, id in self.speakers.items() if names[id] != name}

    @property
    def default_voice(self) -> str:
        return "ethan" if "ethan" in self.voices else self.voices[0]


@dataclass(frozen=True, slots=True)
class OmniConfig:
    thinker: ThinkerConfig
    talker: TalkerConfig
    code2wav: VocoderConfig
    tokens: TokenIds

    @classmethod
    def read(cls, directory: str | Path) -> OmniConfig:
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: no such file; is this a Qwen3-Omni checkpoint directory?"
            ) from None
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
        return parse(raw, str(path))

    @property
    def frames(self) -> FrameConfig:
        t, codec = self.talker, self.talker.codec
        ids = codec.bos, codec.eos, self.tokens.tts_eos, self.tokens.tts_pad
        return FrameConfig(t.text, t.predictor, t.num_code_groups, *ids)

    def with_float8_experts(self) -> OmniConfig:
        """The same model, its thinker's routed experts to be kept as float8."""
        return self.with_formats({"thinker.experts": FLOAT8_ROWS})

    def with_formats(self, formats: Formats) -> OmniConfig:
        """The same model with these parts packed in memory: `thinker.attention`,
        `thinker.experts`, and the talker's."""
        th, ta = self.thinker, self.talker
        thinker = replace(th, text=packed_decoder(th.text, "thinker", formats))
        talker = replace(ta, text=packed_decoder(ta.text, "talker", formats))
        return replace(self, thinker=thinker, talker=talker)

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """Those parts that are packed."""
        found: dict[str, WeightFormat] = {}
        for part, c in (("thinker", self.thinker.text), ("talker", self.talker.text)):
            if c.attention_format is not None:
                found[f"{part}.attention"] = c.attention_format
            if c.moe is not None and c.moe.format is not None:
                found[f"{part}.experts"] = c.moe.format
        return found


def conv_length(n: int) -> int:
    """Length after the audio encoder's three stride-2 convolutions."""
    for _ in range(3):
        n = (n + 1) // 2
    return n


def audio_tokens(mel_frames: int, chunk_frames: int = 100) -> int:
    """Thinker tokens for so many mel frames: 13 per full second, and the tail's convolution
    length."""
    full, tail = divmod(mel_frames, chunk_frames)
    return full * conv_length(chunk_frames) + conv_length(tail)


def _audio(s: Section) -> AudioConfig:
    c = AudioConfig(
        num_mel_bins=s.count("num_mel_bins"),
        hidden_size=s.integer("d_model"),
        num_layers=s.count("encoder_layers"),
        num_heads=s.integer("encoder_attention_heads"),
        ffn_size=s.integer("encoder_ffn_dim"),
        conv_channels=s.integer("downsample_hidden_size"),
        output_size=s.integer("output_dim"),
        chunk_frames=2 * s.integer("n_window"),
        window_frames=s.integer("n_window_infer"),
    )
    if c.window_frames % c.chunk_frames:
        raise s.fail(
            "n_window_infer",
            f"({c.window_frames}) must be a multiple of 2 * n_window ({c.chunk_frames})",
        )
    return c


def _vision(s: Section) -> VisionConfig:
    c = VisionConfig(
        hidden_size=s.integer("hidden_size"),
        num_layers=s.count("depth"),
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
        raise s.fail(
            "deepstack_visual_indexes", f"{c.deepstack_layers} exceeds depth {c.num_layers}"
        )
    return c


def _code2wav(s: Section) -> VocoderConfig:
    heads = s.integer("num_attention_heads")
    return vocoder_config(s, heads, s.integer("hidden_size") // heads, s.count("num_quantizers"))


def parse(raw: object, where: str = "config.json") -> OmniConfig:
    """The frozen configuration from a parsed config.json; `where` is named in errors."""
    top = Section(raw, where)
    if top.raw.get("model_type") != "qwen3_omni_moe":
        raise top.fail("model_type", f"must be 'qwen3_omni_moe', got {top.raw.get('model_type')!r}")
    th = top.section("thinker_config")
    ta = top.section("talker_config")
    cw = top.section("code2wav_config")

    text = decoder_config(th.section("text_config"), mrope=True, moe=True, shared=False)
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

    speech = decoder_config(ta.section("text_config"), mrope=True, moe=True, shared=True)
    predictor = decoder_config(
        ta.section("code_predictor_config"), mrope=False, moe=False, shared=False
    )
    if predictor.hidden_size != speech.hidden_size:
        raise ta.fail(
            "code_predictor_config.hidden_size", f"must equal the talker's ({speech.hidden_size})"
        )
    codecs = speech.vocab_size
    speakers = ta.get("speaker_id")
    if not isinstance(speakers, dict) or not speakers:
        raise ta.fail("speaker_id", "must name at least one voice")
    talker = TalkerConfig(
        text=speech,
        predictor=predictor,
        num_code_groups=ta.count("num_code_groups", 2),
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
        raise ta.fail(
            "thinker_hidden_size", f"must equal the thinker's hidden_size ({text.hidden_size})"
        )
    if talker.accept_layer > text.num_layers:
        raise ta.fail(
            "accept_hidden_layer",
            f"({talker.accept_layer}) exceeds the thinker's {text.num_layers} layers",
        )

    code2wav = _code2wav(cw)
    if code2wav.num_quantizers != talker.num_code_groups:
        raise cw.fail(
            "num_quantizers", f"must equal the talker's num_code_groups ({talker.num_code_groups})"
        )
    if predictor.vocab_size > code2wav.codebook_size:
        raise cw.fail(
            "codebook_size",
            f"is smaller than the code predictor's vocabulary ({predictor.vocab_size})",
        )

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

"""The model's configuration, read once from a checkpoint's two config.json files into frozen
records.

Nothing else in the package looks at them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from stretto._validation import read_json_file
from stretto.errors import Invalid
from stretto.layers.config import DecoderConfig
from stretto.models.section import Section, decoder_config
from stretto.models.speech.config import FrameConfig, VocoderConfig, vocoder_config

SAMPLE_RATE = 24_000
CODEC = "speech_tokenizer"
"""The folder of the codec, below the checkpoint's own."""

Kind = Literal["custom_voice", "voice_design", "base"]
SMALL = "0b6"
"""The size whose built-in voices follow no instructions."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of the text vocabulary that have a meaning of their own."""

    im_start: int
    im_end: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Ids of the talker's vocabulary beyond the codes of codebook 0."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    decoder: DecoderConfig
    predictor: DecoderConfig
    num_code_groups: int
    text_vocab: int
    text_hidden: int
    codec: CodecIds
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]  # of speakers: the language they speak by themselves

    @property
    def offered(self) -> tuple[str, ...]:
        """Languages to choose from. Dialects come with their speakers."""
        return tuple(name for name in self.languages if not name.endswith("_dialect"))


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Of the codec: sound to codes."""

    filters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    norm_eps: float
    rope_theta: float
    ratios: tuple[int, ...]  # from the last to the first, as the file has them
    kernel: int
    last_kernel: int
    residual_kernel: int
    compress: int
    codebook_size: int
    codebook_dim: int
    inner_size: int
    num_quantizers: int
    used: int  # of these


@dataclass(frozen=True, slots=True)
class SpeakerConfig:
    """Of the encoder that makes one vector of a voice."""

    size: int
    mel_bins: int = 128
    channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    kernels: tuple[int, ...] = (5, 3, 3, 3, 1)
    dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    attention_channels: int = 128
    scale: int = 8
    squeeze_channels: int = 128


@dataclass(frozen=True, slots=True)
class TtsConfig:
    kind: Kind
    size: str
    talker: TalkerConfig
    vocoder: VocoderConfig
    encoder: EncoderConfig
    speaker: SpeakerConfig | None  # voices can be cloned
    tokens: TokenIds

    @classmethod
    def read(cls, directory: str | Path) -> TtsConfig:
        path, codec = Path(directory) / "config.json", Path(directory) / CODEC / "config.json"
        return parse(read_json_file(path), read_json_file(codec), str(path), str(codec))

    @property
    def frames(self) -> FrameConfig:
        t, c = self.talker, self.talker.codec
        ids = c.bos, c.eos, self.tokens.tts_eos, self.tokens.tts_pad
        return FrameConfig(t.decoder, t.predictor, t.num_code_groups, *ids)

    @property
    def takes_instructions(self) -> bool:
        return self.kind == "voice_design" or (self.kind == "custom_voice" and self.size != SMALL)

    def speaker_id(self, voice: str) -> int:
        """The codec id of a built-in voice, by case-insensitive name."""
        try:
            return self.talker.speakers[voice.lower()]
        except KeyError:
            known = ", ".join(self.talker.speakers) or "none"
            raise Invalid(f"unknown voice {voice!r}; this model has {known}", "voice") from None

    def language_id(self, language: str | None, voice: str | None) -> int | None:
        """The codec id of a language; None: the model finds out. Some voices speak a dialect unless
        told otherwise."""
        name, t = (language or AUTO).lower(), self.talker
        if name != AUTO and name not in t.offered:
            raise Invalid(
                f"unknown language {language!r}; this model has {', '.join((AUTO, *t.offered))}",
                "language",
            )
        if name in (AUTO, "chinese") and voice is not None and voice.lower() in t.dialects:
            name = t.dialects[voice.lower()]
        return None if name == AUTO else t.languages[name]


def parse(
    raw: object,
    codec: object,
    where: str = "config.json",
    codec_where: str = f"{CODEC}/config.json",
) -> TtsConfig:
    """The frozen configuration from both parsed files; `where` they are is named in errors."""
    top, below = Section(raw, where), Section(codec, codec_where)
    for s, key, supported in (
        (top, "model_type", "qwen3_tts"),
        (top, "tokenizer_type", "qwen3_tts_tokenizer_12hz"),
        (below, "model_type", "qwen3_tts_tokenizer_12hz"),
    ):
        if s.raw.get(key) != supported:
            raise s.fail(key, f"must be {supported!r}, got {s.raw.get(key)!r}")
    kind = top.get("tts_model_type")
    if kind not in get_args(Kind):
        raise top.fail(
            "tts_model_type", f"must be one of {', '.join(get_args(Kind))}, got {kind!r}"
        )
    talker = _talker(top.section("talker_config"), kind)
    vocoder = _vocoder(below.section("decoder_config"))
    if vocoder.num_quantizers != talker.num_code_groups:
        raise below.fail(
            "decoder_config.num_quantizers",
            f"must be the talker's {talker.num_code_groups} code groups",
        )
    if talker.predictor.vocab_size > vocoder.codebook_size:
        raise below.fail(
            "decoder_config.codebook_size",
            f"is below the predictor's {talker.predictor.vocab_size}",
        )
    for key in ("input_sample_rate", "output_sample_rate"):
        if below.integer(key) != SAMPLE_RATE:
            raise below.fail(key, f"other than {SAMPLE_RATE} is not supported")
    if below.integer("decode_upsample_rate") != vocoder.samples_per_frame:
        raise below.fail(
            "decode_upsample_rate", f"must be {vocoder.samples_per_frame}, as its stages upsample"
        )
    encoder = _encoder(
        below.section("encoder_config"), below.integer("encoder_valid_num_quantizers")
    )
    if encoder.used != vocoder.num_quantizers:
        raise below.fail(
            "encoder_valid_num_quantizers", f"must be the decoder's {vocoder.num_quantizers}"
        )
    speaker = _speaker(top.section("speaker_encoder_config")) if kind == "base" else None
    if speaker is not None and speaker.size != talker.decoder.hidden_size:
        raise top.fail(
            "speaker_encoder_config.enc_dim", f"must be the talker's {talker.decoder.hidden_size}"
        )
    size = top.get("tts_model_size")
    return TtsConfig(
        kind, str(size), talker, vocoder, encoder, speaker, _tokens(top, talker.text_vocab)
    )


def _tokens(s: Section, vocab: int) -> TokenIds:
    names = ("im_start", "im_end", "assistant", "tts_pad", "tts_bos", "tts_eos")
    return TokenIds(*(s.id(f"{name}_token_id", vocab) for name in names))


def _talker(s: Section, kind: Kind) -> TalkerConfig:
    decoder = decoder_config(s, mrope=True, moe=False, shared=False)
    predictor = decoder_config(
        s.section("code_predictor_config"), mrope=False, moe=False, shared=False
    )
    vocab = decoder.vocab_size
    codec = CodecIds(
        pad=s.id("codec_pad_id", vocab),
        bos=s.id("codec_bos_id", vocab),
        eos=s.id("codec_eos_token_id", vocab),
        think=s.id("codec_think_id", vocab),
        nothink=s.id("codec_nothink_id", vocab),
        think_bos=s.id("codec_think_bos_id", vocab),
        think_eos=s.id("codec_think_eos_id", vocab),
    )
    languages, speakers = _ids(s, "codec_language_id", vocab), _ids(s, "spk_id", vocab)
    if kind == "custom_voice" and not speakers:
        raise s.fail("spk_id", "must name at least one voice")
    dialects = (
        {k.lower(): v for k, v in s.section("spk_is_dialect").raw.items() if v} if speakers else {}
    )
    for speaker, language in dialects.items():
        if language not in languages:
            raise s.fail(
                "spk_is_dialect", f"gives {speaker} the language {language!r}, which is not in it"
            )
    return TalkerConfig(
        decoder,
        predictor,
        s.count("num_code_groups", 2),
        s.integer("text_vocab_size"),
        s.integer("text_hidden_size"),
        codec,
        languages,
        speakers,
        dialects,
    )


def _ids(s: Section, key: str, vocab: int) -> dict[str, int]:
    inner = s.section(key)
    return {name.lower(): inner.id(name, vocab) for name in inner.raw}


def _vocoder(s: Section) -> VocoderConfig:
    if s.raw.get("num_semantic_quantizers", 1) != 1:
        raise s.fail("num_semantic_quantizers", "other than 1 is not supported")
    return vocoder_config(
        s,
        s.integer("num_attention_heads"),
        s.integer("head_dim"),
        s.count("num_quantizers", 2),
        latent_size=s.integer("latent_dim"),
        table_size=s.integer("codebook_dim"),
        drops_first=False,
    )


MIMI: dict[str, Any] = {
    "num_filters": 64, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "intermediate_size": 2048,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "upsampling_ratios": [8, 6, 5, 4], "kernel_size": 7,
    "last_kernel_size": 3, "residual_kernel_size": 3, "compress": 2, "codebook_size": 2048,
    "codebook_dim": 256,
    "vector_quantization_hidden_dimension": 256, "num_quantizers": 32,
}  # fmt: skip
"""The encoder is Mimi's, whose configuration leaves out what is as it always is."""


def _encoder(s: Section, used: int) -> EncoderConfig:
    s = Section({**MIMI, **{k: v for k, v in s.raw.items() if v is not None}}, s.where, s.path)
    heads, hidden = s.integer("num_attention_heads"), s.integer("hidden_size")
    if hidden % heads or s.raw.get("num_key_value_heads", heads) != heads:
        raise s.fail(
            "num_attention_heads", f"({heads}) must divide hidden_size, and be num_key_value_heads"
        )
    return EncoderConfig(
        filters=s.integer("num_filters"),
        hidden_size=hidden,
        num_layers=s.count("num_hidden_layers"),
        num_heads=heads,
        ffn_size=s.integer("intermediate_size"),
        norm_eps=s.number("norm_eps"),
        rope_theta=s.rope().number("rope_theta"),
        ratios=s.ints("upsampling_ratios"),
        kernel=s.integer("kernel_size"),
        last_kernel=s.integer("last_kernel_size"),
        residual_kernel=s.integer("residual_kernel_size"),
        compress=s.integer("compress"),
        codebook_size=s.integer("codebook_size"),
        codebook_dim=s.integer("codebook_dim"),
        inner_size=s.integer("vector_quantization_hidden_dimension"),
        num_quantizers=s.count("num_quantizers", used),
        used=used,
    )


def _speaker(s: Section) -> SpeakerConfig:
    if s.raw.get("sample_rate", SAMPLE_RATE) != SAMPLE_RATE:
        raise s.fail("sample_rate", f"other than {SAMPLE_RATE} is not supported")
    values: dict[str, Any] = {}
    for name, key in (("mel_bins", "mel_dim"), ("attention_channels", "enc_attention_channels"),
                      ("scale", "enc_res2net_scale"), ("squeeze_channels",
                      "enc_se_channels")):  # fmt: skip
        if key in s.raw:
            values[name] = s.count(key)
    for name, key in (
        ("channels", "enc_channels"),
        ("kernels", "enc_kernel_sizes"),
        ("dilations", "enc_dilations"),
    ):
        if key in s.raw:
            values[name] = s.ints(key)
    c = SpeakerConfig(s.integer("enc_dim"), **values)
    if not len(c.channels) == len(c.kernels) == len(c.dilations) >= 3:
        raise s.fail("enc_channels", "must be as many as enc_kernel_sizes and enc_dilations")
    if any(n % c.scale for n in c.channels[1:-1]) or sum(c.channels[1:-1]) != c.channels[-1]:
        raise s.fail("enc_channels", f"{c.channels} does not fit enc_res2net_scale {c.scale}")
    return c

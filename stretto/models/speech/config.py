"""The shapes of the parts that speaking models share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from stretto.layers.config import DecoderConfig
from stretto.models.section import Section


@dataclass(frozen=True, slots=True)
class FrameConfig:
    """A talker: a decoder whose every step picks code 0 of a frame, and a predictor of the other
    codes."""

    decoder: DecoderConfig
    predictor: DecoderConfig
    num_code_groups: int
    bos: int  # codec ids: stands for the frame before the first, ends the speech
    eos: int
    text_end: int  # text ids: behind the last token, and from there on
    text_pad: int


@dataclass(frozen=True, slots=True)
class VocoderConfig:
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
    latent_size: int | None = None  # behind the transformer; None: as wide as it
    # of the rows that codes stand for, where these are not the transformer's inputs
    table_size: int = 0

    drops_first: bool = True  # of each upsampling block, what the first input row alone gives

    @property
    def latent(self) -> int:
        return self.latent_size or self.hidden_size

    @property
    def samples_per_frame(self) -> int:
        return prod(self.upsampling_ratios + self.upsample_rates)

    @property
    def samples_dropped(self) -> int:
        """Samples missing at the start of a stream: n frames make n * samples_per_frame -
        samples_dropped."""
        drop = 0
        for r in self.upsample_rates if self.drops_first else ():
            drop = drop * r + r
        return drop


def vocoder_config(
    s: Section, heads: int, head_dim: int, num_quantizers: int, **own: Any
) -> VocoderConfig:
    """What all vocoders of this kind state, and what is a family's `own`."""
    if s.integer("num_key_value_heads") != heads:
        raise s.fail("num_key_value_heads", "other than num_attention_heads is not supported")
    return VocoderConfig(
        codebook_size=s.integer("codebook_size"),
        num_quantizers=num_quantizers,
        hidden_size=s.integer("hidden_size"),
        num_layers=s.count("num_hidden_layers"),
        num_heads=heads,
        head_dim=head_dim,
        ffn_size=s.integer("intermediate_size"),
        window=s.integer("sliding_window"),
        rms_eps=s.number("rms_norm_eps"),
        rope_theta=s.rope().number("rope_theta"),
        upsampling_ratios=s.ints("upsampling_ratios"),
        upsample_rates=s.ints("upsample_rates"),
        decoder_dim=s.integer("decoder_dim"),
        **own,
    )

"""The checkpoint's config.json, as far as this family needs it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto._validation import read_json_file
from stretto.layers.config import DecoderConfig
from stretto.models.section import Section, decoder_config


@dataclass(frozen=True, slots=True)
class TinyTextConfig:
    decoder: DecoderConfig
    end: int  # the token that ends an answer

    @classmethod
    def read(cls, directory: Path) -> TinyTextConfig:
        path = directory / "config.json"
        section = Section(read_json_file(path), str(path))
        decoder = decoder_config(section, mrope=False, moe=False, shared=False)
        return cls(decoder, section.id("eos_token_id", decoder.vocab_size))

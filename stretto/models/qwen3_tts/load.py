"""From a checkpoint (or from nothing) to Qwen3-TTS's modules, ready to run. The codec's weights lie
in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

from stretto.models.qwen3_tts.config import CODEC, TtsConfig
from stretto.models.qwen3_tts.enroller import Enroller
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.qwen3_tts.vocoder import CodecDecoder
from stretto.models.source import LoadFormat, WeightSource
from stretto.models.weights import build


class Source(WeightSource[TtsConfig]):
    @classmethod
    def open(
        cls,
        model: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        load_format: LoadFormat = "safetensors",
        progress: bool = True,
    ) -> Self:
        """A checkpoint directory; with `load_format="dummy"` its config files alone are enough."""
        return cls.of(TtsConfig.read(model), model, device, dtype, load_format, progress)

    def talker(self) -> Talker:
        model = self.module(lambda: Talker(self.config), "talker.", "talker", 1)
        with torch.inference_mode():
            model.prepare()
        return model

    def vocoder(self) -> CodecDecoder:
        model = self.module(
            lambda: CodecDecoder(self.config.vocoder), "decoder.", "code2wav", 2, CODEC
        )
        model.prepare()
        return model

    def enroller(self) -> Enroller:
        """In float32 whatever the others are."""
        model = build(lambda: Enroller(self.config), self.device, torch.float32)
        self.fill(model.speaker_encoder, "speaker_encoder.", "enroller", 3)
        self.fill(model.encoder, "encoder.", "enroller", 4, CODEC)
        return model.eval()

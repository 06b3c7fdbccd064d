"""From a checkpoint (or from nothing) to Qwen3-Omni's modules, ready to run.

The thinker's experts are loaded as float8 if asked to. The talker also reads the thinker's word
embedding, which becomes its text table and is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from stretto.layers.linear import Embedding
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.source import LoadFormat, WeightSource
from stretto.types import ExpertWeights

EMBEDDING = "thinker.model.embed_tokens."


class Source(WeightSource[OmniConfig]):
    @classmethod
    def open(
        cls,
        model: str | Path | OmniConfig,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        load_format: LoadFormat = "safetensors",
        progress: bool = True,
        expert_weights: ExpertWeights = "full",
    ) -> Self:
        """A checkpoint directory; with `load_format="dummy"` its config alone (or a config) is
        enough.

        `expert_weights="float8"` is for the thinker's routed experts alone: decision 0013 says
        why."""
        config = model if isinstance(model, OmniConfig) else OmniConfig.read(model)
        if expert_weights == "float8":
            config = config.with_float8_experts()
        if isinstance(model, OmniConfig):
            if load_format == "safetensors":
                raise ValueError("weights need a checkpoint directory")
            model = ""
        source = cls.of(config, model, device, dtype, load_format, progress)
        if load_format == "safetensors":
            source.files()  # what is wrong with them is found before anything is built
        return source

    def thinker(self) -> Thinker:
        model = self.module(lambda: Thinker(self.config), "thinker.", "thinker", 1)
        model.prepare()
        return model

    def talker(self, embedding: torch.Tensor | None = None) -> Talker:
        """`embedding`: the thinker's word embedding, if it is in this process already."""
        model = self.module(lambda: Talker(self.config), "talker.", "talker", 2)
        if embedding is None:
            c = self.config.thinker.text
            words = self.module(
                lambda: Embedding(c.vocab_size, c.hidden_size), EMBEDDING, "embedding", 1
            )
            embedding = words.weight.data
        with torch.inference_mode():
            model.prepare(embedding)
        return model

    def code2wav(self) -> Code2Wav:
        model = self.module(lambda: Code2Wav(self.config.code2wav), "code2wav.", "code2wav", 3)
        model.prepare()
        return model


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """All stages in this process."""

    config: OmniConfig
    thinker: Thinker
    talker: Talker
    code2wav: Code2Wav

    @classmethod
    def open(cls, source: Source) -> Models:
        thinker = source.thinker()
        talker = source.talker(thinker.model.embed_tokens.weight.data)
        return cls(source.config, thinker, talker, source.code2wav())

"""From a checkpoint (or from nothing) to stages that are ready to run.

Each stage loads only its own tensors, straight to its device; the thinker's experts as float8 if
asked to. The talker also reads the thinker's word embedding, which becomes its text table and is
dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import nn

from stretto.layers.linear import Embedding
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import CheckpointFiles, build, load, prepare_device
from stretto.types import ExpertWeights

LoadFormat = Literal["safetensors", "dummy"]
M = TypeVar("M", bound=nn.Module)

EMBEDDING = "thinker.model.embed_tokens."


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from and where they go."""

    config: OmniConfig  # says which experts are float8
    files: CheckpointFiles | None  # None: random weights
    device: torch.device
    dtype: torch.dtype
    progress: bool = True

    @classmethod
    def open(
        cls,
        model: str | Path | OmniConfig,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        load_format: LoadFormat = "safetensors",
        progress: bool = True,
        expert_weights: ExpertWeights = "full",
    ) -> Source:
        """A checkpoint directory; with `load_format="dummy"` its config alone (or a config) is
        enough.

        `expert_weights="float8"` is for the thinker's routed experts alone: decision 0013 says
        why."""
        config = model if isinstance(model, OmniConfig) else OmniConfig.read(model)
        if expert_weights == "float8":
            config = config.with_float8_experts()
        where = torch.device(device)
        dtype = prepare_device(where, dtype)
        files = None
        if load_format == "safetensors":
            if isinstance(model, OmniConfig):
                raise ValueError("weights need a checkpoint directory")
            files = CheckpointFiles.open(model)
        return cls(config, files, where, dtype, progress)

    def thinker(self) -> Thinker:
        model = self._fill(lambda: Thinker(self.config), "thinker.", "thinker", 1)
        model.prepare()
        return model

    def talker(self, embedding: torch.Tensor | None = None) -> Talker:
        """`embedding`: the thinker's word embedding, if it is in this process already."""
        model = self._fill(lambda: Talker(self.config), "talker.", "talker", 2)
        if embedding is None:
            c = self.config.thinker.text
            words = self._fill(
                lambda: Embedding(c.vocab_size, c.hidden_size), EMBEDDING, "embedding", 1
            )
            embedding = words.weight.data
        with torch.inference_mode():
            model.prepare(embedding)
        return model

    def code2wav(self) -> Code2Wav:
        model = self._fill(lambda: Code2Wav(self.config.code2wav), "code2wav.", "code2wav", 3)
        model.prepare()
        return model

    def _fill(self, factory: Callable[[], M], prefix: str, label: str, seed: int) -> M:
        model = build(factory, self.device, self.dtype)
        if self.files is None:
            fill_dummy(model, seed)
        else:
            load(self.files, targets(model, prefix), [prefix], progress=self.progress, label=label)
        return model.eval()


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

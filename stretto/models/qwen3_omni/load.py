"""From a checkpoint (or from nothing) to Qwen3-Omni's modules, ready to run.

The thinker's experts are loaded as float8 if asked to. The talker also reads the thinker's word
embedding, which becomes its text table and is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from stretto.errors import CheckpointError
from stretto.kernels.formats import WeightFormat
from stretto.layers.linear import Embedding
from stretto.models.checkpoint import INDEX, SINGLE, CheckpointFiles
from stretto.models.quantised.placing import decoder_formats, expert_names, quantised_in
from stretto.models.quantised.recognise import QuantisedTensor
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.source import LoadFormat, WeightSource
from stretto.types import ExpertWeights

EMBEDDING = "thinker.model.embed_tokens."


def quantised_formats(
    quantised: Mapping[str, QuantisedTensor], config: OmniConfig
) -> dict[str, WeightFormat]:
    """Of the parts that can stay packed."""
    thinker, talker = config.thinker.text, config.talker.text
    return {
        **decoder_formats(quantised, "thinker", "thinker.model.", thinker),
        **decoder_formats(quantised, "talker", "talker.model.", talker),
    }


def stated_formats(model: str | Path, config: OmniConfig) -> dict[str, WeightFormat]:
    """By the headers of a checkpoint whose weights are not read; none without files."""
    directory = Path(model)
    if not any((directory / name).exists() for name in (INDEX, SINGLE)):
        return {}
    return quantised_formats(quantised_in(directory, CheckpointFiles.open(directory)), config)


def check_float8(source: Source) -> None:
    """A second rounding is refused."""
    names = expert_names("thinker.model.", source.config.thinker.text)
    for name in names:
        q = source.quantised().get(name)
        if q is not None and not (q.format.kind == "float8" and q.format.per_row):
            raise CheckpointError(
                f"{q.codes.file}: tensor {q.codes.name}: is {q.format} already; "
                f"--expert-weights float8 is for wide weights"
            )


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
        packed: bool | None = None,
    ) -> Self:
        """A checkpoint directory; with `load_format="dummy"` its config alone (or a config) is
        enough, and where there are headers of weights these say how random ones are stored.

        `expert_weights="float8"` is for the thinker's routed experts alone: decision 0013 says
        why. `packed`: weights that come quantised stay so, where there is a place for them; None:
        on a GPU, where memory is what is scarce."""
        config = model if isinstance(model, OmniConfig) else OmniConfig.read(model)
        if expert_weights == "float8":
            config = config.with_float8_experts()
        if isinstance(model, OmniConfig):
            if load_format == "safetensors":
                raise ValueError("weights need a checkpoint directory")
            model = ""
        source = cls.of(config, model, device, dtype, load_format, progress)
        if load_format == "dummy":
            found = stated_formats(model, config) if model else {}
        else:
            # what is wrong with the files is found before anything is built
            found = quantised_formats(source.quantised(), config)
            if expert_weights == "float8":
                check_float8(source)
        if packed is False or (packed is None and source.device.type == "cpu") or not found:
            return source
        with_packed = config.with_formats(found)
        return replace(source, config=with_packed)  # type: ignore[arg-type]

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

"""Which parts of a decoder stay packed in memory: attention's projections, and the experts. What
else is quantised is widened when it is loaded.

A part is packed if all of its matrices are, in one format and in whole blocks. Called when a family
opens a checkpoint. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stretto._validation import read_json_file
from stretto.errors import CheckpointError
from stretto.kernels.formats import FLOAT8_ROWS, WeightFormat
from stretto.layers.config import DecoderConfig
from stretto.models.checkpoint import CheckpointFiles, has_weights
from stretto.models.quantised.recognise import QuantisedTensor, describe, recognise
from stretto.models.quantised.settings import read_settings

log = logging.getLogger(__name__)

Formats = Mapping[str, WeightFormat]
"""By part of a model, such as `thinker.experts`."""


def quantised_in(directory: Path, files: CheckpointFiles) -> dict[str, QuantisedTensor]:
    """The quantised matrices of a checkpoint. Refuses what is not supported."""
    settings = read_settings(directory, read_json_file(directory / "config.json"))
    found = recognise(files.tensors, settings)
    if found and settings is not None and settings.dynamic_activations:
        log.info("%s: made for FP8 activations, which stay in the model's own type", directory)
    return found


def weights_of(directory: Path) -> str:
    """How a checkpoint's weights are stored, in words; empty if they are wide, or if there are
    none."""
    settings = read_settings(directory, read_json_file(directory / "config.json"))
    if not has_weights(directory):
        return ""
    try:
        files = CheckpointFiles.open(directory)
    except CheckpointError:
        return ""  # the host that loads it says what is wrong
    return describe(recognise(files.tensors, settings))


def attention_names(prefix: str, c: DecoderConfig) -> Iterator[str]:
    for layer in range(c.num_layers):
        for part in ("q", "k", "v", "o"):
            yield f"{prefix}layers.{layer}.self_attn.{part}_proj.weight"


def expert_names(prefix: str, c: DecoderConfig) -> Iterator[str]:
    if c.moe is not None:
        for layer in range(c.num_layers):
            for expert in range(c.moe.num_experts):
                for part in ("gate", "up", "down"):
                    yield f"{prefix}layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def decoder_formats(
    quantised: Mapping[str, QuantisedTensor], part: str, prefix: str, c: DecoderConfig
) -> dict[str, WeightFormat]:
    """Of a decoder whose layers have names under `prefix`."""
    found = {
        f"{part}.attention": common_format(quantised, list(attention_names(prefix, c))),
        f"{part}.experts": common_format(quantised, list(expert_names(prefix, c))),
    }
    return {name: form for name, form in found.items() if form is not None}


def common_format(
    quantised: Mapping[str, QuantisedTensor], names: Sequence[str]
) -> WeightFormat | None:
    """What all of these have in common; None if they cannot be packed together."""
    first = quantised.get(names[0]) if names else None
    if first is None:
        return None
    for name in names:
        q = quantised.get(name)
        if q is None or q.format != first.format or q.shape[0] % q.format.block_rows:
            return None
    return first.format


def packed_decoder(c: DecoderConfig, part: str, formats: Formats) -> DecoderConfig:
    """The same decoder with these parts packed."""
    attention = formats.get(f"{part}.attention", c.attention_format)
    experts = formats.get(f"{part}.experts")
    if experts == FLOAT8_ROWS and c.moe is not None and c.moe.shared_size is not None:
        experts = None  # there is no kernel for them beside a shared expert
    moe = c.moe
    if moe is not None and experts is not None:
        moe = replace(moe, format=experts)
    return replace(c, attention_format=attention, moe=moe)

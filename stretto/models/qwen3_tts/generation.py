"""What a checkpoint's generation_config.json says of speech: read once, when the model is opened.
Imports no torch.

Its plain names (`temperature` and others) are about code 0 of a frame, those with `subtalker_`
about other codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.errors import CheckpointError, Invalid
from stretto.models.generation import DRAWN, GenerationFile
from stretto.models.qwen3_tts.params import RESIDUAL
from stretto.params import Params
from stretto.types import SamplingParams


def read_defaults(file: GenerationFile) -> Params:
    """The parameters of a request that states none."""
    given: dict[str, Any] = {
        f"speech_{name}": file.number((name,), kind) for name, kind in DRAWN.items()
    }
    if file.raw.get("do_sample") is False:
        given["speech_temperature"] = 0.0
    if (picks := file.number(("max_new_tokens",), int)) is not None:
        given["max_frames"] = max(1, picks - 1)  # the last one is the end
    return file.params(given)


def read_residual(file: GenerationFile) -> SamplingParams:
    """How codes other than a frame's first are drawn."""
    names = [name for name in DRAWN if name != "repetition_penalty"]
    given = {name: file.number((f"subtalker_{name}",), DRAWN[name]) for name in names}
    if file.raw.get("subtalker_dosample") is False:
        given["temperature"] = 0.0
    try:
        return replace(
            RESIDUAL, **{name: value for name, value in given.items() if value is not None}
        )
    except Invalid as e:
        raise CheckpointError(f"{file.path}: subtalker_{e}") from None

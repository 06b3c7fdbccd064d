"""What a checkpoint's generation_config.json says of speech: read once, when the model is opened. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.control.request import Params
from stretto.models.generation import Generation
from stretto.types import SamplingParams

RESIDUAL = SamplingParams(temperature=0.9, top_k=50)
"""How the code predictor was made to pick all codes of a frame but the first."""
PREDICTOR = "subtalker_"


def read_defaults(directory: Path) -> tuple[Params, SamplingParams]:
    """The parameters of a request that states none, and how the code predictor picks."""
    file = Generation.read(directory)
    given = {f"speech_{name}": value for name, value in file.drawn("").items()}
    if file.first("do_sample") is False:
        given["speech_temperature"] = 0.0
    for most in file.numbers(kind=int, max_frames=("max_new_tokens",)).values():
        # The last one is the end. The released file states all that the context has room for, without a text.
        given["max_frames"] = max(1, min(most - 1, Params().max_frames))
    residual = file.sampling(RESIDUAL, PREDICTOR)
    if file.first(f"{PREDICTOR}dosample", f"{PREDICTOR}do_sample") is False:
        residual = replace(residual, temperature=0.0)
    return file.params(given), residual

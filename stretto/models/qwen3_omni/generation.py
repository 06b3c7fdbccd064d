"""What a checkpoint's generation_config.json says of answers: read once, when the model is opened.
Imports no torch.

The released file speaks of the talker alone (`talker_temperature` and others) and leaves the
thinker to the library's own default, which is greedy. A file may state the thinker's too, with the
prefix `thinker_` or with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.models.generation import DRAWN, GenerationFile
from stretto.params import Params


def read_defaults(directory: Path) -> Params:
    """The parameters of a request that states none."""
    file = GenerationFile.open(directory)
    given: dict[str, Any] = {}
    for name, kind in DRAWN.items():
        given[name] = file.number((f"thinker_{name}", name), kind)
        given[f"speech_{name}"] = file.number((f"talker_{name}",), kind)
    given["min_p"] = file.number(("thinker_min_p", "min_p"), float)
    draws = file.first(("thinker_do_sample", "do_sample"))
    if draws is False:
        given["temperature"] = 0.0
    elif draws is True and given["temperature"] is None:
        given["temperature"] = 1.0
    if file.raw.get("talker_do_sample") is False:
        given["speech_temperature"] = 0.0
    given["max_text_tokens"] = file.number(("thinker_max_new_tokens", "max_new_tokens"), int)
    if (picks := file.number(("talker_max_new_tokens",), int)) is not None:
        given["max_frames"] = max(1, picks - 1)  # the last one is the end
    return file.params(given)

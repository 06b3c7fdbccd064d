"""What a checkpoint's generation_config.json says of answers: read once, when the model is opened. Imports no torch.

The released file speaks of the talker alone (`talker_temperature` and others) and leaves the thinker to the library's
own default, which is greedy. A file may state the thinker's too, with the prefix `thinker_` or with none."""

from __future__ import annotations

from pathlib import Path

from stretto.control.request import Params
from stretto.models.generation import Generation


def read_defaults(directory: Path) -> Params:
    """The parameters of a request that states none."""
    file = Generation.read(directory)
    given = file.drawn("thinker_", "") | file.numbers(kind=float, min_p=("thinker_min_p", "min_p"))
    draws = file.first("thinker_do_sample", "do_sample")
    if draws is False:
        given["temperature"] = 0.0
    elif draws is True:
        given.setdefault("temperature", 1.0)
    given |= {f"speech_{name}": value for name, value in file.drawn("talker_").items()}
    if file.first("talker_do_sample") is False:
        given["speech_temperature"] = 0.0
    given |= file.numbers(
        kind=int, max_text_tokens=("thinker_max_new_tokens", "max_new_tokens"), max_frames=("talker_max_new_tokens",)
    )
    if "max_frames" in given:
        given["max_frames"] = max(1, given["max_frames"] - 1)  # the last one is the end
    return file.params(given)

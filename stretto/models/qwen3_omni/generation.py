"""What a checkpoint's generation_config.json says of answers: read once, when the model is opened. Imports no torch.

The released file speaks of the talker alone (`talker_temperature` and others) and leaves the thinker to the library's
own default, which is greedy. A file may state the thinker's too, with the prefix `thinker_` or with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.control.request import Params
from stretto.errors import CheckpointError, Invalid
from stretto.prompt.files import read_json

FILE = "generation_config.json"
TEXT = {"temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float}
SPEECH = {f"talker_{name}": (f"speech_{name}", kind) for name, kind in TEXT.items()}


def read_defaults(directory: Path) -> Params:
    """The parameters of a request that states none."""
    path = directory / FILE
    raw = read_json(path) if path.exists() else {}
    given: dict[str, Any] = {}
    for name, kind in TEXT.items():
        _take(raw, (f"thinker_{name}", name), name, kind, given, path)
    _take(raw, ("thinker_min_p", "min_p"), "min_p", float, given, path)
    draws = _first(raw, ("thinker_do_sample", "do_sample"))
    if draws is False:
        given["temperature"] = 0.0
    elif draws is True:
        given.setdefault("temperature", 1.0)
    for key, (name, kind) in SPEECH.items():
        _take(raw, (key,), name, kind, given, path)
    if raw.get("talker_do_sample") is False:
        given["speech_temperature"] = 0.0
    _take(raw, ("thinker_max_new_tokens", "max_new_tokens"), "max_text_tokens", int, given, path)
    _take(raw, ("talker_max_new_tokens",), "max_frames", int, given, path)
    if "max_frames" in given:
        given["max_frames"] = max(1, given["max_frames"] - 1)  # the last one is the end
    try:
        return Params(**given)
    except Invalid as e:
        raise CheckpointError(f"{path}: {e}") from None


def _first(raw: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((raw[k] for k in keys if raw.get(k) is not None), None)


def _take(raw: dict[str, Any], keys: tuple[str, ...], name: str, kind: type, given: dict[str, Any], path: Path) -> None:
    value = _first(raw, keys)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
        raise CheckpointError(f"{path}: {keys[-1]} must be a number, got {value!r}")
    given[name] = kind(value)

"""The model to measure: a checkpoint directory, or one that is written for the run."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.models.qwen3_tts.config import CODEC, Kind
from stretto.testing import qwen3_tts as speaking
from stretto.testing.checkpoints import write_json
from stretto.testing.qwen3_omni import released_config, tiny_config, write_tiny

SPEAKING: dict[str, tuple[Kind, str]] = {
    "tts-0.6b": ("custom_voice", "0b6"),
    "tts-1.7b": ("custom_voice", "1b7"),
    "tts-0.6b-base": ("base", "0b6"),
    "tts-1.7b-base": ("base", "1b7"),
}
"""Released shapes of models that read aloud; those called base clone voices."""


def add_model_arguments(p: argparse.ArgumentParser, model: str = "tiny") -> None:
    p.add_argument(
        "--model", default=model,
        help="checkpoint directory, or `tiny`, or `released` (its shape, random weights; default: "
             "%(default)s), or a "
        f"speech model's shape: {', '.join(SPEAKING)}",
    )  # fmt: skip
    p.add_argument("--device", help="cpu, cuda ... (default: cuda if there is one)")
    p.add_argument(
        "--host", action="append", default=[], metavar="NAME=VALUE",
        help="a field of HostSettings, such as max_rows=64 (the value is JSON); may be repeated",
    )  # fmt: skip


def device_here() -> str:
    """Whether there is a GPU, without the seconds that asking torch takes."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def load_format(model: str) -> str:
    return "dummy" if model in ("released", *SPEAKING) else "safetensors"


def host_fields(given: list[str]) -> dict[str, Any]:
    """`max_rows=64` and so on; values are JSON."""
    known, values = {f.name for f in fields(HostSettings)}, {}
    for item in given:
        name, _, value = item.partition("=")
        if name not in known:
            raise Invalid(f"HostSettings has no field {name!r}", "host")
        try:
            values[name] = json.loads(value)
        except ValueError:
            raise Invalid(f"--host {item}: the value must be JSON", "host") from None
    return values


def host_settings(args: argparse.Namespace, **more: Any) -> HostSettings:
    """As the model arguments say."""
    given = {"device": args.device or device_here(), "load_format": load_format(args.model)}
    return HostSettings.from_dict({**given, **more, **host_fields(args.host)})


@contextmanager
def checkpoint(model: str) -> Iterator[Path]:
    """The directory to open: as given, or written for the run."""
    if model not in ("tiny", "released", *SPEAKING):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        directory = Path(folder) / model
        if model in SPEAKING:
            kind, size = SPEAKING[model]
            write_speaking(directory, kind, size)
            yield directory
            return
        write_tiny(directory) if model == "tiny" else write_released(directory)
        yield directory


def write_speaking(folder: Path, kind: Kind, size: str) -> None:
    """A released configuration without weights, for random ones (`load_format="dummy"`). Its text
    is the tiny one's."""
    tiny = speaking.tiny_config(kind, size)
    (folder / CODEC).mkdir(parents=True, exist_ok=True)
    tokens = {key: value for key, value in tiny.items() if key.endswith("_token_id")}
    speaking.write_text_files(folder)
    write_json(folder / CODEC / "config.json", speaking.released_codec())
    write_json(folder / "config.json", {**speaking.released_config(kind, size), **tokens})


def write_released(directory: Path) -> None:
    """The released shape without weights, for `load_format="dummy"`. The words are the tiny
    model's, so only the config's token ids differ from the released ones; all sizes, the
    vocabulary's included, are the same."""
    write_tiny(directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    config = _with_ids(released_config(), tiny_config())
    _fill_vocabulary(
        directory / "tokenizer.json", config["thinker_config"]["text_config"]["vocab_size"]
    )
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _fill_vocabulary(path: Path, size: int) -> None:
    """Words for all ids, so that random tokens make as much text for a client as real ones do."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    vocab = spec["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in spec["added_tokens"])}
    vocab.update({f"Ġw{i}": i for i in range(size) if i not in taken})
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def _with_ids(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`base` with the token ids of `other`."""
    result = dict(base)
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = _with_ids(base[key], value)
        elif key.endswith("_token_id") and not key.startswith("codec"):
            result[key] = value
    return result

"""The model to measure: a checkpoint directory, or one that is written for the run."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.kernels.formats import WeightFormat
from stretto.layers.config import DecoderConfig
from stretto.models.checkpoint import ITEM_BYTES, SINGLE
from stretto.models.quantised.placing import attention_names, expert_names
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_tts.config import CODEC, Kind
from stretto.testing import qwen3_tts as speaking
from stretto.testing.checkpoints import write_json
from stretto.testing.qwen3_omni import (
    FORMATS,
    released_config,
    released_formats,
    tiny_config,
    write_tiny,
)

SPEAKING: dict[str, tuple[Kind, str]] = {
    "tts-0.6b": ("custom_voice", "0b6"),
    "tts-1.7b": ("custom_voice", "1b7"),
    "tts-0.6b-base": ("base", "0b6"),
    "tts-1.7b-base": ("base", "1b7"),
}
"""Released shapes of models that read aloud; those called base clone voices."""


RELEASED = {"released": "bf16", **{f"released-{name}": name for name in FORMATS if name != "bf16"}}
"""The released shape, by how its weights are stored."""


def add_model_arguments(p: argparse.ArgumentParser, model: str = "tiny") -> None:
    p.add_argument(
        "--model", default=model,
        help="checkpoint directory, or `tiny`, or `released` (its shape, random weights; default: "
             "%(default)s), the same stored otherwise: "
        f"{', '.join(list(RELEASED)[1:])}, or a speech model's shape: {', '.join(SPEAKING)}",
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
    return "dummy" if model in (*RELEASED, *SPEAKING) else "safetensors"


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
    if model not in ("tiny", *RELEASED, *SPEAKING):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        directory = Path(folder) / model
        if model in SPEAKING:
            kind, size = SPEAKING[model]
            write_speaking(directory, kind, size)
            yield directory
            return
        if model == "tiny":
            write_tiny(directory)
        else:
            write_released(directory)
            write_headers(directory, RELEASED[model])
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


QUANTIZATION: dict[str, dict[str, Any]] = {
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
        }}},
    },
    "float8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def write_headers(directory: Path, weights: str) -> None:
    """Headers of quantised matrices as a checkpoint of this format has them, in front of a hole of
    their size: how random weights are to be stored (`load_format="dummy"`)."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    config = OmniConfig.read(directory)
    formats = released_formats(weights)
    for name, form in formats.items():
        stage, _, part = name.partition(".")
        decoder = config.thinker.text if stage == "thinker" else config.talker.text
        names = attention_names if part == "attention" else expert_names
        for matrix in names(f"{stage}.model.", decoder):
            tensors |= packed_tensors(matrix, *shape_of(matrix, decoder), form)
    if not tensors:
        return
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with open(directory / SINGLE, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    path = directory / "config.json"
    config_json = json.loads(path.read_text(encoding="utf-8"))
    kind = next(iter(formats.values())).kind
    write_json(path, {**config_json, "quantization_config": QUANTIZATION[kind]})


def shape_of(name: str, c: DecoderConfig) -> tuple[int, int]:
    """Outputs and inputs of a matrix of a decoder."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    size = 0 if c.moe is None else c.moe.expert_size
    return {
        "q": (heads, c.hidden_size), "k": (kv, c.hidden_size), "v": (kv, c.hidden_size),
        "o": (c.hidden_size, heads), "gate": (size, c.hidden_size), "up": (size, c.hidden_size),
        "down": (c.hidden_size, size),
    }[name.split(".")[-2].removesuffix("_proj")]  # fmt: skip


def packed_tensors(
    name: str, outputs: int, inputs: int, form: WeightFormat
) -> dict[str, tuple[str, list[int]]]:
    stem = name.removesuffix("weight")
    if form.kind == "float8":
        blocks = [-(-outputs // form.block_rows), -(-inputs // form.group)]
        return {name: ("F8_E4M3", [outputs, inputs]), f"{stem}weight_scale_inv": ("BF16", blocks)}
    return {
        f"{stem}weight_packed": ("I32", [outputs, inputs // 8]),
        f"{stem}weight_scale": ("BF16", [outputs, inputs // form.group]),
        f"{stem}weight_shape": ("I64", [2]),
    }


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

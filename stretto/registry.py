"""Which families there are. A checkpoint names its own in config.json (`model_type`); third parties add theirs by an
entry point of that name in the group `stretto.families`. Nothing else in the package names a family. No torch."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from stretto.errors import CheckpointError, Invalid
from stretto.family import Family, Model
from stretto.named import load
from stretto.prompt.files import read_json

ENTRY_POINTS = "stretto.families"

FAMILIES = {
    "qwen3_omni_moe": "stretto.models.qwen3_omni.family:open_model",
    "qwen3_tts": "stretto.models.qwen3_tts.family:open_model",
}
"""Those that come with the package, by `model_type`."""

TINY = {
    "qwen3-omni": "stretto.models.qwen3_omni.tiny:write_tiny",
    "qwen3-tts": "stretto.models.qwen3_tts.tiny:write_tiny",
    "qwen3-tts-design": "stretto.models.qwen3_tts.tiny:write_design",
    "qwen3-tts-base": "stretto.models.qwen3_tts.tiny:write_base",
}
"""Writers of tiny checkpoints with random weights. The first one's is served when none is named."""


def open_model(directory: str | Path) -> Model:
    """The checkpoint in a directory, opened by its family."""
    path = Path(directory)
    return find(model_type(path), path)(path)


def find(kind: str, where: Path) -> Family:
    if kind in FAMILIES:
        return cast(Family, load(FAMILIES[kind]))
    for entry in entry_points(group=ENTRY_POINTS, name=kind):
        return cast(Family, entry.load())
    known = ", ".join(sorted({*FAMILIES, *(e.name for e in entry_points(group=ENTRY_POINTS))}))
    raise CheckpointError(f"{where}: there is no family for model_type {kind!r}; known are {known}")


def model_type(directory: Path) -> str:
    path = directory / "config.json"
    kind = read_json(path).get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: model_type must be text, got {kind!r}")
    return kind


def write_tiny(directory: str | Path, seed: int = 0, family: str | None = None) -> None:
    """A tiny checkpoint: of a family, or the one that is served when none is named."""
    family = family or next(iter(TINY))
    if family not in TINY:
        raise Invalid(f"there is no tiny checkpoint of {family!r}; there are {', '.join(TINY)}", "family")
    load(TINY[family])(Path(directory), seed)

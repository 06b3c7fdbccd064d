"""Which families there are. A checkpoint names its own in config.json (`model_type`). Those that
come with the package are found under `models`, whose packages say which types are theirs; third
parties add theirs by an entry point of that name in the group `stretto.families`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Protocol, cast

from stretto._imports import load
from stretto._validation import read_json_file
from stretto.errors import CheckpointError, Invalid
from stretto.family import Family, Model

ENTRY_POINTS = "stretto.families"


def _built_in() -> list[ModuleType]:
    """The packages under `models` that are families."""
    found = iter_modules([str(Path(__file__).parent / "models")])
    packages = [import_module(f"stretto.models.{m.name}") for m in found if m.ispkg]
    return [p for p in packages if hasattr(p, "MODEL_TYPES")]


FAMILIES: dict[str, str] = {
    kind: f"{p.__name__}.family:open_model" for p in _built_in() for kind in p.MODEL_TYPES
}
"""Those that come with the package, by `model_type`."""

TINY: dict[str, str] = {name: writer for p in _built_in() for name, writer in p.TINY.items()}
"""Writers of tiny checkpoints with random weights."""

PACKABLE: dict[str, str] = {
    kind: p.PACKABLE for p in _built_in() if p.PACKABLE for kind in p.MODEL_TYPES
}
"""Functions that name the matrices that can stay packed, by `model_type`."""

PACKABLE_TOO: dict[str, str] = {
    part: says for p in _built_in() for part, says in p.PACKABLE_TOO.items()
}
"""Parts that are quantised only if asked."""


class Quantising(Protocol):
    """What writes a quantised checkpoint."""

    @property
    def total(self) -> int:
        """Bytes of wide weights that are read."""
        ...

    @property
    def written(self) -> int:
        """Bytes of weights that there are in the end."""
        ...

    def run(self, tick: Callable[[int], None]) -> None:
        """`tick` is called with the bytes that were read since its last call."""
        ...


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


def card_rooms(directory: Path) -> dict[str, str]:
    """What a checkpoint leaves of cards of common sizes."""
    pipeline = open_model(directory).pipeline
    found = load("stretto.models.cards:describe_cards")(directory, pipeline)
    return cast(dict[str, str], found)


def quantise(
    directory: Path, out: Path, parts: Collection[str], scheme: str, **options: Any
) -> Quantising:
    """What writes a quantised checkpoint; nothing is written yet. `parts`: of `PACKABLE_TOO`."""
    kind = model_type(directory)
    if kind not in PACKABLE:
        known = ", ".join(PACKABLE)
        raise Invalid(f"{directory}: a {kind} cannot be quantised; {known} can", "model")
    named = load(PACKABLE[kind])(directory)
    chosen = {n: names for i, (n, names) in enumerate(named.items()) if i == 0 or n in parts}
    job = load("stretto.models.quantised.convert:QuantiseJob")
    return cast(Quantising, job.open(directory, out, chosen, scheme, **options))


def model_type(directory: Path) -> str:
    path = directory / "config.json"
    kind = read_json_file(path).get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: model_type must be text, got {kind!r}")
    return kind


def write_tiny(directory: str | Path, seed: int = 0, family: str | None = None) -> None:
    """A tiny checkpoint: of a family, or the one that is served when none is named."""
    family = family or str(load("stretto.models:DEFAULT_TINY"))
    if family not in TINY:
        raise Invalid(
            f"there is no tiny checkpoint of {family!r}; there are {', '.join(TINY)}", "family"
        )
    load(TINY[family])(Path(directory), seed)

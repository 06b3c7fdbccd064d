"""The small speaking checkpoint that comes with the project, for commands that are given no model.

It is a package of its own, `stretto_nano` (`packages/nano` in a clone), so that the engine's own
package stays small. Called by the commands. `read_example_prompts`, `read_description` and
`is_random` are for any checkpoint: families and the engine call them when they open one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

PACKAGE = "stretto_nano"
CHECKPOINT = "nano"  # its folder there, and so the name that it is served by
CLONE = Path(__file__).resolve().parents[1] / "packages" / "nano" / PACKAGE
EXAMPLE_PROMPTS = "ideas.json"
MAX_EXAMPLE_PROMPTS, MAX_LETTERS = 6, 200
DESCRIPTION = "description.txt"
MAX_DESCRIPTION = 400  # letters
RANDOM = "random_weights"
"""In config.json: true where the weights are random numbers. Writers of tiny checkpoints put it
there."""


def find(clone: Path = CLONE) -> Path | None:
    """Its directory: of the installed package, or in a clone; None where its weights are not
    there."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((f / CHECKPOINT for f in (*folders, clone) if complete(f / CHECKPOINT)), None)


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


def is_random(folder: Path) -> bool:
    """Whether a checkpoint says of itself that nobody has trained it."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get(RANDOM) is True

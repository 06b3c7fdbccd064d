"""Reading the files of a checkpoint that say how a prompt is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return raw

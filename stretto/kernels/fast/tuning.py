"""Launch parameters of kernels, by kernel and shape: tuned values from disk, else the kernel's own defaults.

`tuned.json` beside this module holds what `python -m bench.tune` found on the hardware it names; a file of one's own
(STRETTO_TUNING, or `~/.cache/stretto/tuning.json`) goes before it. Read once per process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

SHIPPED = Path(__file__).with_name("tuned.json")


def own_file() -> Path:
    given = os.environ.get("STRETTO_TUNING")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stretto" / "tuning.json"


@cache
def _table() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for path in (SHIPPED, own_file()):
        if path.exists():
            found.update(msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, int]]))
    return found


def name_of(kernel: str, key: Sequence[int]) -> str:
    return f"{kernel}/{'x'.join(str(k) for k in key)}"


def config(kernel: str, key: Sequence[int], default: dict[str, int]) -> dict[str, int]:
    """Parameters for one shape; tuned ones replace the defaults one by one."""
    return default | _table().get(name_of(kernel, key), {})


def save(path: Path, found: dict[str, dict[str, int]]) -> None:
    """Add tuned values to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, int]]) if path.exists() else {}
    text = msgspec.json.format(msgspec.json.encode(dict(sorted((known | found).items()))), indent=1)
    path.write_bytes(text + b"\n")
    _table.cache_clear()

"""Launch parameters of kernels, by kernel and shape: tuned values from disk, else the kernel's own
defaults.

`tuned.json` beside this module holds what `python -m bench kernels --parts alone` found on an H200;
other cards take its values too, within their limits (`device.py`). What `stretto tune` found on
this card goes before it: a file in the cache folder, whose name says the card, Triton's version and
the driver's (STRETTO_TUNING: another file). Both are read once per process. A tuner can replace
values for a while, and learn which ones are asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from stretto.errors import Invalid

SHIPPED = Path(__file__).with_name("tuned.json")


def own_file() -> Path:
    given = os.environ.get("STRETTO_TUNING")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "stretto" / "tuning" / f"{card()}.json"


@cache
def card() -> str:
    """This process's device and what compiles for it, as a part of a file's name. Another driver or
    compiler may want other parameters."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    words = f"{name} triton {version('triton')} driver {driver()}"
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the kernel's driver; none, where it does not say."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return found[0] if found is not None else "none"


@cache
def _table() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for path in (SHIPPED, own_file()):
        if path.exists():
            found.update(_read(path))
    return found


def _read(path: Path) -> dict[str, dict[str, int]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, int]])
    except (msgspec.DecodeError, OSError) as e:
        raise Invalid(
            f"{path}: is not a file of launch parameters ({e}); delete it, or tune again"
        ) from None


def name_of(kernel: str, key: Sequence[int]) -> str:
    return f"{kernel}/{'x'.join(str(k) for k in key)}"


@dataclass(frozen=True, slots=True)
class TuningQuestion:
    """One question to `config`, and its answer."""

    kernel: str
    key: tuple[int, ...]
    default: dict[str, int]
    found: dict[str, int]


@dataclass(slots=True)
class _Trial:
    changes: Mapping[str, dict[str, int]]
    asked: dict[str, TuningQuestion] = field(default_factory=dict)


_trial: _Trial | None = None


def config(kernel: str, key: Sequence[int], default: dict[str, int]) -> dict[str, int]:
    """Parameters for one shape; tuned ones replace the defaults one by one."""
    name = name_of(kernel, key)
    if _trial is None:
        return default | _table().get(name, {})
    changed = _trial.changes.get(name)
    found = default | (_table().get(name, {}) if changed is None else changed)
    _trial.asked[name] = TuningQuestion(kernel, tuple(key), default, found)
    return found


@contextmanager
def instead(changes: Mapping[str, dict[str, int]]) -> Iterator[dict[str, TuningQuestion]]:
    """For a while, and for the whole process, `changes` stand where the files' values did, as if
    they had been saved. Yields all that is asked for meanwhile, by name, in the order of the first
    question."""
    global _trial
    before, _trial = _trial, _Trial(changes)
    try:
        yield _trial.asked
    finally:
        _trial = before


def save(path: Path, found: dict[str, dict[str, int]]) -> None:
    """Add tuned values to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _read(path) if path.exists() else {}
    text = msgspec.json.format(msgspec.json.encode(dict(sorted((known | found).items()))), indent=1)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(text + b"\n")
    fresh.replace(path)
    _table.cache_clear()

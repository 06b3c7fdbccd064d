"""Declares a field of a configuration record that people can set, and gives its names.

The records stay plain frozen dataclasses; `config/flags.py` makes flags of their fields,
`config/loader.py` reads them. One rule gives all names: the setting `max_body_mb` is
`--max-body-mb`, STRETTO_MAX_BODY_MB, and `max-body-mb` or `max_body_mb` in YAML. A tuning setting
has no flag of its own: `--tune launch_lead_ms=2`, STRETTO_TUNE, or the mapping `tune` in YAML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields
from typing import Any

from stretto.errors import Invalid

PREFIX = "STRETTO_"
TUNE = "tune"
"""The group of tuning settings, and the flag that sets them."""


def setting(
    default: Any,
    group: str,
    help: str,
    metavar: str | None = None,
    *,
    name: str | None = None,
    old_name: str | None = None,
    parse: Callable[[str], Any] | None = None,
    served: Any = MISSING,
) -> Any:
    """`group`: of flags in the help. `name`, with underscores: where the flag is not called as the
    field is. `old_name`: accepted for one version, with a warning. `parse` makes the field's value
    of the text of a flag, a variable or a YAML value. `served`: the default of the command line,
    where it differs from the record's. A `default` that is a type is called."""
    metadata = {
        "group": group,
        "help": help,
        "metavar": metavar,
        "name": name,
        "old_name": old_name,
        "parse": parse,
        "served": served,
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def tuning(default: Any, help: str, *, old_name: str | None = None) -> Any:
    """A setting for experiments and unusual machines: set by `--tune`, of a simple type."""
    return setting(default, TUNE, help, old_name=old_name)


def settings_of(*records: type[Any]) -> list[Field[Any]]:
    return [f for record in records for f in fields(record) if "group" in f.metadata]


def is_tuning(f: Field[Any]) -> bool:
    return bool(f.metadata["group"] == TUNE)


def name_of(f: Field[Any]) -> str:
    return f.metadata["name"] or f.name


def old_names(f: Field[Any]) -> list[str]:
    """Names that this version still accepts as a flag, a variable and a YAML key. Those of tuning
    settings had a flag each before `--tune`."""
    renamed = f.metadata["old_name"]
    if renamed is not None:
        return [renamed]
    return [name_of(f)] if is_tuning(f) else []


def names_of(settings: Iterable[Field[Any]]) -> set[str]:
    """All names under which these may stand in the file or, in capitals, in the environment."""
    names = set()
    for f in settings:
        names.add(TUNE if is_tuning(f) else name_of(f))
        names.update(old_names(f))
    return names


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def default_of(f: Field[Any]) -> Any:
    """The default of the command line."""
    return f.default if f.metadata["served"] is MISSING else f.metadata["served"]


def check_finite(record: Any) -> None:
    """Refuse a number that is infinite or not a number: it passes most comparisons, and no setting
    means anything by it. Every record of settings calls this when it is made."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            name = f.metadata.get("name") or f.name
            raise Invalid(f"{name} must be a finite number, got {value}", name)

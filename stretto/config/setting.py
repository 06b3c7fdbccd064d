"""A field of a settings record that people can set: with what its flag says, and what it is called
there.

The records stay plain frozen dataclasses; `config/loader.py` makes flags, variables and YAML keys
of their fields. Imports nothing of ours but errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any

from stretto.errors import Invalid


def setting(
    default: Any,
    group: str,
    help: str,
    metavar: str | None = None,
    *,
    name: str | None = None,
    parse: Callable[[str], Any] | None = None,
    served: Any = MISSING,
) -> Any:
    """`group` of flags in the help. `name`, with underscores: where the flag is not called as the
    field is. `parse` makes the field's value of the text of a flag, a variable or a YAML value.
    `served`: what the command line takes where nothing is said, if that is not what the record
    takes by itself. A `default` that is a type is called."""
    metadata = {
        "group": group,
        "help": help,
        "metavar": metavar,
        "name": name,
        "parse": parse,
        "served": served,
    }
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_finite(record: Any) -> None:
    """Refuse a number that is infinite or none: it passes most comparisons, and no setting means
    anything by it. Every record of settings calls this when it is made."""
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            name = f.metadata.get("name") or f.name
            raise Invalid(f"{name} must be a finite number, got {value}", name)

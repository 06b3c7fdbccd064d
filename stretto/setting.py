"""A field of a settings record that people can set: with what its flag says, and what it is called there.

The records stay plain frozen dataclasses; `server/settings.py` makes flags, variables and YAML keys of their fields.
Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any


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
    """`group` of flags in the help. `name`, with underscores: where the flag is not called as the field is. `parse`
    makes the field's value of the text of a flag, a variable or a YAML value. `served`: what the command line takes
    where nothing is said, if that is not what the record takes by itself. A `default` that is a type is called."""
    metadata = {"group": group, "help": help, "metavar": metavar, "name": name, "parse": parse, "served": served}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)

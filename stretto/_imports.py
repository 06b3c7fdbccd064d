"""Objects that are named in data, and loaded where they are needed. Imports nothing of ours."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(name: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)

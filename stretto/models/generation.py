"""A checkpoint's generation_config.json, read once, when its model is opened. Families say which of
its fields mean what. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto._validation import read_json_file
from stretto.errors import CheckpointError, Invalid
from stretto.params import Params

FILE = "generation_config.json"
DRAWN = {"temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float}
"""How a token is drawn: names, with whatever stands before them, and what their values are."""


@dataclass(frozen=True, slots=True)
class GenerationFile:
    """What the file says. Without a file, nothing."""

    path: Path
    raw: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> GenerationFile:
        path = directory / FILE
        return cls(path, read_json_file(path) if path.exists() else {})

    def first(self, keys: Sequence[str]) -> Any:
        """The first of these that it states."""
        return next((self.raw[k] for k in keys if self.raw.get(k) is not None), None)

    def number(self, keys: Sequence[str], kind: type) -> Any:
        """The same, which must be a number of this kind; None: it states none of them."""
        value = self.first(keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
            raise CheckpointError(f"{self.path}: {keys[-1]} must be a number, got {value!r}")
        return kind(value)

    def params(self, values: dict[str, Any]) -> Params:
        """The parameters of a request that states none, of what was found."""
        try:
            return Params(**{name: value for name, value in values.items() if value is not None})
        except Invalid as e:
            raise CheckpointError(f"{self.path}: {e}") from None

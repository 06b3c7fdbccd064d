"""A checkpoint's generation_config.json, which says how its answers are drawn. Families read it when the model is
opened. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.control.request import Params
from stretto.errors import CheckpointError, Invalid
from stretto.prompt.files import read_json
from stretto.types import SamplingParams

FILE = "generation_config.json"
DRAWN = {"temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float}
"""What files say of how tokens are drawn, by the library's names."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a file states; nothing, if there is none."""

    path: Path
    raw: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Generation:
        path = directory / FILE
        return cls(path, read_json(path) if path.exists() else {})

    def first(self, *keys: str) -> Any:
        """The first of these that is stated."""
        return next((self.raw[k] for k in keys if self.raw.get(k) is not None), None)

    def numbers(self, *, kind: type, **names: tuple[str, ...]) -> dict[str, Any]:
        """Numbers by our names, each under the first of its keys that is stated; without those that nobody states."""
        given: dict[str, Any] = {}
        for name, keys in names.items():
            value = self.first(*keys)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
                raise CheckpointError(f"{self.path}: {keys[-1]} must be a number, got {value!r}")
            given[name] = kind(value)
        return given

    def drawn(self, *prefixes: str) -> dict[str, Any]:
        """How tokens are drawn, by the library's names; with several prefixes, the first that has one."""
        given: dict[str, Any] = {}
        for name, kind in DRAWN.items():
            given |= self.numbers(kind=kind, **{name: tuple(f"{p}{name}" for p in prefixes)})
        return given

    def params(self, given: dict[str, Any]) -> Params:
        """Of a request that states none."""
        try:
            return Params(**given)
        except Invalid as e:
            raise CheckpointError(f"{self.path}: {e}") from None

    def sampling(self, usual: SamplingParams, *prefixes: str) -> SamplingParams:
        """Of what requests say nothing of."""
        try:
            return replace(usual, **self.drawn(*prefixes))
        except Invalid as e:
            raise CheckpointError(f"{self.path}: {e}") from None

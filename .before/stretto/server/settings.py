"""Reads configuration records from flags, the environment and a YAML file: flag > environment > YAML > default.

A record is a frozen dataclass whose fields were made by `config.setting`. One rule gives all names: the field
`max_body_mb` is `--max-body-mb`, STRETTO_MAX_BODY_MB, and `max-body-mb` or `max_body_mb` in YAML."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stretto.errors import Invalid

C = TypeVar("C")
PREFIX = "STRETTO_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def add_flags(parser: argparse.ArgumentParser, record: type[Any], titles: Mapping[str, str]) -> None:
    """A flag for each field, in its group. Absent flags stay absent: their values come from elsewhere."""
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    hints = get_type_hints(record)
    for f in _settings(record):
        _add_flag(groups[f.metadata["group"]], f, _bare(hints[f.name]))


def _add_flag(group: argparse._ArgumentGroup, f: Field[Any], kind: Any) -> None:
    name = "--" + f.name.replace("_", "-")
    text = f.metadata["help"].replace("%", "%%") + _default_text(f)
    metavar = f.metadata["metavar"]
    if kind is bool:
        group.add_argument(
            name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )  # fmt: skip
    elif get_origin(kind) is Literal:
        group.add_argument(name, choices=get_args(kind), default=argparse.SUPPRESS, help=text)
    elif get_origin(kind) is tuple:
        text = text.replace(" (default", "; repeatable (default") if "(default" in text else f"{text}; repeatable"
        group.add_argument(name, action="append", metavar=metavar, default=argparse.SUPPRESS, help=text)
    else:
        shown = metavar or kind.__name__.upper()
        group.add_argument(name, type=kind, metavar=shown, default=argparse.SUPPRESS, help=text)


def _default_text(f: Field[Any]) -> str:
    if f.default in (None, "", ()) or "default" in f.metadata["help"]:
        return ""
    shown = " ".join(f.default) if isinstance(f.default, tuple) else str(f.default).removesuffix(".0")
    return f" (default: {shown})"


def read(
    record: type[C],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
) -> C:
    """The record, each field from the first place that states it."""
    hints, given = get_type_hints(record), {}
    for f in _settings(record):
        kind, variable = _bare(hints[f.name]), PREFIX + f.name.upper()
        if f.name in flags:
            value = flags[f.name]
            given[f.name] = tuple(value) if get_origin(kind) is tuple else value
        elif variable in environ:
            given[f.name] = _parse(environ[variable], kind, variable)
        elif file is not None and f.name in file:
            given[f.name] = _parse(file[f.name], kind, f.name)
    return record(**given)


def read_yaml(path: str | Path, records: Sequence[type[Any]], others: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML file with flags' names. A name no record has is an error, not a silent default."""
    import yaml  # only when there is a file

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise Invalid(f"{path}: cannot be read ({' '.join(str(e).split())})", "config") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise Invalid(f"{path}: must hold names and values", "config")
    out = {str(k).replace("-", "_"): v for k, v in raw.items()}
    known = {f.name for r in records for f in _settings(r)} | set(others)
    if unknown := sorted(set(out) - known):
        raise Invalid(f"{path}: unknown {', '.join(unknown)}", "config")
    return out


def unknown_variables(
    environ: Mapping[str, str], records: Sequence[type[Any]], others: Sequence[str] = ()
) -> list[str]:
    """Variables that look like ours and mean nothing: most likely misspelt."""
    known = {PREFIX + f.name.upper() for r in records for f in _settings(r)} | set(others)
    return sorted(v for v in environ if v.startswith(PREFIX) and v not in known)


def _settings(record: type[Any]) -> list[Field[Any]]:
    return [f for f in fields(record) if "group" in f.metadata]


def _bare(hint: Any) -> Any:
    """The type without `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        [hint] = [t for t in get_args(hint) if t is not type(None)]
    return hint


def _parse(value: Any, kind: Any, name: str) -> Any:
    """A value of YAML, or text of the environment, as a field's type."""
    if value is None:
        return None
    if get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        return tuple(str(p).strip() for p in parts if str(p).strip())
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise Invalid(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}", name)
        return value
    parsers: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: float, str: str}
    try:
        return parsers[kind](value)
    except (TypeError, ValueError):
        raise Invalid(f"{name} must be {'a yes or no' if kind is bool else f'of type {kind.__name__}'}", name) from None


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(word)
    return word in _TRUE


def _int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError(value)
    return int(value)

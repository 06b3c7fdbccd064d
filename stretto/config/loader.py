"""Reads configuration records from flags, the environment and a YAML file: flag > environment >
YAML > default.

A record is a frozen dataclass whose fields were made by `setting`. One rule gives all names: the
setting `max_body_mb` is `--max-body-mb`, STRETTO_MAX_BODY_MB, and `max-body-mb` or `max_body_mb` in
YAML. A setting is called as its field is, but for a few that have a name of their own. `table`
shows them all."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stretto.errors import Invalid

C = TypeVar("C")
PREFIX = "STRETTO_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def name_of(f: Field[Any]) -> str:
    return f.metadata["name"] or f.name


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser,
    records: Sequence[type[Any]],
    titles: Mapping[str, str],
    leave_out: Collection[str] = (),
) -> None:
    """A flag for each setting, in its group. Absent flags stay absent: their values come from
    elsewhere."""
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    for record in records:
        hints = get_type_hints(record)
        for f in settings_of(record):
            if name_of(f) not in leave_out:
                _add_flag(groups[f.metadata["group"]], f, _bare(hints[f.name]))


def _add_flag(group: argparse._ArgumentGroup, f: Field[Any], kind: Any) -> None:
    flag, metavar = flag_of(name_of(f)), f.metadata["metavar"]
    given: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": f.metadata["help"].replace("%", "%%"),
    }
    if shown := "" if "default" in given["help"] else default_text(f):
        given["help"] += f" (default: {shown})"
    if f.metadata["parse"] is not None:
        group.add_argument(flag, metavar=metavar, **given)
    elif kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **given)
    elif get_origin(kind) is Literal:
        group.add_argument(flag, choices=get_args(kind), **given)
    elif get_origin(kind) is tuple:
        words, mark, rest = given["help"].partition(" (default")
        given["help"] = f"{words}; repeatable{mark}{rest}"
        group.add_argument(flag, action="append", metavar=metavar, **given)
    else:
        group.add_argument(flag, type=kind, metavar=metavar or kind.__name__.upper(), **given)


def default_text(f: Field[Any]) -> str:
    """As people write it; nothing where there is none."""
    value = _default(f)
    if value is MISSING or value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, tuple) else str(value).removesuffix(".0")


def _default(f: Field[Any]) -> Any:
    return f.default if f.metadata["served"] is MISSING else f.metadata["served"]


def read(
    record: type[C],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> C:
    """The record, each setting from the first place that states it; `fixed` are fields that are no
    settings."""
    return record(**stated(record, flags, environ, file), **fixed)


def stated(
    record: type[Any],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """By field, what is stated anywhere, and what is served where nothing is."""
    hints, given = get_type_hints(record), {}
    for f in settings_of(record):
        name, kind = name_of(f), _bare(hints[f.name])
        variable = PREFIX + name.upper()
        if name in flags:
            given[f.name] = _parse(flags[name], kind, name, f)
        elif variable in environ:
            given[f.name] = _parse(environ[variable], kind, variable, f)
        elif file is not None and name in file:
            given[f.name] = _parse(file[name], kind, name, f)
        elif f.metadata["served"] is not MISSING:
            given[f.name] = f.metadata["served"]
    return given


def read_yaml(
    path: str | Path, records: Sequence[type[Any]], others: Sequence[str] = ()
) -> dict[str, Any]:
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
    return as_names(raw, records, others, str(path))


def as_names(
    raw: Mapping[Any, Any], records: Sequence[type[Any]], others: Sequence[str], where: str
) -> dict[str, Any]:
    """Values by their settings' names, however these were written."""
    out = {str(k).replace("-", "_"): v for k, v in raw.items()}
    known = {name_of(f) for r in records for f in settings_of(r)} | set(others)
    if unknown := sorted(set(out) - known):
        raise Invalid(f"{where}: unknown {', '.join(unknown)}", "config")
    return out


def unknown_variables(
    environ: Mapping[str, str], records: Sequence[type[Any]], others: Collection[str] = ()
) -> list[str]:
    """Variables that look like ours and mean nothing: most likely misspelt."""
    known = {PREFIX + name_of(f).upper() for r in records for f in settings_of(r)} | set(others)
    return sorted(v for v in environ if v.startswith(PREFIX) and v not in known)


def table(records: Sequence[type[Any]], titles: Mapping[str, str]) -> str:
    """All settings in Markdown, by group."""
    parts = []
    for group, title in titles.items():
        rows = ["| flag | variable | default | what |", "|---|---|---|---|"]
        for f in (f for r in records for f in settings_of(r) if f.metadata["group"] == group):
            name, shown = name_of(f), default_text(f)
            what, _, told = f.metadata["help"].partition(" (default: ")
            default = told.removesuffix(")") if told or not shown else f"`{shown}`"
            flag = " ".join(filter(None, (flag_of(name), f.metadata["metavar"])))
            rows.append(
                f"| `{flag}` | `{PREFIX}{name.upper()}` | {default} | "
                f"{what.replace('|', chr(92) + '|')} |"
            )
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def settings_of(record: type[Any]) -> list[Field[Any]]:
    return [f for f in fields(record) if "group" in f.metadata]


def _bare(hint: Any) -> Any:
    """The type without `| None`. (Other unions are parsed by the field's own function.)"""
    some = (
        [t for t in get_args(hint) if t is not type(None)]
        if get_origin(hint) in (Union, types.UnionType)
        else []
    )
    return some[0] if len(some) == 1 else hint


def _parse(value: Any, kind: Any, name: str, f: Field[Any]) -> Any:
    """A value of YAML, a flag's or text of the environment, as a field's type."""
    if value is None:
        return None
    if f.metadata["parse"] is not None:
        return f.metadata["parse"](str(value))
    if get_origin(kind) is tuple:
        parts = (
            value.split(",")
            if isinstance(value, str)
            else value
            if isinstance(value, list)
            else [value]
        )
        return tuple(str(p).strip() for p in parts if str(p).strip())
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise Invalid(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}", name)
        return value
    parsers: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: float, str: str}
    try:
        return parsers[kind](value)
    except (TypeError, ValueError):
        raise Invalid(
            f"{name} must be {'a yes or no' if kind is bool else f'of type {kind.__name__}'}", name
        ) from None


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(word)
    return word in _TRUE


def _int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError(value)
    return int(value)

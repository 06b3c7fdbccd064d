"""Makes command-line flags and the tables of `docs/settings.md` of the settings' declarations."""

from __future__ import annotations

import argparse
import types
from collections.abc import Collection, Hashable, Sequence
from dataclasses import MISSING, Field
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from stretto.config.setting import (
    TUNE,
    default_of,
    flag_of,
    is_tuning,
    name_of,
    old_names,
    settings_of,
)

SECTIONS = {
    "model": ("model",),
    "placement: processes, cards, machines": ("placement", "cluster"),
    "memory and steps": ("memory", "steps"),
    "network: where to listen, who may call": ("address", "clients"),
    "limits": ("limits", "prompts"),
    "audio: packets of speech, realtime sessions": ("speech", "realtime"),
    "observability: logs, metrics, traces": ("logging",),
    "experiments": (TUNE,),
}
"""Sections of the help and of `docs/settings.md`, in their order, and their groups of settings."""

TUNE_NOTE = (
    "For experiments and unusual machines: `--tune launch_lead_ms=2,mixed_steps=off`, STRETTO_TUNE "
    "with the same text,\nor a mapping `tune` in the file."
)


def add_flags(
    parser: argparse.ArgumentParser, records: Sequence[type[Any]], leave_out: Collection[str] = ()
) -> None:
    """Add a flag for each setting, in its group, and one for all tuning settings. Absent flags stay
    absent: their values come from elsewhere."""
    settings = [
        (f, kind_of(record, f))
        for record in records
        for f in settings_of(record)
        if name_of(f) not in leave_out
    ]
    for title, groups in SECTIONS.items():
        of_section = [(f, kind) for f, kind in settings if f.metadata["group"] in groups]
        if not of_section:
            continue
        added = parser.add_argument_group(title)
        if TUNE in groups:
            _add_tune(added)
        else:
            for f, kind in of_section:
                _add_flag(added, f, kind, flag_of(name_of(f)), _help(f))
    for f, kind in settings:
        for name in old_names(f):
            _add_flag(parser, f, kind, flag_of(name), argparse.SUPPRESS)


def _add_tune(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        flag_of(TUNE),
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME=VALUE,...",
        help="settings for experiments and unusual machines, such as launch_lead_ms=2; repeatable; "
        "docs/settings.md and `stretto serve --settings-table` list the names",
    )


def _add_flag(
    group: argparse._ActionsContainer, f: Field[Any], kind: Any, flag: str, help: str
) -> None:
    metavar = f.metadata["metavar"]
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help}
    if f.metadata["parse"] is not None:
        group.add_argument(flag, metavar=metavar, **options)
    elif kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif get_origin(kind) is Literal:
        group.add_argument(flag, choices=get_args(kind), **options)
    elif get_origin(kind) is tuple:
        if help is not argparse.SUPPRESS:
            words, mark, rest = help.partition(" (default")
            options["help"] = f"{words}; repeatable{mark}{rest}"
        group.add_argument(flag, action="append", metavar=metavar, **options)
    else:
        group.add_argument(flag, type=kind, metavar=metavar or kind.__name__.upper(), **options)


def _help(f: Field[Any]) -> str:
    text: str = f.metadata["help"].replace("%", "%%")
    default = default_text(f)
    if default and "default" not in text:
        text += f" (default: {default})"
    return text


# evaluated for each flag anew, these take 40 ms of every command's start
_type_hints = cache(get_type_hints)


def kind_of(record: type[Any], f: Field[Any]) -> Any:
    """The field's type without `| None`. (Other unions are parsed by the field's own function.)"""
    hint = _type_hints(cast(Hashable, record))[f.name]
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    some = [t for t in get_args(hint) if t is not type(None)]
    return some[0] if len(some) == 1 else hint


def default_text(f: Field[Any]) -> str:
    """A setting's default as people write it; empty where there is none."""
    value = default_of(f)
    if value is MISSING or value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, tuple) else str(value).removesuffix(".0")


def table(records: Sequence[type[Any]]) -> str:
    """All settings in Markdown, by section."""
    parts = []
    for title, groups in SECTIONS.items():
        settings = [f for f in settings_of(*records) if f.metadata["group"] in groups]
        if TUNE in groups:
            rows = [TUNE_NOTE, "", "| name | default | what |", "|---|---|---|"]
        else:
            rows = ["| flag | default | what |", "|---|---|---|"]
        rows += [_row(f) for f in settings]
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(f: Field[Any]) -> str:
    name, shown = name_of(f), default_text(f)
    what, _, text = f.metadata["help"].partition(" (default: ")
    what = what.replace("|", "\\|")
    default = text.removesuffix(")") if text or not shown else f"`{shown}`"
    if is_tuning(f):
        return f"| `{name}` | {default} | {what} |"
    flag = " ".join(filter(None, (flag_of(name), f.metadata["metavar"])))
    return f"| `{flag}` | {default} | {what} |"

"""The commands and flags that the parsers of the command line have, and hints for unknown ones.
`cli.py` and the completion script call it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from stretto.config.names import explain
from stretto.config.setting import flag_of

Commands = Mapping[str, argparse.ArgumentParser]


def commands(top: argparse.ArgumentParser) -> Commands:
    [jobs] = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    return jobs.choices


def check_command(top: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse an unknown command in fewer words than argparse would."""
    named = commands(top)
    if words and not words[0].startswith("-") and words[0] not in named:
        near = get_close_matches(words[0], named, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(named)}"
        top.error(f"there is no command {words[0]!r}; {hint}")


def unrecognized(words: Sequence[str], command: argparse.ArgumentParser, named: Commands) -> str:
    """A clause about each flag that the command does not have."""
    unknown = [w.partition("=")[0] for w in words if w.startswith("-") and w not in ("-", "--")]
    if not unknown:
        return f"unrecognized arguments: {' '.join(words)}"
    others = {name: flags_of(job) for name, job in named.items() if job is not command}
    known = flags_of(command)
    return "; ".join(_unknown_flag(flag, known, others) for flag in unknown)


def flags_of(command: argparse.ArgumentParser) -> set[str]:
    """Those that its help shows."""
    shown = [action for action in command._actions if action.help is not argparse.SUPPRESS]
    return {flag for action in shown for flag in action.option_strings}


def _unknown_flag(flag: str, known: set[str], others: Mapping[str, set[str]]) -> str:
    names = {f.removeprefix("--").replace("-", "_") for f in known if f.startswith("--")}
    hint = explain(flag.lstrip("-").replace("-", "_"), names, flag_of)
    elsewhere = [name for name, flags in others.items() if flag in flags]
    if elsewhere and not hint.startswith("in "):
        hint = f"it is a flag of stretto {elsewhere[0]}"
    return f"there is no flag {flag}" + (f" ({hint})" if hint else "")

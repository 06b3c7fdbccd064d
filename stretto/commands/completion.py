"""`stretto completion SHELL`: a script that completes commands, flags and their values in a shell.
It is made of the parser, so it knows what the command line knows. cli.py wires it in."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.commands.parsers import commands

SHELLS = ("bash", "zsh", "fish")
INSTALL = """\
  bash  stretto completion bash > ~/.local/share/bash-completion/completions/stretto
  zsh   stretto completion zsh > ~/.zfunc/_stretto      (with fpath+=~/.zfunc before compinit)
  fish  stretto completion fish > ~/.config/fish/completions/stretto.fish"""


def add_completion_parser(jobs: Any, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """`whole`: makes the parser of the command line."""
    completion = jobs.add_parser(
        "completion",
        help="print a script that completes commands and flags in your shell",
        usage="stretto completion bash|zsh|fish",
        description=f"Print a completion script. To install it:\n\n{INSTALL}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    completion.set_defaults(job=lambda args: run_completion(whole(), args.shell))


def run_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    import shtab

    for command in commands(parser).values():
        for action in command._actions:
            if names_file(action):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab wants it
            elif action.dest == "model" and not action.option_strings:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell=shell) + "\n")
    return 0


def names_file(action: argparse.Action) -> bool:
    return action.type is Path or str(action.metavar).partition(".")[0] in ("FILE", "PATH", "DIR")

"""The parts of a program, which `--parts A,B` chooses. Imports no torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.harness.results import first_line, parser


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of `--parts`: names from `known`, by commas."""

    def parts(given: str) -> list[str]:
        names = [name for name in given.split(",") if name]
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}")
        return names

    return parts


def add_parts(p: argparse.ArgumentParser, known: Sequence[str]) -> None:
    """For a program whose parts share its arguments and its result."""
    p.add_argument("--parts", type=one_of(known), default=list(known), metavar="A,B", help="default: all")


def run_parts(package: str, known: Sequence[str], given: Sequence[str]) -> int:
    """The `main` of a program whose parts are modules of its package, each with its own arguments and its own result.
    Without `--parts` the first one runs. Several get the same arguments."""
    name, program = package.removeprefix("bench."), sys.modules[package]
    lines = [f"    {part:10}{first_line(Path(program.__path__[0]) / f'{part}.py')}" for part in known]
    lines += ["", f"python -m bench {name} --parts PART --help explains one."]
    doc = "\n".join([program.__doc__ or "", "", *lines])
    p = parser(name, doc, out=False, add_help=False, allow_abbrev=False)
    p.add_argument("--parts", type=one_of(known), metavar="A,B", help=f"default: {known[0]}")
    p.add_argument("-h", "--help", action="store_true")
    args, rest = p.parse_known_args(given)
    if args.help and args.parts is None:
        p.print_help()
        return 0
    chosen = args.parts or [known[0]]
    if len(chosen) > 1 and "--out" in rest:
        p.error("every part has its own result: --out takes one part")
    rest += ["--help"] if args.help else []
    return max(importlib.import_module(f"{package}.{part}").main(rest) for part in chosen)

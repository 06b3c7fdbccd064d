"""The parts of a program, which `--parts A,B` chooses. Imports no torch."""

from __future__ import annotations

import argparse
import importlib
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
    p.add_argument(
        "--parts", type=one_of(known), default=list(known), metavar="A,B", help="default: all"
    )


def run_parts(folder: Path, known: Sequence[str], given: Sequence[str]) -> int:
    """A program whose parts are the modules of a package, each with its own arguments and its own
    result. Without `--parts` the first one runs; several get the same arguments."""
    lines = [f"    {part:10}{first_line(folder / f'{part}.py')}" for part in known]
    usage = f"`python -m bench {folder.name} --parts PART --help` explains a part."
    doc = "\n".join([first_line(folder / "__init__.py"), "", *lines, "", usage])
    p = parser(folder.name, doc, out=False, add_help=False, allow_abbrev=False)
    p.add_argument("--parts", type=one_of(known), metavar="A,B", help=f"default: {known[0]}")
    p.add_argument("-h", "--help", action="store_true")
    args, rest = p.parse_known_args(given)
    if args.help and not args.parts:
        p.print_help()
        return 0
    chosen = args.parts or known[:1]
    if len(chosen) > 1 and "--out" in rest:
        p.error("every part has a result of its own: --out takes one part")
    rest += ["--help"] if args.help else []
    return max(importlib.import_module(f"bench.{folder.name}.{part}").main(rest) for part in chosen)

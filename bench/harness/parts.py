"""The programs of a package (`python -m bench`, `python -m tests.slow`), and the parts of a
program, which `--parts A,B` chooses.

A program is a module of the package with a docstring, whose first line is shown in the list, and a
function `main(arguments) -> exit status`; or a package whose modules are its parts, each with a
docstring and such a function. Listing them imports none of them, and so no torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

from bench.harness.results import ROOT, first_line, parser

Programs = Mapping[str, tuple[str, ...]]
"""The programs of a package, with the parts of those whose parts have their own arguments and
results."""


def listing(package: str, programs: Programs) -> str:
    folder = ROOT / package.replace(".", "/")
    width = max(map(len, programs)) + 2
    paths = ((folder / f"{name}.py", folder / name / "__init__.py") for name in programs)
    lines = [
        f"  {name:{width}}{first_line(next(p for p in at if p.exists()))}"
        for name, at in zip(programs, paths)
    ]
    usage = f"usage: python -m {package} NAME [arguments]   (NAME --help explains one)"
    return "\n".join([usage, "", *lines])


def run_program(package: str, programs: Programs, given: Sequence[str]) -> int:
    """Lists the programs, or runs the one that is named first; returns the exit status."""
    name, *rest = given or ("--help",)
    if name in ("-h", "--help"):
        print(listing(package, programs))
        return 0
    if name not in programs:
        print(f"there is no program {name!r}\n\n{listing(package, programs)}", file=sys.stderr)
        return 2
    if programs[name]:
        return run_parts(package, name, programs[name], rest)
    status: int = importlib.import_module(f"{package}.{name}").main(rest)
    return status


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


def run_parts(package: str, name: str, known: Sequence[str], given: Sequence[str]) -> int:
    """A program whose parts are the modules of a package, each with its own arguments and its own
    result. Without `--parts` the first one runs; several get the same arguments."""
    folder = ROOT / package.replace(".", "/") / name
    lines = [f"    {part:10}{first_line(folder / f'{part}.py')}" for part in known]
    usage = f"`python -m {package} {name} --parts PART --help` explains a part."
    doc = "\n".join([first_line(folder / "__init__.py"), "", *lines, "", usage])
    p = parser(name, doc, out=False, package=package, add_help=False, allow_abbrev=False)
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
    modules = [importlib.import_module(f"{package}.{name}.{part}") for part in chosen]
    return max(module.main(rest) for module in modules)

"""The one entry: `python -m bench` lists the programs, `python -m bench NAME [arguments]` runs one.

A program is a module of this package with a docstring, whose first line is shown in the list, and a function
`main(arguments) -> exit status`. Listing them imports none of them, and so no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.results import first_line

PROGRAMS = (
    "serve", "engine", "realtime", "ablation", "host", "http", "steps", "kernels", "connectors", "plan", "faults",
    "cluster", "hostile", "fuzz", "gpu_tests", "report",
)  # fmt: skip
"""In the order of the list: speed from the outside in, then what must not break, then the tables."""


def summary(name: str) -> str:
    """The first line of a program's docstring."""
    here = Path(__file__).parent
    path = next(p for p in (here / f"{name}.py", here / name / "__init__.py") if p.exists())
    return first_line(path)


def listing() -> str:
    width = max(map(len, PROGRAMS)) + 2
    lines = [f"  {name:{width}}{summary(name)}" for name in PROGRAMS]
    return "\n".join(["usage: python -m bench NAME [arguments]   (NAME --help explains one)", "", *lines])


def main(given: Sequence[str]) -> int:
    name, *arguments = given or ("--help",)
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in PROGRAMS:
        print(f"no benchmark is called {name!r}\n\n{listing()}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"bench.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

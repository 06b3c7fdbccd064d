"""The one entry: `python -m bench` lists the programs, `python -m bench NAME [arguments]` runs one.

A program is a module of this package with a docstring, whose first line is shown in the list, and a
function `main(arguments) -> exit status`; or a package whose modules are its parts, each with a
docstring and such a function. Listing them imports none of them, and so no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.parts import run_parts
from bench.harness.results import first_line

HERE = Path(__file__).parent
PROGRAMS: dict[str, tuple[str, ...]] = {
    "serve": (),
    "engine": ("load", "guided", "fullsize"),
    "realtime": (),
    "ablation": (),
    "host": ("loop", "scheduler"),
    "http": (),
    "steps": ("decode", "together", "cpu"),
    "kernels": ("vocoder", "prompts", "pictures", "alone", "in_step", "rounding"),
    "connectors": ("hops", "copies"),
    "faults": ("kills", "soak", "server"),
    "cluster": (),
    "hostile": ("attacks", "floods"),
    "fuzz": ("wire", "realtime"),
    "gpu_tests": (),
    "path": (),
    "report": (),
}
"""Speed from the outside in, then what must not break, then what runs, then the tables; with the
parts of those whose parts have their own arguments and results."""


def listing() -> str:
    width = max(map(len, PROGRAMS)) + 2
    paths = ((HERE / f"{name}.py", HERE / name / "__init__.py") for name in PROGRAMS)
    lines = [
        f"  {name:{width}}{first_line(next(p for p in at if p.exists()))}"
        for name, at in zip(PROGRAMS, paths)
    ]
    return "\n".join(
        ["usage: python -m bench NAME [arguments]   (NAME --help explains one)", "", *lines]
    )


def main(given: Sequence[str]) -> int:
    name, *arguments = given or ("--help",)
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in PROGRAMS:
        print(f"no benchmark is called {name!r}\n\n{listing()}", file=sys.stderr)
        return 2
    if PROGRAMS[name]:
        return run_parts(HERE / name, PROGRAMS[name], arguments)
    status: int = importlib.import_module(f"bench.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

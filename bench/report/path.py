"""The table of bench/notes/path.md: which files run for one spoken answer, by folder. It stands in
tables.py."""

from __future__ import annotations

import textwrap
from typing import Any

from bench.harness.markdown import markdown
from bench.report.measured import Results

FIELDS = ("files", "ran", "to_read", "lines")


def path(results: Results) -> str:
    if (r := results.file("path")) is None:
        return ""
    one, apart = (
        {p["placement"]: p for p in r["placements"]}[name] for name in ("one", "processes")
    )
    head = textwrap.fill(
        f"Measured at {r['env']['commit']}: one answer with all stages in one host, and one with "
        f"each stage in a "
        "host of its own (apart). Lines that ran, lines of the functions that they are in, and "
        "lines of the files.", 120
    )  # fmt: skip
    lines = [
        line(
            f"`{folder}`" if folder != "." else "top level",
            one["folders"].get(folder),
            apart["folders"].get(folder),
        )
        for folder in sorted({*one["folders"], *apart["folders"]})
    ]
    for name in ("without_layers_and_kernels", "total"):
        lines.append((*line(name.replace("_", " "), one[name], apart[name])[:-1], ""))
    columns = (
        "",
        "files",
        "ran",
        "of functions",
        "of files",
        "apart: files",
        "apart: ran",
        "process",
    )
    counts = ", ".join(
        f"{one['total'][what]} {what}" for what in ("packages", "classes", "functions")
    )
    return "\n\n".join([head, markdown(columns, lines), f"With one host these are {counts}."])


def line(name: str, one: dict[str, Any] | None, apart: dict[str, Any] | None) -> tuple[str, ...]:
    numbers = [f"{one[field]:,}" if one else "" for field in FIELDS]
    numbers += [f"{apart[field]:,}" if apart else "" for field in FIELDS[:2]]
    return name, *numbers, ", ".join((apart or one or {}).get("processes", ()))

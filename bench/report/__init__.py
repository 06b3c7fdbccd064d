"""Tables and pictures of the documents, made from the files in bench/results.

    python -m bench report                  # writes the pictures to docs/img and prints the tables
    python -m bench report --write          # and writes the tables into the documents
    python -m bench report --tables         # prints the tables, nothing else

Tables stand in the pages between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. A table without a
file is left out. A test compares the pages with the files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.harness.results import RESULTS, ROOT, parser

NOTES = (
    "serving",
    "steps",
    "links",
    "ablation",
    "host",
    "decode",
    "proofs",
    "faults",
    "path",
)
PAGES = (
    "README.md",
    "docs/performance.md",
    *(f"bench/notes/{n}.md" for n in NOTES),
)


def fill(page: str, tables: dict[str, str]) -> str:
    """The page with its tables replaced; those without numbers stay as they are."""
    for name, table in tables.items():
        mark = re.escape(name)
        pattern = re.compile(rf"(<!-- begin: {mark} -->\n).*?(<!-- end: {mark} -->)", re.DOTALL)
        page = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", page)  # type: ignore[misc]
    return page


def main(given: Sequence[str]) -> int:
    from bench.report.measured import Results
    from bench.report.pictures import PICTURES
    from bench.report.tables import TABLES

    p = parser("report", __doc__, out=False)
    p.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder (default: bench/results)"
    )
    p.add_argument(
        "--img",
        type=Path,
        default=ROOT / "docs" / "img",
        help="for the pictures (default: docs/img)",
    )
    p.add_argument("--tables", action="store_true", help="print the tables, nothing else")
    p.add_argument("--write", action="store_true", help="put the tables into the pages too")
    args = p.parse_args(given)
    results = Results(args.results)
    tables = {name: text for name, make in TABLES.items() if (text := make(results))}
    for name, text in tables.items():
        print(f"\n## {name}\n\n{text}")
    for name in TABLES.keys() - tables.keys():
        print(f"\n## {name}: no file for it in {args.results}")
    if args.tables:
        return 0
    for name, draw in PICTURES.items():
        picture = draw(results)
        if picture is not None:
            picture.save(args.img / f"{name}.svg")
        print(f"{name}.svg: {'written' if picture is not None else 'nothing to draw'}")
    if args.write:
        for page in (ROOT / name for name in PAGES):
            before = page.read_text(encoding="utf-8")
            page.write_text(fill(before, tables), encoding="utf-8")
    return 0

"""Removes each guard of bench/results/guards.json in turn, runs the test that is named beside it,
and records how the test failed.

    .venv/bin/python -m scripts.guards                       # all: takes some minutes
    .venv/bin/python -m scripts.guards --only links.py voices.py 10-19

Each entry names a file, the text of the guarded line, which is there once (`line`), the text
without the guard (`becomes`), and the test. Sources are changed in a copy of the working tree. The
tests run first without a change, since one that fails by itself shows nothing. The status is 1 if
a test fails by itself or does not notice. tests/scripts/test_guards.py keeps the entries valid."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.mutations import ROOT, Copy, git, kill_marked, tree_files

RECORD = ROOT / "bench" / "results" / "guards.json"
LIMIT_S = 150.0  # for one test; pytest ends it before
FAILED = 1  # pytest's exit status
Guard = dict[str, Any]


def without_guard(guard: Guard, root: Path = ROOT) -> str:
    """The source of the file with the guard removed."""
    source = (root / guard["file"]).read_text(encoding="utf-8")
    if source.count(guard["line"]) != 1:
        raise SystemExit(f"{guard['file']}: not once there: {guard['line']!r}")
    return source.replace(guard["line"], guard["becomes"])


def chosen(guards: list[Guard], words: list[str]) -> list[Guard]:
    """Those whose number is in a range A-B, or whose entry contains a word."""
    if not words:
        return guards
    ranges = [range(int(a), int(b) + 1) for a, b in re.findall(r"\b(\d+)-(\d+)\b", " ".join(words))]
    texts = [word for word in words if not re.fullmatch(r"\d+-\d+", word)]
    return [
        guard
        for number, guard in enumerate(guards, 1)
        if any(number in r for r in ranges) or any(t in json.dumps(guard) for t in texts)
    ]


def first_error(output: str) -> str:
    """The line of pytest's output that says what was wrong."""
    errors = re.findall(r"^E +(\S.*)", output, re.M)
    return errors[0][:200] if errors else (output.strip().splitlines() or ["no output"])[-1][:200]


async def try_guards(guards: list[Guard], save: Callable[[], None], mark: str) -> int:
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    with tempfile.TemporaryDirectory(prefix="g-", ignore_cleanup_errors=True) as folder:
        copy = Copy(ROOT, tree_files(), Path(folder))
        tests = sorted({guard["test"] for guard in guards})
        if await copy.test(tests, mark, None) != 0:
            print(f"the tests fail without a change:\n{copy.output.read_text()[-3000:]}")
            return 1
        for guard in guards:
            original = (ROOT / guard["file"]).read_text(encoding="utf-8")
            copy.write(guard["file"], without_guard(guard))
            status = await copy.test([guard["test"]], mark, LIMIT_S, "--timeout=120")
            copy.write(guard["file"], original)
            hung = "it does not end"
            guard["noticed"] = status in (FAILED, None)
            guard["failure"] = hung if status is None else first_error(copy.output.read_text())
            guard["commit"] = commit
            save()
            print(f"{'noticed' if guard['noticed'] else 'SURVIVES'}: {guard['without']}")
            print(f"    {guard['failure']}", flush=True)
    return 0 if all(guard["noticed"] for guard in guards) else 1


async def work(words: list[str]) -> int:
    record = json.loads(RECORD.read_text(encoding="utf-8"))

    def save() -> None:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        RECORD.write_text(text + "\n", encoding="utf-8")

    mark = uuid.uuid4().hex
    try:
        return await try_guards(chosen(record["guards"], words), save, mark)
    finally:
        await kill_marked(mark)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="guards whose entry contains a word, or ranges of numbers (10-19)",
    )
    return asyncio.run(work(p.parse_args().only))


if __name__ == "__main__":
    sys.exit(main())

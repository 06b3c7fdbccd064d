"""The list of files in docs/path.md: they are there, and have so many lines."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 7000  # lines that a reader opens for the default placement


def test_the_listed_files_have_so_many_lines() -> None:
    [listed] = re.findall(r"```path\n(.*?)```", (ROOT / "docs" / "path.md").read_text(), re.DOTALL)
    stated: dict[str, int] = {}
    found: dict[str, int] = {}
    group = ""
    for line in listed.splitlines():
        words = line.split()
        if not line.startswith(" "):
            group, number = words[0], words[1]
            stated[group], found[group], words = int(number), 0, words[2:]
        for name in words:
            found[group] += sum(1 for text in (ROOT / "stretto" / name).read_text().splitlines() if text.strip())
    found["total"] = sum(number for group, number in found.items() if group not in ("processes", "total"))
    assert stated == found
    assert found["total"] <= MOST

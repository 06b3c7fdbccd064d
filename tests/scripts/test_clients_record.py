"""The record of `python -m tests.slow clients` and the table of docs/server.md agree, and hold
every client."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.slow.clients.cases import CASES

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "clients.json").read_text())


def test_every_client_passed_with_all_that_it_tries() -> None:
    for case in CASES:
        found = RECORD[case.name]
        assert found["passed"], case.name
        assert found["client"] == case.package
        assert [e["program"] for e in found["exchanges"]] == [
            e.program.name for e in case.exchanges
        ]
        assert all(e["exchanged"] for e in found["exchanges"])


def test_the_document_names_the_versions_of_the_record() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    table = re.search(r"^## Clients\n.*?(?=^## )", page, re.M | re.S)
    assert table is not None
    listed = re.findall(r"^\| `([^`]+)` \((\w+)\) \| (\S+) \|", table[0], re.M)
    assert listed == [(c.package, c.tool, RECORD[c.name]["version"]) for c in CASES]


def test_the_programs_are_there() -> None:
    for case in CASES:
        for exchange in case.exchanges:
            assert exchange.program.is_file(), exchange.program

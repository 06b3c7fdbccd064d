"""The driver of the proofs: what each part may take, and that one that fails or hangs does not cost
the others their results."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import proofs
from bench.harness.results import RESULTS, ROOT, read
from bench.proofs import PARTS, run, shares
from bench.report import proofs as tables
from bench.report.measured import Results


def test_parts_share_the_time_that_is_left() -> None:
    parts = list(PARTS.values())
    each = []
    left = 555.0
    for i in range(len(parts)):
        each.append(shares(left, parts[i:]))
        left -= each[-1]
    assert left == pytest.approx(0.0)
    assert each == pytest.approx([125.0, 320.0, 110.0])
    assert shares(200.0, parts[-1:]) == 200.0, "what others did not use"


def test_how_a_part_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run([sys.executable, "-c", "print('fine')"], log, 60.0) == "complete"
    assert log.read_text() == "fine\n"
    assert run([sys.executable, "-c", "raise SystemExit(3)"], log, 60.0) == "ended with 3"
    hangs = "import threading; print('begun', flush=True); threading.Event().wait()"
    begun = time.monotonic()
    assert run([sys.executable, "-c", hangs], log, 1.0) == "cut"
    assert time.monotonic() - begun < 60.0


def test_every_part_has_its_file_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fails; the second runs all the same; there is no time for the third."""
    asked: list[list[str]] = []

    def ended(words: list[str], log: Path, limit: float) -> str:
        asked.append(words)
        log.write_text("said\n")
        return "complete" if len(asked) > 1 else "ended with 1"

    monkeypatch.setattr(proofs, "run", ended)
    monkeypatch.setattr(proofs, "LEAST_S", 15.0)
    monkeypatch.setattr(proofs, "described", lambda: {"commit": "abc"})
    given = "--only links,gaps,trees --limit 83 --model tiny --tree before=old"
    assert proofs.main(["--out-dir", str(tmp_path), *given.split()]) == 1
    found = read(tmp_path / "proofs.json")["parts"]
    assert [found[name]["state"] for name in ("links", "gaps", "trees")] == [
        "left out",
        "ended with 1",
        "complete",
    ]
    assert "--parts" not in asked[0]
    assert asked[0][asked[0].index("--out") + 1] == str(tmp_path / "gaps.json")
    assert f"before={Path('old').resolve()}" in asked[1]


def test_a_document_quotes_the_record_that_is_there(tmp_path: Path) -> None:
    """The block is made from the record, so a document that quotes another commit's fails here."""
    made = tables.gpu_suite(Results())
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    [quoted] = re.findall(r"<!-- begin: gpu_suite -->\n\n(.*?)\n\n<!--", page, re.DOTALL)
    assert quoted == made
    record = (RESULTS / "gpu_tests_h200.txt").read_text(encoding="utf-8")
    commit = re.findall(r"^commit: (\w+)$", record, re.MULTILINE)
    assert commit == [made.splitlines()[2].split(" | ")[0].removeprefix("| ")]
    other = record.replace(commit[0], "0123456789ab")
    (tmp_path / "gpu_tests_h200.txt").write_text(other, encoding="utf-8")
    assert "| 0123456789ab |" in tables.gpu_suite(Results(tmp_path))


def test_promises_name_the_commit_of_their_record(tmp_path: Path) -> None:
    def stages(us: float) -> dict[str, Any]:
        one = {"steps": 9, "gap_us": {"p50": us, "p99": us}, "step_us": {"p50": 2e3}}
        return {"talker": one | {"stage_idle": 0.1}}

    def cell(way: str, us: float) -> dict[str, Any]:
        told = {"kind": "speech", "rows": 8, "way": way, "device_idle": 0.02}
        return told | {"stages": stages(us)}

    def answers(first: float, variant: str) -> dict[str, Any]:
        sample = {"first_audio": first, "rtf": 0.1, "error": None}
        return {"variant": variant, "streams": 32, "samples": [sample] * 3}

    env = {"commit": "abcdef123456", "clean": True}
    gaps = {"env": env, "cells": [cell("on", 5.0), cell("off", 90.0)]}
    links = {"env": env, "cells": [answers(0.1, "all on"), answers(0.12, "no async_h2d")]}
    (tmp_path / "gaps_h200.json").write_text(json.dumps(gaps))
    (tmp_path / "links_h200.json").write_text(json.dumps(links))
    told = tables.promises(Results(tmp_path))
    gap = "gap between steps of the talker, 8 rows, p50"
    assert f"| overlapping decode launches | {gap} | 90 µs | 5 µs | abcdef1 |" in told
    assert "the receiver's copy ahead | 120.0 ms | 100.0 ms | abcdef1 |" in told
    assert len(told.splitlines()) == 4, "what was not measured has no line"
    assert "| 32 | no async_h2d | 3 | 120.0 ms (+20.0 %) | 0.100 |" in tables.ladder(
        Results(tmp_path)
    )
    shown = "| speech | 8 | talker | one | 9 | 2.00 ms | 90 / 90 µs | 10.0 % | 2.0 % |"
    assert shown in tables.gaps(Results(tmp_path))
    assert tables.promises(Results(tmp_path / "none")) == ""

"""The driver of the proofs: what each part may take, and that one that fails or hangs does not cost
the others their results."""

from __future__ import annotations

import json
import random
import re
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from bench import proofs
from bench.harness.results import RESULTS, ROOT, read
from bench.proofs import PARTS, allowed, chosen, run, shares
from bench.report import proofs as tables
from bench.report.measured import Results


def test_parts_share_the_time_that_is_left() -> None:
    parts = [PARTS[name] for name in ("gaps", "prompts", "trees")]
    left = 445.0
    each = []
    for i in range(len(parts)):
        each.append(shares(left, parts[i:]))
        left -= each[-1]
    assert left == pytest.approx(0.0)
    assert each == pytest.approx([125.0, 120.0, 200.0])
    assert shares(200.0, parts[-1:]) == 200.0, "what others did not use"


def test_a_part_with_a_limit_leaves_the_rest_to_the_others() -> None:
    todo = chosen("gaps:100,links:50,trees")
    assert allowed(400.0, todo) == 100.0
    assert allowed(30.0, todo) == 30.0, "no more than there is"
    assert allowed(300.0, chosen("trees,links:50")) == 250.0
    assert allowed(300.0, chosen("trees,gaps,links:50")) == pytest.approx(250.0 * 2 / 3.25)
    with pytest.raises(ArgumentTypeError, match="no such part: gap"):
        chosen("gap:100")
    with pytest.raises(ArgumentTypeError, match="NAME:SECONDS"):
        chosen("gaps:soon")


def test_how_a_part_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run([sys.executable, "-c", "print('fine')"], log, 60.0) == "complete"
    assert run([sys.executable, "-c", "print(1); exit(3)"], log, 60.0) == "ended with 3"
    assert log.read_text() == "fine\n1\n", "one log for all parts"
    hangs = "import threading; print('begun', flush=True); threading.Event().wait()"
    assert run([sys.executable, "-c", hangs], log, 1.0) == "cut"


def test_every_part_has_its_file_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fails; the second runs all the same; there is no time for the third."""
    asked: list[list[str]] = []

    def ended(words: list[str], log: Path, limit: float) -> str:
        asked.append(words)
        with log.open("a") as out:
            out.write(f"printed by {words[2]}\n")
        return "complete" if len(asked) > 1 else "ended with 1"

    monkeypatch.setattr(proofs, "run", ended)
    monkeypatch.setattr(proofs, "LEAST_S", 15.0)
    monkeypatch.setattr(proofs, "described", lambda: {"commit": "abc"})
    given = "--only links:10,gaps,trees,tests:20 --limit 83 --model tiny --tree before=old"
    more = ["--more", "trees:--levels 32 --also ''"]
    assert proofs.main(["--out-dir", str(tmp_path), *given.split(), *more]) == 1
    found = read(tmp_path / "proofs.json")["parts"]
    assert {name: part["state"] for name, part in found.items()} == {
        "links": "left out",
        "gaps": "ended with 1",
        "trees": "complete",
        "tests": "complete",
    }
    assert "--parts" not in asked[0]
    assert asked[0][asked[0].index("--out") + 1] == str(tmp_path / "gaps.json")
    assert f"before={Path('old').resolve()}" in asked[1]
    assert asked[1][-4:] == ["--levels", "32", "--also", ""], "last, so that they prevail"
    assert asked[2][2:4] == ["tests.gpu", "--selection"]
    assert "--model" not in asked[2]
    assert (tmp_path / "proofs.log").read_text() == "printed by bench\n" * 2 + (
        "printed by tests.gpu\n"
    )


def test_a_document_quotes_the_record_that_is_there(tmp_path: Path) -> None:
    """The block is made from the record, so a document that quotes another commit's fails here."""
    made = tables.gpu_suite(Results())
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    [quoted] = re.findall(r"<!-- begin: gpu_suite -->\n\n(.*?)\n\n<!--", page, re.DOTALL)
    assert quoted == made
    assert "selection" not in tables.suite_record(Results()), "the record is of all tests"
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
        head = {"kind": "speech", "rows": 8, "way": way, "device_idle": 0.02}
        return head | {"stages": stages(us)}

    def answers(first: float, variant: str, number: int = 0) -> dict[str, Any]:
        sample = {"first_audio": first, "rtf": 0.1, "error": None}
        return {"variant": variant, "round": number, "streams": 32, "samples": [sample] * 3}

    env = {"commit": "abcdef123456", "clean": True}
    gaps = {"env": env, "cells": [cell("on", 5.0), cell("off", 90.0)]}
    links = {"env": env, "cells": [answers(0.12, "no async_h2d"), answers(0.1, "all on")]}
    links["cells"].append(answers(0.3, "no async_h2d", number=1))
    (tmp_path / "gaps_h200.json").write_text(json.dumps(gaps))
    (tmp_path / "links_h200.json").write_text(json.dumps(links))
    told = tables.promises(Results(tmp_path))
    gap = "gap between steps of the talker, 8 rows, p50"
    assert f"| overlapping decode launches | {gap} | 90 µs | 5 µs | abcdef1 |" in told
    assert "the receiver's copy ahead | 120.0 ms | 100.0 ms | abcdef1 |" in told
    assert len(told.splitlines()) == 4, "what was not measured has no line"
    changes = "+20.0 % (+20 to +20) | 0.100 | +0.0 % (+0 to +0)"
    ladder = tables.ladder(Results(tmp_path))
    assert f"| 32 | no async_h2d | 6 | 210.0 ms | {changes} |" in ladder, "of the rounds with both"
    shown = "| speech | 8 | talker | one | 9 | 2.00 ms | 90 / 90 µs | 10.0 % | 2.0 % |"
    assert shown in tables.gaps(Results(tmp_path))
    assert tables.promises(Results(tmp_path / "none")) == ""


def test_a_change_has_an_interval() -> None:
    rng = random.Random(0)
    base = [rng.gauss(100.0, 20.0) for _ in range(400)]
    slower = [1.1 * rng.gauss(100.0, 20.0) for _ in range(400)]
    found = tables.Change.of(slower, base)
    assert 0.05 < found.low < found.share < found.high < 0.2
    few = tables.Change.of(slower[:10], base[:10])
    assert few.high - few.low > found.high - found.low


def test_long_prompts_come_from_two_records(tmp_path: Path) -> None:
    def record(commit: str, streams: int, answers: int) -> str:
        one = {"p50": 0.1, "p99": 0.2, "max": 0.0}
        cell = {
            "workload": "image", "streams": streams, "answers": answers, "errors": {},
            "summary": dict.fromkeys(("first_audio_s", "rtf", "wait_0ms_s"), one),
            "rates": {"audio_s_per_s": 20.0},
        }  # fmt: skip
        return json.dumps({"env": {"commit": commit}, "prompts": [cell]})

    (tmp_path / "long_prompts_h200.json").write_text(record("aaaaaaaaa", 8, 12))
    (tmp_path / "prompts_h200.json").write_text(record("bbbbbbbbb", 32, 64))
    lines = tables.long_prompts(Results(tmp_path)).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["8", "32"]
    assert [line.split(" | ")[-1] for line in lines] == ["aaaaaaa |", "bbbbbbb |"]
    (tmp_path / "prompts_h200.json").write_text(record("bbbbbbbbb", 32, 31))
    assert len(tables.long_prompts(Results(tmp_path)).splitlines()) == 3, "the load did not end"

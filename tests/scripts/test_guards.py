"""The guards of bench/results/guards.json, which `scripts/guards.py` removes one by one, are still
where their entries say, and so are their tests."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from scripts.guards import RECORD, ROOT, chosen, first_error, without_guard

GUARDS: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["guards"]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda g: f"{g['file']}: {g['without']}")
def test_a_guard_and_its_test_are_there(guard: dict[str, Any]) -> None:
    """Was a guarded line moved or rewritten? Then change its entry in bench/results/guards.json."""
    path = ROOT / guard["file"]
    assert path.read_text(encoding="utf-8").count(guard["line"]) == 1, guard["line"]
    ast.parse(without_guard(guard))
    file, _, name = guard["test"].partition("::")
    tests = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    functions = {
        node.name for node in tests if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name.partition("[")[0] in functions


def test_every_guard_was_noticed() -> None:
    assert [g["without"] for g in GUARDS if not g["noticed"]] == []


def test_guards_are_chosen_by_number_and_by_word() -> None:
    guards = [{"file": f"{name}.py"} for name in ("a", "b", "c", "d")]
    assert chosen(guards, []) == guards
    assert chosen(guards, ["2-3"]) == guards[1:3]
    assert chosen(guards, ["d.py", "1-1"]) == [guards[0], guards[3]]


def test_the_failure_is_what_pytest_says_first() -> None:
    assert first_error("x\nE   assert 1 == 2\nE    +  where 1\nFAILED y\n") == "assert 1 == 2"
    assert first_error("FAILED y\n\n") == "FAILED y"
    assert first_error("") == "no output"

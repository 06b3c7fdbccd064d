"""Tests of a module of the stage lie where the module lies."""

from pathlib import Path

TESTS = Path(__file__).parent
STAGE = TESTS.parent.parent / "stretto" / "stage"

TESTED_ELSEWHERE = {
    "counters",
    "host/context",
    "host/stats",
    "runner/adapter",
    "runner/prefill_graphs",
    "runner/rows",
    "runner/runner",
    "runner/step",
    "scheduler/allocation",
    "scheduler/batch",
    "scheduler/config",
    "scheduler/preemption",
    "scheduler/prefix",
    "scheduler/requests",
    "vocoder/config",
    "vocoder/model",
}
"""By tests of what uses them. The list only gets shorter."""


def names(folder: Path, prefix: str = "") -> set[str]:
    return {
        str(path.relative_to(folder).with_name(path.stem.removeprefix(prefix)))
        for path in folder.rglob(f"{prefix}*.py")
        if path.stem != "__init__"
    }


def test_each_module_has_its_tests_where_it_lies() -> None:
    modules, tested = names(STAGE), names(TESTS, "test_")
    assert not modules - tested - TESTED_ELSEWHERE
    assert not tested & TESTED_ELSEWHERE, "take them off the list"

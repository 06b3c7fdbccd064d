"""The list of mutations fits the sources: `scripts/mutations.py` would find each of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("group", sorted(p.stem for p in (ROOT / "tests" / "mutations").glob("*.py")))
def test_each_stands_exactly_once(group: str) -> None:
    spec = importlib.util.spec_from_file_location(group, ROOT / "tests" / "mutations" / f"{group}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, file, old, new, tests in module.MUTATIONS:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1, name
        assert old != new, name
        assert tests, name
        for test in tests:
            assert (ROOT / test.partition("::")[0]).exists(), name

"""The table of cards in the documents is the program's."""

from __future__ import annotations

import pytest

from bench.harness.results import ROOT
from bench.memory import main, rooms


def test_the_document_has_the_programs_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 8
    assert table in (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")


def test_fewer_bits_leave_more_room() -> None:
    wide, packed = rooms("bf16"), rooms("int4-talker")
    for before, after in zip(wide, packed, strict=True):
        assert after.weights < before.weights / 3
        assert (after.tokens, -after.short) > (before.tokens, -before.short)

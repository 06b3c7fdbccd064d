"""Servers of several checkouts by turns: what each is told, and what is left of an answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench import trees
from bench.harness.results import ROOT, read
from bench.harness.serving import Stopped
from bench.serve import thin
from bench.trees import Tree, tree


def test_a_checkout_gets_only_flags_that_it_knows() -> None:
    here = Tree("head", ROOT)
    assert here.knows("--max-rows")
    assert not here.knows("--max-row"), "a part of a name is no name"
    assert not Tree("old", ROOT, "usage: stretto serve [--port N]").knows("--min-pace")


def test_a_checkout_is_named_or_called_as_its_folder(tmp_path: Path) -> None:
    (tmp_path / "old" / "stretto").mkdir(parents=True)
    assert tree(f"before={tmp_path / 'old'}").name == "before"
    assert tree(str(tmp_path / "old")).name == "old"
    with pytest.raises(argparse.ArgumentTypeError, match="no checkout"):
        tree(str(tmp_path))


def test_an_answer_keeps_what_its_player_made_of_it() -> None:
    kept = thin({"sent": 0.0, "packets": [[0.1, 0.08], [0.3, 0.08]]})
    assert (kept["packets"], kept["longest_gap"]) == (2, pytest.approx(0.2))
    assert kept["wait"] == pytest.approx(0.12)
    assert thin({"packets": []})["wait"] is None


def test_every_server_has_its_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trees.json"
    small = "--model tiny --device cpu --levels 1 --servers 1 --requests 1 --rounds 1 --seconds 5"
    more = "--quick --max-rows 2 --processes 1 --also prompts --prompt-levels 1"
    given = ["--tree", f"same={ROOT}", "--out", str(out), *small.split(), *more.split()]
    assert trees.main(given) == 0
    found = read(out)
    assert [run["tree"] for run in found["runs"]] == ["same", "head"]
    for run in found["runs"]:
        assert [cell["streams"] for cell in run["cells"]] == [1]
        assert run["cells"][0]["samples"][0]["packets"] > 1
        assert "--max-rows" in run["flags"]
    assert [c["workload"] for c in found["prompts"]] == ["text-2000", "audio-10s", "image"]
    assert set(found["trees"]) == {"same", "head"}
    assert "| 1 | same, " in capsys.readouterr().out


def test_a_server_that_dies_does_not_cost_the_others_their_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def server(run: trees.Run, one: Tree, told: dict[str, Any]) -> None:
        if one.name == "old":
            raise Stopped("it ended with 1")
        told["cells"].append({"streams": 9, "answers": 0})

    monkeypatch.setattr(trees.Run, "server", server)
    out = tmp_path / "trees.json"
    given = ["--tree", f"old={ROOT}", "--model", "tiny", "--out", str(out), "--levels", "1"]
    assert trees.main(given) == 1
    runs = read(out)["runs"]
    assert [run["tree"] for run in runs] == ["old", "head", "head", "old"], "by turns"
    assert [run["error"] is None for run in runs] == [False, True, True, False]


def test_no_server_starts_when_time_is_up(tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    assert trees.main(["--model", "tiny", "--out", str(out), "--limit", "-1"]) == 0
    assert read(out)["left_out"] == [[0, "head"], [1, "head"]]

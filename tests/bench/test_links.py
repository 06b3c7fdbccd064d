"""The ladder of the links: hosts that are told which overlaps are off, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine import link_host, links
from bench.harness.results import read
from stretto.config.engine import HostSettings, OverlapSwitches


def test_links_are_laid_with_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid: list[OverlapSwitches] = []
    monkeypatch.setattr(
        link_host, "handle", lambda ends, message: laid.append(ends.settings.switches)
    )
    monkeypatch.setenv(link_host.FILE, str(tmp_path / "off.json"))
    endpoints: Any = SimpleNamespace(settings=HostSettings())
    message: Any = None
    for off in ([], ["async_h2d"], list(links.SWITCHES)):
        (tmp_path / "off.json").write_text(json.dumps(off))
        link_host.switched(endpoints, message)
    on = [{name for name in links.SWITCHES if getattr(each, name)} for each in laid]
    assert on == [set(links.SWITCHES), {*links.SWITCHES} - {"async_h2d"}, set()]
    assert all(each.just_in_time for each in laid), "what is not of links stays"


def test_three_processes_answer_with_every_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "links.json"
    given = "--levels 1 --workload small-audio --rounds 1 --requests 4 --device cpu"
    chosen = ["--variants", "all on", "no zero_copy_encode"]
    assert links.main(["--out", str(out), *given.split(), *chosen]) == 0
    found = read(out)
    assert found["config"]["placement"] == "processes"
    assert [c["variant"] for c in found["cells"]] == chosen[1:]
    for cell in found["cells"]:
        assert [s["error"] for s in cell["samples"]] == [None] * 4
        assert all(s["first_audio"] > 0 and s["rtf"] > 0 for s in cell["samples"])
    assert "| 1 | no zero_copy_encode | 4 |" in capsys.readouterr().out

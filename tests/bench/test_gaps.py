"""Launch gaps: which steps count, and what is idle: a stage, or the device."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gaps
from bench.gaps import WAYS, Mark, Round, gaps_of, idle_share, summary
from bench.harness.host import STAGES
from bench.harness.results import read


def marked(*steps: tuple[str, bool]) -> list[Mark]:
    return [Mark(stage, decodes, None) for stage, decodes in steps]


def test_a_gap_lies_between_two_steps_of_one_stage() -> None:
    assert gaps_of([(0.0, 10.0), (12.0, 20.0), (19.5, 30.0)]) == [2.0, 0.0]
    assert gaps_of([(0.0, 10.0)]) == []


def test_the_device_is_idle_only_where_no_stage_runs() -> None:
    thinker, talker = [(0.0, 4.0), (8.0, 10.0)], [(3.0, 6.0), (9.0, 10.0)]
    assert idle_share(thinker) == pytest.approx(0.4)
    assert idle_share(talker) == pytest.approx(3 / 7)
    assert idle_share([*thinker, *talker]) == pytest.approx(0.2)
    told = summary([{"thinker": thinker, "talker": talker, "code2wav": [], "all": [(0.0, 10.0)]}])
    assert told["stages"]["thinker"]["stage_idle"] == pytest.approx(0.4)
    assert told["stages"]["thinker"]["gap_us"]["max"] == 4.0
    assert told["device_idle"] == 0.0
    assert "code2wav" not in told["stages"]


def test_steps_count_from_the_last_prefill_to_the_first_end() -> None:
    prefill, decode, other = ("thinker", False), ("thinker", True), ("talker", True)
    marks = marked(prefill, decode, prefill, decode, other, decode, decode)
    steady = Round(marks, ended={"thinker": 6}).steady("thinker")
    assert steady == [marks[3], marks[5]]
    assert Round(marks).steady("talker") == [marks[4]]


def test_the_vocoder_counts_when_all_requests_have_sound() -> None:
    marks = marked(*[("code2wav", True)] * 4)
    assert Round(marks, audible=2).steady("code2wav") == marks[2:]
    assert Round(marks).steady("code2wav") == []


class Core:
    """Of a stage: each poll retires one step."""

    in_flight = 0

    def launch(self) -> bool:
        self.in_flight += 1
        return True

    def poll(self) -> list[str]:
        self.in_flight -= bool(self.in_flight)
        return ["a step"]


def test_what_the_ways_switch() -> None:
    made = [Core() for _ in range(3)]
    stages = {name: SimpleNamespace(core=core) for name, core in zip(STAGES, made, strict=True)}
    host: Any = SimpleNamespace(codec=lambda: made[2], host=SimpleNamespace(stages=stages))
    with WAYS["off"](host):
        assert [(core.launch(), core.launch()) for core in made] == [(True, False)] * 3
    with WAYS["on"](host):
        assert all(core.launch() for core in made)
    assert [core.in_flight for core in made] == [2] * 3
    with WAYS["retire all"](host):
        assert [len(core.poll()) for core in made] == [3] * 3, "the last finds nothing"
        assert not any(core.in_flight for core in made)
    assert [len(core.poll()) for core in made] == [1] * 3


def test_every_cell_has_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gaps.json"
    size = "--rows 1 2 --rounds 1 --text 6 --frames 10 --ways on off --kinds speech text"
    assert gaps.main(["--out", str(out), "--device", "cpu", *size.split()]) == 0
    found = read(out)
    cells = [(c["kind"], c["rows"], c["way"]) for c in found["cells"]]
    expected = {(k, n, w) for k in ("speech", "text") for n in (1, 2) for w in ("on", "off")}
    assert set(cells) == expected
    assert len(cells) == len(expected)
    assert {len(samples) for samples in found["arrivals"]["ways"].values()} == {2}
    assert all(s["first_audio"] > 0 for s in found["arrivals"]["ways"]["on"])
    for cell in found["cells"]:
        stages = {"thinker"} if cell["kind"] == "text" else {"thinker", "talker"}
        assert stages <= set(cell["stages"]), json.dumps(cell)[:300]
        if cell["kind"] == "text":
            assert cell["device_idle"] == cell["stages"]["thinker"]["stage_idle"]
    assert "no step of this stage runs" in capsys.readouterr().out


def test_what_a_limit_cuts_is_named(tmp_path: Path) -> None:
    out = tmp_path / "gaps.json"
    assert gaps.main(["--out", str(out), "--device", "cpu", "--rows", "1", "--limit", "0"]) == 1
    assert read(out)["left_out"] == [["speech", 1], ["text", 1], ["spoken question", 1]]

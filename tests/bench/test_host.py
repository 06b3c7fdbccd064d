"""The host's own time: what is measured of a stubbed host, and two checkouts side by side."""

from pathlib import Path

from bench.harness.host import STAGES, Asker
from bench.harness.results import ROOT, read
from bench.harness.workload import Question, Workload
from bench.host import scheduler
from bench.host.loop import Tree, table
from bench.host.measured import MeasuredHost
from stretto.config.engine import HostSettings
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder


def test_phases_add_up_to_the_time_that_the_loop_is_busy(tiny_dir: Path) -> None:
    settings = HostSettings(max_rows=4, blocks={"thinker": 64, "talker": 64})
    host = MeasuredHost(tiny_dir, settings, stub=True, phases=True)
    asker = Asker(PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))
    found = host.run(asker.round(Workload("x", "", Question(20), 8, 20), 2))
    host.close()
    assert set(found["steps"]) == set(STAGES)
    assert found["steps"]["talker"] >= 15
    assert found["device"] == {}
    own = sum(phase["ms"] for phase in found["phases"].values())
    assert 0 < own <= found["window_ms"]
    for name in (
        "thinker: schedule",
        "talker: accept",
        "talker: poll",
        "code2wav: accept",
        "report",
    ):
        assert found["phases"][name]["calls"], name


def test_a_checkout_is_measured_in_a_process_of_its_own() -> None:
    tree = Tree("this", ROOT)
    try:
        assert tree.line() == "ready\n"
        found = tree.measure(2)
        assert found["streams"] == 2
        assert found["cpu_us_per_frame"] > 0
        assert found["phases"] == {}, "without stopwatches"
    finally:
        tree.close()


def test_the_table_of_two_checkouts_has_ratios_of_the_same_rounds() -> None:
    def samples(*us: float) -> list[dict[str, float]]:
        return [{"cpu_us_per_frame": value} for value in us]

    before, after = samples(100.0, 400.0, 100.0), samples(50.0, 200.0, 60.0)
    shown = table({"samples": {"before": {"8": before}, "after": {"8": after}}})
    assert (
        shown.splitlines()[-1] == "| 8 | 100 µs | 60 µs | 12.5 µs | 7.5 µs | 0.50 (0.50 to 0.60) |"
    )


def test_the_scheduler_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "STEPS", 12)
    assert scheduler.main(["--out", str(tmp_path / "x.json")]) == 0
    runs = read(tmp_path / "x.json")["runs"]
    assert {(r["case"], r["rows"]) for r in runs} == {
        (c, n) for c in ("thinker", "talker", "full") for n in (1, 32, 128)
    }

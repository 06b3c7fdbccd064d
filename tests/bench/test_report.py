"""Pictures and tables: what a step's timeline is split into, what is said of a target, and where it
is put."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import report
from bench.harness.results import ROOT
from bench.report import tables, targets
from bench.report.measured import (
    THINKER,
    Results,
    distinct,
    layer_bytes,
    layers,
    one_step,
    row_flops,
    second,
)
from bench.report.pictures import PICTURES
from bench.report.svg import Picture, Scale

LAYER = ["_vector", "_decode", "_vector", "_vector", "_up_vector", "_down_vector"]


def timeline(num_layers: int, each: float = 10.0, overlap: float = 4.0) -> list[list]:
    """Three steps. Every kernel begins `overlap` before the one in front ends and adds `each`."""
    events, now = [], 100.0
    for _ in range(3):
        for name in ["Memcpy", "_begin", *LAYER * num_layers, "_norm", "_vector"]:
            begun = now - overlap
            events.append([name, begun, each + overlap])
            now += each
    return events


def results(folder: Path, **files: dict) -> Results:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"env": {}} | content))
    return Results(folder)


def steps(p50: float, num_layers: int = 48) -> dict:
    return {
        "copy_bytes_per_s": 4e12,
        "steps": [
            {
                "what": what, "batch": batch, "p50_ms": [p50, p50 + 0.1], "p99_ms": [p50, p50],
                "bytes": 6e9,
                "distinct_experts": 8.0, "floor_ms": 1.5, "timeline": timeline(num_layers),
            }
            for what in ("thinker step", "talker frame")
            for batch in (1, 8, 32)
        ],
    }  # fmt: skip


def test_what_kernels_add_is_the_step() -> None:
    ran = one_step(timeline(5))
    assert ran[0].name == "_begin"
    assert (
        len(ran) == 1 + 5 * len(LAYER) + 2 + 1
    )  # the next step's copy counts to the gap behind this one
    assert sum(r.adds for r in ran) == pytest.approx(ran[-1].stop)
    assert all(r.adds == pytest.approx(10.0) for r in ran[1:])
    assert one_step([["_norm", 0.0, 1.0]]) == []


def test_one_recorded_step_is_kept_and_says_the_same() -> None:
    full = timeline(30)
    kept = second(full)
    assert len(kept) < len(full) / 2
    for mine, theirs in zip(one_step(kept), one_step(full), strict=True):
        assert (mine.name, mine.start, mine.adds) == (
            theirs.name,
            pytest.approx(theirs.start),
            pytest.approx(theirs.adds),
        )
    assert second(kept) == kept


def test_layers_name_products_by_their_place() -> None:
    found = list(layers(one_step(timeline(5))))
    assert len(found) == 5
    for layer in found:
        assert [name for name, _ in layer] == ["qkv", "attention", "o", "router", "up", "down"]
    several = [
        "_matrix",
        "_decode",
        "_matrix",
        "_route",
        "_top",
        "_up_matrix",
        "_down_matrix",
        "_add_slots",
    ]
    events = [[name, 10.0 * i, 10.0] for i, name in enumerate(["_begin", *several * 3, "_norm"])]
    for layer in layers(one_step(events)):
        names = [name for name, _ in layer]
        assert names == [
            "qkv",
            "attention",
            "o",
            "router",
            "router, choice",
            "up",
            "down",
            "down, sum",
        ]


def test_bytes_of_a_step_are_those_of_the_released_shape() -> None:
    """Against what was counted from the model's own parameters (`bench steps` on the full-size
    model)."""
    norms = THINKER.layers * 2 * (2 * THINKER.hidden + 2 * 128)
    head = 2.0 * THINKER.vocab * THINKER.hidden
    one = THINKER.layers * sum(layer_bytes(THINKER, 1, 8).values()) + head + norms
    assert one == pytest.approx(6184919040.0, rel=1e-9)
    many = (
        THINKER.layers * sum(layer_bytes(THINKER, 32, 111.77083333333333).values()) + head + norms
    )
    assert many == pytest.approx(56312094720.0, rel=1e-9)
    assert distinct(THINKER, 1) == pytest.approx(8)
    assert distinct(THINKER, 8) == pytest.approx(51.6, abs=0.1)
    assert row_flops(THINKER, context=0) == pytest.approx(
        2 * (one - THINKER.layers * 2097152 - norms) / 2
    )


def test_targets_are_met_by_both_runs_or_missed(tmp_path: Path) -> None:
    lines = {
        line[0]: line for line in targets.step_goals(results(tmp_path, steps_h200=steps(2.15)))
    }
    assert lines["thinker decode step, 1k context, batch 1"][2:] == ("2.15 / 2.25 ms", "**missed**")
    assert lines["talker frame with 15 predictor steps and sampling, batch 1"][3] == "met"
    assert lines["code2wav, 1 x 1 frame"][2] == tables.NOT_YET
    assert targets.goal("streams", "", 64, [64, 96], 0, "≥")[3] == "met"
    assert targets.goal("streams", "", 64, [64, 32], 0, "≥")[3] == "**missed**"
    assert targets.goal("wait", "s", 0.0, [0.0, 0.001], 3)[3] == "**missed**"


def test_nothing_measured_gives_nothing(tmp_path: Path) -> None:
    none = Results(tmp_path)
    assert {name: make(none) for name, make in tables.TABLES.items()} == dict.fromkeys(
        tables.TABLES, ""
    )
    assert [draw(none) for draw in PICTURES.values()] == [None] * len(PICTURES)


def test_a_table_has_as_many_cells_in_every_line(tmp_path: Path) -> None:
    given = results(
        tmp_path,
        steps_h200=steps(2.0),
        ablation_h200={
            "runs": [
                {"variant": v, "base": "all on", "streams": n, "rtf": 0.04,
                "seconds": {"first_audio": 0.02},
                 "ratios": {"first_audio": 1.5, "total": 1.2}, "raw": {"first_audio": [0.02] * n}}
                for v in ("all on", "depth 1") for n in (1, 8)
            ]
        },
        h200={
            "parts": {
                "timeline": {
                    "found": [
                        {"streams": 1, "phases_s": {"a": 0.001, "b": 0.002}, "one_report": REPORT,
                         "phases_raw": [{"a": 0.001, "b": 0.002}, {"a": 0.001, "b": 0.009},
                         {"a": 0.005, "b": 0.001}]}
                    ]
                }
            },
            "env": {"date": "2026-11-15T17:57:34+00:00", "commit": "5b1f0d8"},
            "start": {
                "ready_s": 9.0,
                "phases": [
                    {"at_s": 0.0, "state": "not listening", "stages": {}},
                    {"at_s": 1.0, "state": "loading", "stages": {"thinker": "starting",
                    "talker": "starting"}},
                    {"at_s": 3.0, "state": "loading", "stages": {"thinker": "loading",
                    "talker": "starting"}},
                    {"at_s": 9.0, "state": "ready", "stages": {"thinker": "ready",
                    "talker": "ready"}},
                ],
            },
        },
    )  # fmt: skip
    made = {name: make(given) for name, make in tables.TABLES.items()}
    for name in ("targets", "steps", "layer", "phases", "start", "ablation", "sources"):
        rows = [line for line in made[name].splitlines() if line.startswith("|")]
        assert len(rows) > 2, name
        assert len({line.count("|") for line in rows}) == 1, name
    assert "| **first audio, of the same answers** | **6.0 ms** |" in made["phases"], (
        "not the sum of medians: 3.0"
    )
    assert "| 3.0 s | 6.0 s | thinker: loading |" in made["start"]
    assert (
        "| depth 1 | all on | 1 | 20.0 ms (x 1.50) | 0.040 (x 1.20) | 8 | 20.0 ms"
        in made["ablation"]
    )
    assert (
        "| steps | `steps_h200.json` | not recorded | not recorded | not recorded |"
        in made["sources"]
    )
    assert (
        "| over HTTP: timeline | `h200.json` | 2026-11-15 | 5b1f0d8 | not recorded |"
        in made["sources"]
    )
    for draw in PICTURES.values():
        picture = draw(given)
        assert picture is not None
        ElementTree.fromstring(picture.render())


def test_one_start_is_told_once(tmp_path: Path) -> None:
    """A second pass over the same server has its start in its file; a second server has its own."""
    one = {"parts": {}, "env": {}, "start": {"ready_s": 47.0, "phases": []}}
    given = results(tmp_path, h200=one, h200_again=one)
    assert given.same_server()
    assert "two passes over one server" in tables.runs(given)
    (line,) = [line for line in targets.serving_goals(given) if line[0].startswith("start-up")]
    assert line[2] == "47 s"
    told = [{"ready_s": s, "kernels_cached": n, "phases": []} for s, n in ((52.0, 0), (31.0, 400))]
    given = results(
        tmp_path,
        h200={"parts": {}, "env": {}, "starts": told[:1]},
        h200_again={"parts": {}, "env": {}, "starts": told[1:]},
    )
    assert not given.same_server()
    assert "each with a server of its own" in tables.runs(given)
    assert (
        "2 starts measured: 52 s (0 kernels compiled before), 31 s (400 kernels compiled before)."
        in tables.start(given)
    )


def test_listeners_are_told_with_how_they_came_and_read(tmp_path: Path) -> None:
    level = {
        "streams": 128, "rate": 2.0, "answers": 128, "stuttered": 0, "waited_s": 0.0,
        "errors": {"http 429": 2},
        "rates": {"audio_s_per_s": 100.0}, "summary": {"first_audio_s": {"p50": 0.1, "p90": 0.2,
        "p99": 0.3}},
    }  # fmt: skip
    by_chance = level | {"within_s": None, "lead_s": 1.0, "most_at_once": 91}
    parts = {
        "realtime": {"found": [level]},
        "players": {"found": [by_chance]},
        "open": {"found": [by_chance]},
    }
    given = results(
        tmp_path,
        h200={"parts": parts, "env": {"commit": "abc", "clean": True, "date": "2026-11-20"}},
    )
    assert "| 128 | within 2 s | as fast as it comes | 128 | 128 | 0 |" in tables.realtime(given)
    assert "| 128 | at random moments | 1 s ahead | 91 | 128 | 0 |" in tables.realtime(given)
    assert "| 2 | 128 | 2 | 91 | 100.0 | 200.0 | 300.0 |" in tables.open_loop(given)
    assert "| over HTTP: players | `h200.json` | 2026-11-20 | abc | clean |" in tables.sources(
        given
    )


def test_listeners_who_wait_in_every_run_are_told(tmp_path: Path) -> None:
    """The most that nobody waited in; if somebody did in each, how many, since fewer may not have
    been tried."""
    waited = {"streams": 128, "answers": 128, "stuttered": 2, "waited_s": 0.0066}
    carried = {"streams": 96, "answers": 96, "stuttered": 0, "waited_s": 0.0}
    assert targets.listeners_goal([])[2:] == (targets.NOT_YET, "")
    assert targets.listeners_goal([carried, waited])[2:] == ("96", "met")
    assert targets.listeners_goal([waited])[2:] == (
        "2 of 128 waited, 6.6 ms in all; fewer not run",
        "**not shown**",
    )
    assert targets.listeners_goal([waited | {"streams": 64, "answers": 64}])[3] == "**missed**"


def test_two_versions_and_two_placements_are_told_side_by_side(tmp_path: Path) -> None:
    def run(which: str, commit: str, ms: float) -> dict:
        names = ("first_text_s", "first_audio_s", "rtf")
        found = {"streams": None, "rate": 4.0, "answers": 40,
            "summary": {name: {"p50": ms / 1e3} for name in names},
                 "host": {"stretto_host_busy_seconds_total": 1.0,
                 "stretto_host_idle_seconds_total": 3.0}}  # fmt: skip
        closed = found | {"streams": 8, "rate": None, "answers": 80}
        both = [closed, found] if which == "before" else [found, closed]  # in whatever order
        return {"which": which, "env": {"commit": commit, "clean": True}, "found": both}

    def placed(ms: float) -> dict:
        summary = {"first_audio_s": {"p50": ms / 1e3}, "rtf": {"p50": 0.03}}
        return {
            "env": {},
            "levels": [{"load": {"streams": 32}, "samples": [{}] * 16, "summary": summary}],
        }

    versions = [run("before", "aaaaaaaaaaaa", 30.0), run("after", "bbbbbbbbbbbb", 31.0)]
    given = results(tmp_path, split_h200={"runs": [placed(20.0), placed(22.0)]})
    (tmp_path / "before_after_h200.json").write_text(json.dumps({"runs": [*versions, *versions]}))
    told = tables.before_after(given)
    open_loop = (
        "| 4 requests a second | before, aaaaaaa | 40 / 40 | 30.0 / 30.0 | 30.0 / 30.0 | 0.030 / "
        "0.030 |"
    )
    assert f"{open_loop} 25 % / 25 % |" in told
    assert "| 4 requests a second | after, bbbbbbb | 40 / 40 | 31.0 / 31.0 |" in told
    assert "| 8 streams | before, aaaaaaa | 80 / 80 | 30.0 / 30.0 |" in told
    assert "| 8 streams | after, bbbbbbb | 80 / 80 | 31.0 / 31.0 |" in told
    assert "| 16 | 16 | 20.0 ms | 22.0 ms | 0.0300 | 0.0300 |" in tables.split(given), (
        "32 asked, but 16 answers in all"
    )
    assert tables.sources(given).count("`before_after_h200.json`") == 2, "a line for each commit"


def test_loads_with_and_without_giving_way_are_told_side_by_side(tmp_path: Path) -> None:
    def level(streams: int | None, ms: float) -> dict:
        spread = {"p50": ms / 1e3, "p90": 2 * ms / 1e3, "p99": 3 * ms / 1e3}
        summary = {"first_audio_s": spread, "rtf": {"p50": 0.1}, "wait_0ms_s": {"max": 0.002}}
        return {
            "streams": streams,
            "rate": None if streams else 16.0,
            "answers": 9,
            "summary": summary,
        }

    given = results(tmp_path)
    assert tables.prefill_priority(given) == ""
    on = {
        "latency": {"found": [level(8, 5.0), level(32, 20.0)]},
        "open": {"found": [level(None, 10.0)]},
    }
    off = {"latency": {"found": [level(32, 40.0)]}, "open": {"found": [level(None, 15.0)]}}
    for name, parts in (("h200_again", on), ("prefill_priority_off_h200", off)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"env": {}, "parts": parts}))
    told = tables.prefill_priority(results(tmp_path))
    assert told.splitlines()[2:] == [
        "| 16 requests a second | on | 9 | 10.0 | 20.0 | 30.0 | 0.100 | 2 |",
        "| 16 requests a second | off | 9 | 15.0 | 30.0 | 45.0 | 0.100 | 2 |",
        "| 32 streams | on | 9 | 20.0 | 40.0 | 60.0 | 0.100 | 2 |",
        "| 32 streams | off | 9 | 40.0 | 80.0 | 120.0 | 0.100 | 2 |",
    ]


def test_servers_on_one_card_are_told_one_by_one(tmp_path: Path) -> None:
    def level(ms: float, wait_s: float, **more: int) -> dict:
        summary = {
            "first_audio_s": {"p50": ms / 1e3},
            "rtf": {"p50": ms / 1e3},
            "wait_0ms_s": {"max": wait_s},
        }
        return {"streams": 8, "answers": 20, "summary": summary, **more}

    others = [
        level(130.0, 0.0, server=0),
        level(800.0, 0.0, server=1),
        level(120.0, 0.01, server=0),
    ]
    given = results(tmp_path)
    held = {"env": {}, "parts": {"latency": {"found": [level(146.1, 0.03)]}}, "beside": others}
    (tmp_path / "beside_h200.json").write_text(json.dumps(held))
    told = tables.beside(given)
    assert "| the full model | 8 | 20 | 146 ms | 0.146 | 30 ms |" in told
    assert "| tiny server 1 | 8 | 40 | 120 to 130 ms | 0.120 to 0.130 | 10 ms |" in told
    assert "| tiny server 2 | 8 | 20 | 800 ms | 0.800 | 0 ms |" in told


def test_the_pages_say_what_the_files_say() -> None:
    """Each table in README.md, the page and the notes is the one that is made from bench/results
    now."""
    made = {name: text for name, make in tables.TABLES.items() if (text := make(Results()))}
    for page in report.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert report.fill(text, made) == text, f"{page}: python -m bench report --write"


REPORT = {
    "first_text_s": 0.01, "first_audio_s": 0.02, "total_s": 0.3, "audio_s": 10.0,
    "timeline": [
        {"lane": "thinker", "name": "prompt", "start": 0.001, "stop": 0.01},
        {"lane": "talker", "name": "frame", "start": 0.01, "stop": 0.5},
        {"lane": "code2wav", "name": "packet", "start": 0.02, "stop": 0.03},
        {"lane": "packets", "name": "packet", "start": 0.02, "stop": 0.02},
    ],
}  # fmt: skip


def test_tables_go_where_the_page_wants_them() -> None:
    page = (
        "a\n<!-- begin: steps -->\nold\n<!-- end: steps -->\nb\n<!-- begin: host -->\nkept\n<!-- "
        "end: host -->\n"
    )
    filled = report.fill(page, {"steps": "| x |", "layer": "| y |"})
    assert "old" not in filled
    assert "<!-- begin: steps -->\n\n| x |\n\n<!-- end: steps -->\nb\n" in filled
    assert "kept" in filled
    assert report.fill(filled, {"steps": "| x |"}) == filled


def test_every_table_that_a_page_wants_is_made() -> None:
    wanted = set()
    for page in report.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        begun = [part.split(" -->")[0] for part in text.split("<!-- begin: ")[1:]]
        ended = [part.split(" -->")[0] for part in text.split("<!-- end: ")[1:]]
        assert begun == ended, page
        wanted |= set(begun)
    assert wanted <= set(tables.TABLES)
    assert "targets" in wanted


def test_scales_and_marks() -> None:
    log = Scale(1.0, 1000.0, 0.0, 300.0, log=True)
    assert [log(v) for v in (1.0, 10.0, 1000.0)] == pytest.approx([0.0, 100.0, 300.0])
    assert list(log.ticks()) == pytest.approx([1.0, 10.0, 100.0, 1000.0])
    assert list(Scale(0.0, 100.0, 0.0, 1.0).ticks(10)) == pytest.approx(
        [10.0 * i for i in range(11)]
    )
    picture = Picture(10, 10)
    picture.text(1, 1, "a < b & c")
    assert "a < b & c" in "".join(ElementTree.fromstring(picture.render()).itertext())

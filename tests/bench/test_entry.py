"""The one entry: the list without torch, help for each program, and what the harness makes of
rounds and results."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bench.__main__ import PROGRAMS, main
from bench.harness.parts import listing
from bench.harness.results import RESULTS, ROOT, quantile, read, rounded, write
from bench.harness.rounds import Ratio, turns
from tests.slow.__main__ import PROGRAMS as SLOW
from tests.slow.__main__ import main as slow_main

COMMAND = re.compile(r"(?:python -m |`)(bench|tests\.slow)\s+([a-z_]+)(?:\s+--parts\s+([\w,]+))?")
PACKAGES = {"bench": PROGRAMS, "tests.slow": SLOW}
MAIN = {"bench": main, "tests.slow": slow_main}


def test_the_list_names_all_programs_and_needs_no_torch() -> None:
    code = "import sys; from bench.__main__ import main; main([]); sys.exit('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert shown == listing("bench", PROGRAMS) + "\n"
    for name in PROGRAMS:
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 3, "a line that says what it is about"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_program_is_listed(package: str) -> None:
    folder = ROOT / package.replace(".", "/")
    there = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("test_")} | {
        p.parent.name for p in folder.glob("*/__init__.py")
    }
    assert there - {"__init__", "__main__", "conftest", "harness"} == set(PACKAGES[package])


@pytest.mark.parametrize(
    ("package", "name"),
    [
        *((package, [name]) for package, programs in PACKAGES.items() for name in programs),
        *(
            (package, [name, "--parts", part])
            for package, programs in PACKAGES.items()
            for name, parts in programs.items()
            for part in parts
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_help(package: str, name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert MAIN[package]([*name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m {package} {' '.join(name)} ")
    assert f"python -m {package}" in shown.partition("\n")[2]


def test_parts_run_in_turn_and_have_a_result_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["kernels", "--parts", "rounding,rounding"]) == 0
    once, twice = capsys.readouterr().out.splitlines(), main(["kernels", "--parts", "rounding"])
    assert twice == 0
    assert capsys.readouterr().out.splitlines() * 2 == once
    for given, problem in (
        (["--parts", "faster"], "no such part: faster"),
        (["--parts", "wire,realtime", "--help"], "--out"),
    ):
        with pytest.raises(SystemExit) as ended:
            slow_main(["fuzz", *given, "--out", str(tmp_path / "x.json")])
        assert ended.value.code == 2
        assert problem in capsys.readouterr().err


def test_documents_name_programs_and_parts_that_there_are() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").rglob("*.md"),
    ]
    for folder in ("bench", "stretto", "tests/slow"):
        pages += (ROOT / folder).rglob("*.py")
    found = [
        command for page in pages for command in COMMAND.findall(page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 50
    for package, name, parts in found:
        programs = PACKAGES[package]
        assert name in programs, f"{package} {name}"
        if programs[name] and parts:
            assert set(parts.split(",")) <= {*programs[name], "PART"}, f"{name} --parts {parts}"


def test_every_result_has_a_command() -> None:
    page = (ROOT / "bench" / "notes" / "results.md").read_text(encoding="utf-8")
    assert {p.name for p in RESULTS.iterdir() if f"`{p.name}`" not in page} == set()


def test_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency"]) == 2
    assert "there is no program 'latency'" in capsys.readouterr().err


def test_each_begins_as_often_as_the_others() -> None:
    order = list(turns("abc", 6))
    assert [thing for _, thing in order[::3]] == list("abcabc")
    assert all({thing for n, thing in order if n == number} == set("abc") for number in range(6))


def test_a_ratio_is_of_the_same_rounds() -> None:
    noisy = [1.0, 10.0, 100.0, 1000.0]
    assert Ratio.of([2 * v for v in noisy], noisy) == Ratio(2.0, 2.0, 2.0)
    assert str(Ratio.of([1.0, 2.0, 3.0, 4.0], [1.0] * 4)) == "3.00 (2.00 to 4.00)"
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_a_result_has_a_line_for_each_field(tmp_path: Path) -> None:
    result = {"env": {"commit": "abc"}, "times": [0.123456789, (1, 2)], "raw": {"a": [1.0]}}
    write(tmp_path / "new" / "x.json", result)
    lines = (tmp_path / "new" / "x.json").read_text().splitlines()
    assert len(lines) == 2 + len(result)
    assert read(tmp_path / "new" / "x.json") == json.loads(json.dumps(rounded(result)))
    assert rounded(result)["times"] == [0.123457, [1, 2]]
    write(None, result)

"""The record of the GPU tests: counts, failures, what is known of a run that was cut; and which
commit it was."""

import json
import sys
import time
from pathlib import Path

import pytest

from bench.harness import env
from tests.gpu import suite
from tests.gpu.suite import Part, Ran, failed, record, run

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("no such thing")

def test_fine(): pass
def test_wrong(): assert 1 == 2, "not the same"
def test_setup(broken): pass
@pytest.mark.skip(reason="not today")
def test_left_out(): pass
"""


def pytest_of(folder: Path, tests: str, until: float, workers: int = 1) -> Ran:
    (folder / "test_some.py").write_text(tests, encoding="utf-8")
    part = Part("some", (str(folder / "test_some.py"),), "not alone", 0)
    ran = Ran(part, folder / "notes", workers)
    run(ran, until, lambda: None)
    return ran


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_is_counted_test_by_test(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = pytest_of(tmp_path, TESTS, time.monotonic() + 600, workers)
    monkeypatch.setattr(suite, "PARTS", (ran.part,))
    ends = {name.split("::")[1]: t["end"] for name, t in ran.tests().items()}
    assert ends == {
        "test_fine": "passed",
        "test_wrong": "failed",
        "test_setup": "error",
        "test_left_out": "skipped",
    }
    assert ran.state == "complete"
    assert failed([ran])
    text = record({"commit": "abc", "clean": True}, [ran], 1.0)
    assert text.startswith("commit: abc\nclean: True\n")
    assert "result: NOT passed" in text
    for word in ("not the same", "no such thing", "not today"):
        assert word in text
    (line,) = [line for line in text.splitlines() if line.startswith("some")]
    assert line.split()[1:5] == ["1", "1", "1", "1"]


def test_a_selection_says_that_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    part = Part("some", (str(tmp_path / "test_some.py"),), "not alone", 0, names="not wrong")
    monkeypatch.setattr(suite, "SELECTION", (part,))
    words = ["--selection", "--device", "cpu", "--workers", "1", "-k", "fine or wrong"]
    record = tmp_path / "record"
    assert suite.main([*words, "--out", str(record)]) == 0
    text = record.read_text()
    assert text.startswith("selection: not the whole suite")
    assert "\nresult: passed\n" in text
    [line] = [line for line in text.splitlines() if line.startswith("some")]
    assert line.split()[1:5] == ["1", "0", "0", "0"], "named by the part and by the command"
    with pytest.raises(SystemExit):
        suite.main(words)
    assert "some of the tests need --out" in capsys.readouterr().err


def test_a_part_that_is_cut_names_what_was_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "WRITE_EVERY", 0.0)
    (tmp_path / "test_some.py").write_text(
        "import threading\ndef test_fine(): pass\ndef test_long(): threading.Event().wait()\n",
        encoding="utf-8",
    )
    ran = Ran(
        Part("some", (str(tmp_path / "test_some.py"),), "not alone", 0),
        tmp_path / "notes",
        workers=1,
    )

    def write() -> None:
        """Called in turns; at the last test it is time to stop, as a signal would."""
        if ran.state == "running" and len(ran.tests()) == 2:
            raise suite.Cut("cut by SIGTERM")

    with pytest.raises(suite.Cut):
        run(ran, time.monotonic() + 600, write)
    monkeypatch.setattr(suite, "PARTS", (ran.part,))
    assert ran.state == "cut by SIGTERM"
    text = record({}, [ran], 1.0)
    assert "begun and not ended\n" in text
    assert text.split("begun and not ended")[1].strip().endswith("::test_long")
    assert failed([ran])


def test_a_part_is_cut_at_its_limit(tmp_path: Path) -> None:
    ran = pytest_of(tmp_path, "def test_fine(): pass\n", time.monotonic() - 1)
    assert ran.state == "cut by the time limit"


def notes(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"test": "half a li', encoding="utf-8"
    )
    return path


def test_all_parts_must_have_ended_well(tmp_path: Path) -> None:
    passed = notes(
        tmp_path / "notes",
        {"test": "a", "what": "began"},
        {"test": "a", "what": "passed", "seconds": 1.0},
    )
    ran = [Ran(part, passed, 1, state="complete") for part in suite.PARTS]
    assert not failed(ran)
    assert failed(ran[:2])
    ran[1].state = "pytest ended with 4"
    assert failed(ran)
    empty = [Ran(part, tmp_path / "none", 1, state="complete") for part in suite.PARTS]
    assert failed(empty)


def test_a_teardown_that_breaks_makes_a_passed_test_an_error(tmp_path: Path) -> None:
    ran = Ran(suite.PARTS[0], notes(
        tmp_path / "notes",
        {"test": "a", "what": "passed", "seconds": 1.0},
        {"test": "a", "what": "error", "seconds": 2.0, "text": "late"},
    ), 1)  # fmt: skip
    assert ran.tests() == {"a": {"end": "error", "seconds": 3.0, "text": "late"}}


def test_the_commit_comes_from_a_file_where_there_is_no_repository(tmp_path: Path) -> None:
    assert env.sources(tmp_path) == {"commit": None, "clean": None}
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n", encoding="utf-8")
    assert env.sources(tmp_path) == {"commit": "0123456789ab", "clean": True}
    (tmp_path / ".git").mkdir()  # of the machine it was copied to: says nothing about these sources
    assert env.sources(tmp_path) == {"commit": "0123456789ab", "clean": True}
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n M stretto/cli.py\n", encoding="utf-8")
    assert env.sources(tmp_path) == {"commit": "0123456789ab", "clean": False}


def test_the_machine_and_the_versions_are_named() -> None:
    found = env.describe()
    assert {
        "commit",
        "clean",
        "python",
        "torch",
        "triton",
        "transformers",
        "gpu",
        "cpu",
        "cores",
    } <= found.keys()
    assert found["python"] == sys.version.split()[0]


def test_limits_of_another_card_are_for_the_tests_and_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_env.py").write_text(
        "import os\n"
        "def test_env():\n"
        "    assert os.environ['STRETTO_KERNELS_CARD'] == 'sm_86'\n"
        "    assert os.environ['STRETTO_KERNELS_DEPENDENT_LAUNCH'] == 'off'\n",
        encoding="utf-8",
    )
    part = Part("some", (str(tmp_path / "test_env.py"),), "not alone", 0)
    monkeypatch.setattr(suite, "PARTS", (part,))
    out = tmp_path / "record.txt"
    flags = ["--card", "sm_86", "--no-dependent-launch", "--device", "cpu", "--workers", "1"]
    assert suite.main([*flags, "--out", str(out)]) == 0
    first, *_ = out.read_text(encoding="utf-8").splitlines()
    limits = "STRETTO_KERNELS_CARD=sm_86, STRETTO_KERNELS_DEPENDENT_LAUNCH=off"
    assert first == f"limits: {limits}"
    with pytest.raises(SystemExit):  # the record in bench/results is of a run without limits
        suite.main(["--card", "sm_86", "--device", "cpu"])

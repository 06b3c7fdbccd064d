"""`make check` runs all tests but those of tests/check.txt: these start engines, browsers or many
processes, or compute for long."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "tests" / "check.txt").read_text(encoding="utf-8").splitlines()
LEFT_OUT = [line.removeprefix("--ignore=") for line in LINES]
# An engine or a server of a test's own; those in processes are the session's, `real_server`.
SLOW = (
    "PipelineEngine.open(",
    "real_engine import",
    "bench.harness.serving import",
    "web.tab import",
)


def test_every_path_is_there_once() -> None:
    assert all(line.startswith("--ignore=tests/") for line in LINES)
    assert [path for path in LEFT_OUT if not (ROOT / path).exists()] == []
    assert sorted(set(LEFT_OUT)) == LEFT_OUT
    folders = [path for path in LEFT_OUT if not path.endswith(".py")]
    assert [path for path in LEFT_OUT if any(path.startswith(f"{f}/") for f in folders)] == []


def test_no_file_of_the_rest_starts_an_engine_of_its_own() -> None:
    files = [f.relative_to(ROOT).as_posix() for f in (ROOT / "tests").rglob("test_*.py")]
    left = ("tests/slow", "tests/test_check.py", *LEFT_OUT)
    rest = [n for n in files if not any(n == path or n.startswith(f"{path}/") for path in left)]
    assert rest
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in rest}
    assert [name for name, text in texts.items() if any(word in text for word in SLOW)] == []

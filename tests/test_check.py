"""tests/check.txt, the part of the suite that `make check` runs, names what is there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "tests" / "check.txt").read_text(encoding="utf-8").splitlines()
LEFT_OUT = [line.removeprefix("--ignore=") for line in LINES if line.startswith("--ignore=")]
CHOSEN = [line for line in LINES if not line.startswith("-")]


def test_every_path_is_there_once() -> None:
    assert [path for path in CHOSEN + LEFT_OUT if not (ROOT / path).exists()] == []
    assert sorted(set(CHOSEN)) == CHOSEN
    assert sorted(set(LEFT_OUT)) == LEFT_OUT


def test_what_is_left_out_would_else_be_run() -> None:
    folders = [path for path in CHOSEN if (ROOT / path).is_dir()]
    assert [path for path in LEFT_OUT if not any(path.startswith(f"{f}/") for f in folders)] == []
    inside = [path for path in CHOSEN if any(path.startswith(f"{f}/") for f in folders)]
    assert inside == [], "a file of a folder that is run anyway"


def test_no_file_starts_an_engine_of_its_own() -> None:
    """Engines and servers in processes are the session's one, the fixture `real_server`."""
    words = ("PipelineEngine.open(", "from bench.harness.serving import")
    files = [
        file
        for path in CHOSEN
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
        if file != Path(__file__)
    ]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    names = [n for n in names if not any(n == p or n.startswith(f"{p}/") for p in LEFT_OUT)]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    assert [name for name, text in texts.items() if any(word in text for word in words)] == []

"""Removes guards one at a time and expects a test to notice: each mutation in tests/mutations is applied to a copy of
the sources, and the tests that it names must fail there (and pass without it).

    .venv/bin/python scripts/mutations.py                  # all
    .venv/bin/python scripts/mutations.py links owner      # those of tests/mutations/links.py and owner.py
    .venv/bin/python scripts/mutations.py --name "salt"    # those whose name holds this

A mutation is (name, file, old text, new text, tests); the old text stands exactly once in its file."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "mutations"
COPIED = ("stretto", "tests", "bench", "scripts", "docs", "deploy", "pyproject.toml", "README.md", "Makefile")
NO_TEST_RAN = (4, 5)  # pytest's exit status for a wrong name, or none


@dataclass(frozen=True, slots=True)
class Mutation:
    group: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(groups: list[str]) -> list[Mutation]:
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem == "__init__" or (groups and path.stem not in groups):
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [Mutation(path.stem, n, f, a, b, tuple(tests)) for n, f, a, b, tests in module.MUTATIONS]
    return found


def copy(to: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)


def run(tree: Path, tests: tuple[str, ...], limit: float) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, "it hung"  # without the guard, something waits for ever: noticed
    return done.returncode, done.stdout[-2000:]


def judge(m: Mutation, limit: float) -> str:
    """What is wrong with a mutation, or nothing."""
    source = (ROOT / m.file).read_text(encoding="utf-8")
    if source.count(m.old) != 1:
        return f"its text stands {source.count(m.old)} times in {m.file}"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy(tree)
        (tree / m.file).write_text(source.replace(m.old, m.new), encoding="utf-8")
        status, output = run(tree, m.tests, limit)
    if status in NO_TEST_RAN:
        return f"its tests do not run:\n{output}"
    return "" if status else "it survived: all of its tests pass"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("groups", nargs="*", help="files of tests/mutations, without .py (all if none is named)")
    p.add_argument("--name", default="", help="only mutations whose name holds this")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="at a time (default: 1)")
    p.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one mutation's tests (default: 300)")
    p.add_argument("--only-mutants", action="store_true", help="do not run the tests without mutations first")
    args = p.parse_args()
    mutations = [m for m in read(args.groups) if args.name.lower() in m.name.lower()]
    if not mutations:
        print("no such mutation")
        return 2
    if not args.only_mutants:
        tests = tuple(sorted({t for m in mutations for t in m.tests}))
        print(f"{len(tests)} tests without mutations", flush=True)
        status, output = run(ROOT, tests, args.timeout * 10)
        if status:
            print(f"they fail as they are:\n{output}")
            return 2
    bad = 0
    start = time.perf_counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        for m, why in zip(mutations, pool.map(lambda m: judge(m, args.timeout), mutations), strict=True):
            bad += bool(why)
            print(f"{'FAIL' if why else 'ok':<5}{m.group}: {m.name}{': ' + why if why else ''}", flush=True)
    print(f"{len(mutations) - bad} of {len(mutations)} mutations noticed, {time.perf_counter() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

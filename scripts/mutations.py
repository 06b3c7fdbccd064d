#!/usr/bin/env python3
"""Removes the guards and effects of changed lines one at a time, and reports those whose loss no
test notices.

    scripts/mutations.py  # lines changed since the branch left main, or since HEAD~1
    scripts/mutations.py --since v0.1                   # since another revision
    scripts/mutations.py stretto/server/body.py  # all lines of a file, or those of --lines 40-80
    scripts/mutations.py --tests tests/server/http/test_body.py tests/transport/contract

A mutant is a copy of the sources with one change: the condition of an `if` that leaves (raise,
return, continue, break) becomes False or True, a call for its effect, a `del`, a `raise` or a
`finally` body is removed, `<` becomes `<=`. Its tests are those of `--tests`, else the file that
mirrors the module by name and files that import it, the fastest first. Tests that fail, crash or
hang have noticed it. The status is 1 if a mutant survives: look whether a test is missing, or the
line is not needed, or the change makes no difference."""

from __future__ import annotations

import argparse
import ast
import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv" / "bin" / "python"
PYTHON = str(VENV) if VENV.exists() else sys.executable
PACKAGE = "stretto"
MAX_TEST_FILES = 12  # of a module, if none are named
LINK_BYTES = 1 << 20  # larger files (weights) are linked into the copy
# variable by which all processes of a run are found, in whichever session they are
MARK = "MUTATION_RUN"
NO_TESTS_COLLECTED = 5  # pytest's exit status
LOGGERS = {"log", "logger", "logging"}  # a line of a log is no effect that a test should notice
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}


# ---- which mutants


@dataclass(frozen=True, slots=True)
class Mutant:
    line: int
    change: str
    source: str  # of the whole module, with the change


@dataclass(frozen=True, slots=True)
class Edit:
    line: int
    change: str
    start: int  # bytes of the source from here
    end: int  # up to here become
    text: str


class Finder:
    """Finds the edits of one module. Positions of `ast` are bytes of UTF-8."""

    def __init__(self, source: str, lines: Collection[int] | None) -> None:
        self.data = source.encode()
        self._lines = lines
        self._starts = [0, *itertools.accumulate(map(len, self.data.splitlines(keepends=True)))]
        self._tree = ast.parse(source)

    def edits(self) -> Iterator[Edit]:
        in_strings = {
            id(n) for s in ast.walk(self._tree) if isinstance(s, ast.JoinedStr) for n in ast.walk(s)
        }
        of_guards = {
            id(n.body[0])
            for n in ast.walk(self._tree)
            if isinstance(n, ast.If) and len(n.body) == 1
        }
        for node in ast.walk(self._tree):
            if id(node) in in_strings:  # before Python 3.12 their positions are wrong
                continue
            match node:
                case ast.If():
                    yield from self._guard(node)
                case ast.Try(finalbody=[*_, last]) | ast.TryStar(finalbody=[*_, last]):
                    yield from self._replace(
                        node.finalbody[0], last, "pass", "`finally` does nothing"
                    )
                case ast.Raise() if (
                    id(node) not in of_guards
                ):  # there, it is the same as a condition that is False
                    yield from self._replace(node, node, "pass", "nothing is raised")
                case ast.Delete():
                    yield from self._replace(node, node, "pass", "`del` removed")
                case (
                    ast.Expr(value=ast.Call() as call)
                    | ast.Expr(value=ast.Await(value=ast.Call() as call))
                ):
                    if not is_log(call):
                        yield from self._replace(node, node, "pass", "call removed")
                case ast.Compare():
                    yield from self._comparison(node)

    def _guard(self, node: ast.If) -> Iterator[Edit]:
        last = node.body[-1]
        if not isinstance(last, ast.Raise | ast.Return | ast.Continue | ast.Break):
            return
        if not self._touched(node.lineno, end_line(node.test)) and not self._touched(
            last.lineno, end_line(last)
        ):
            return
        start, end = self._span(node.test, node.test)
        yield Edit(node.test.lineno, "condition is False", start, end, "False")
        if not isinstance(last, ast.Raise):  # else nothing would work, and any test would notice
            yield Edit(node.test.lineno, "condition is True", start, end, "True")

    def _comparison(self, node: ast.Compare) -> Iterator[Edit]:
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators
        ):
            if type(operator) not in COMPARISONS or not self._touched(end_line(left), right.lineno):
                continue
            old, new = COMPARISONS[type(operator)]
            _, after_left = self._span(left, left)
            before_right, _ = self._span(right, right)
            start = self.data.index(old.encode(), after_left, before_right)
            yield Edit(end_line(left), f"`{old}` is `{new}`", start, start + len(old), new)

    def _replace(self, first: ast.stmt, last: ast.stmt, text: str, change: str) -> Iterator[Edit]:
        if self._touched(first.lineno, end_line(last)):
            yield Edit(first.lineno, change, *self._span(first, last), text)

    def _touched(self, first: int, last: int) -> bool:
        return self._lines is None or any(n in self._lines for n in range(first, last + 1))

    def _span(self, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> tuple[int, int]:
        assert last.end_col_offset is not None
        start = self._starts[first.lineno - 1] + first.col_offset
        return start, self._starts[end_line(last) - 1] + last.end_col_offset


def end_line(node: ast.expr | ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def is_log(call: ast.expr) -> bool:
    while True:
        match call:
            case ast.Call(func=inner) | ast.Attribute(value=inner):
                call = inner
            case _:
                return isinstance(call, ast.Name) and call.id in LOGGERS


def mutants(source: str, lines: Collection[int] | None = None) -> list[Mutant]:
    """All mutants of a module's source, or those of these lines, in their order; none twice."""
    finder = Finder(source, lines)
    found: dict[str, Mutant] = {}  # by its source
    for e in sorted(finder.edits(), key=lambda e: (e.start, -e.end)):
        text = (finder.data[: e.start] + e.text.encode() + finder.data[e.end :]).decode()
        if text != source:  # else the condition is `False` as it stands
            found.setdefault(text, Mutant(e.line, e.change, text))
    return list(found.values())


# ---- which lines


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {args[0]}: {done.stderr.strip()}")
    return done.stdout


def tree_files() -> list[str]:
    """All files of the working tree that git does not ignore."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    # One may be removed and not yet committed.
    return [name for name in names if (ROOT / name).is_file()]


def default_base() -> str:
    """Where this branch left main; on main itself, the commit before."""
    head = git("rev-parse", "HEAD").strip()
    for name in ("main", "origin/main"):
        with suppress(SystemExit):
            base = git("merge-base", name, "HEAD").strip()
            if base != head:
                return base
    return "HEAD~1"


def added_lines(diff: str) -> set[int]:
    """Numbers of the lines that a diff of one file (with `-U0`) adds or changes."""
    hunks = re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE)
    return {n for first, count in hunks for n in range(int(first), int(first) + int(count or 1))}


def changes_since(base: str, files: list[str]) -> dict[str, Collection[int] | None]:
    """Changed lines of each file (of the package, if none are named); None means all lines, of a
    new file."""
    of = files or [PACKAGE]
    names = git("diff", "--name-only", "--diff-filter=d", "-z", base, "--", *of).split("\0")
    found: dict[str, Collection[int] | None] = {
        name: added_lines(git("diff", "-U0", "--no-color", "--no-ext-diff", base, "--", name))
        for name in names
        if name.endswith(".py")
    }
    untracked = git("ls-files", "--others", "--exclude-standard", "-z", "--", *of).split("\0")
    return found | dict.fromkeys(n for n in untracked if n.endswith(".py"))


# ---- which tests


def imported_modules(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {n.name for n in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {module, *(f"{module}.{n.name}" for n in names)}
    return found


def find_tests(file: str, root: Path) -> list[str]:
    """Test files of a module: those of its name and those that import it, small ones first; if
    there are none, those beside its place, and beside helpers of tests that import it."""
    parts = Path(file).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    beside = root.joinpath("tests", *(parts[1:-1] if parts[0] == PACKAGE else parts[:-1]))
    folders = {beside}
    name = f"test{parts[-1]}".replace("_", "")
    long_name = f"test{''.join(parts[-2:])}".replace("_", "")  # with the package: in any folder
    mirror: list[Path] = []
    importers: list[Path] = []
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        is_test = path.name.startswith("test_")
        if (path.stem.replace("_", "") == name and path.parent == beside) or path.stem.replace(
            "_", ""
        ) == long_name:
            mirror.append(path)
        elif module.rpartition(".")[2] in text and module in imported_modules(text):
            if is_test:
                importers.append(path)
            else:
                folders.add(path.parent)
    chosen = mirror + by_size(importers)
    if not chosen:
        chosen = by_size(path for folder in folders for path in folder.glob("test_*.py"))
    return [path.relative_to(root).as_posix() for path in chosen[:MAX_TEST_FILES]]


def by_size(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_size, path))


def seconds_of(test: str, cases: ET.Element) -> float | None:
    """How long the tests of a file, a folder or a test's id took, by pytest's JUnit file; None if
    one failed, or none passed."""
    place = test.partition("::")[0].rstrip("/")
    seconds, passed = 0.0, 0
    for case in cases.iter("testcase"):
        file = (
            case.get("file") or case.get("name", "").replace(".", "/") + ".py"
        )  # the latter: it cannot be imported
        if file != place and not file.startswith(place + "/"):
            continue
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            return None
        seconds += float(case.get("time", 0))
        passed += "skipped" not in outcomes
    return seconds if passed else None


# ---- copies and runs


class Copy:
    """A copy of a working tree in which one file at a time is another."""

    def __init__(self, root: Path, names: list[str], folder: Path) -> None:
        self.tree = folder / "tree"
        self.temp = folder / "t"  # short: tests put sockets there
        self.output = folder / "output"
        self.results = folder / "results.xml"
        self._times = itertools.count(1)
        for name in names:
            source, target = root / name, self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.stat().st_size > LINK_BYTES:
                target.symlink_to(source)
            else:
                shutil.copy2(source, target, follow_symlinks=False)

    def write(self, file: str, source: str) -> None:
        path = self.tree / file
        path.write_text(source, encoding="utf-8", newline="")
        os.utime(
            path, (0, next(self._times))
        )  # bytecode is valid for one time and size: never of another mutant

    async def test(
        self, tests: list[str], mark: str, limit: float | None, *options: str
    ) -> int | None:
        command = [
            PYTHON,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={self.temp}",
            *options,
            *tests,
        ]
        env = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1"}
        return await run(command, self.tree, env, mark, limit, self.output)


async def run(
    command: list[str], cwd: Path, env: dict[str, str], mark: str, limit: float | None, output: Path
) -> int | None:
    """The exit status, or None if it ran past the limit. In any case, all that it started is
    killed."""
    with output.open("wb") as out:  # a file: a process that is left would keep a pipe open
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            env={**env, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(limit):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await kill_marked(mark)


async def kill_marked(mark: str) -> None:
    """Kills processes with this mark in their environment, and waits until there are none (or for
    five seconds)."""
    for _ in range(500):
        pids = marked_processes(mark)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


def marked_processes(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):  # there are none where there is no /proc
        with suppress(OSError):  # it has ended, or is another user's
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


# ---- the whole


@dataclass(frozen=True, slots=True)
class Job:
    file: str
    mutant: Mutant
    tests: list[str]

    def __str__(self) -> str:
        line = (
            (ROOT / self.file).read_text(encoding="utf-8").split("\n")[self.mutant.line - 1].strip()
        )
        return f"{self.file}:{self.mutant.line}  {self.mutant.change}:  {line}"


def repository_path(name: str) -> str:
    path = Path(name).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        raise SystemExit(f"{name}: no file of this repository")
    return path.relative_to(ROOT).as_posix()


def choose_mutants(args: argparse.Namespace) -> dict[str, list[Mutant]]:
    files = [repository_path(name) for name in args.files]
    changes: dict[str, Collection[int] | None]
    if args.lines:
        changes = {files[0]: args.lines}
    elif files and not args.since:
        changes = dict.fromkeys(files)
    else:
        base = git("merge-base", args.since, "HEAD").strip() if args.since else default_base()
        changes = changes_since(base, files)
    modules = {
        f: mutants((ROOT / f).read_text(encoding="utf-8"), lines) for f, lines in changes.items()
    }
    return {file: some for file, some in modules.items() if some}


async def measure(copy: Copy, tests: list[str], mark: str) -> dict[str, float]:
    """Seconds of each test file (folder, id) without a mutant; those that fail or are skipped are
    not in it."""
    options = (
        "--continue-on-collection-errors",
        f"--junitxml={copy.results}",
        "-o",
        "junit_family=xunit1",
    )
    await copy.test(tests, mark, None, *options)
    if not copy.results.exists():
        raise SystemExit(
            f"the tests do not finish without a mutant:\n{copy.output.read_text()[-2000:]}"
        )
    cases = ET.parse(copy.results).getroot()
    return {test: seconds for test in tests if (seconds := seconds_of(test, cases)) is not None}


async def judge(
    args: argparse.Namespace, modules: dict[str, list[Mutant]], folder: Path, mark: str
) -> int:
    tests_by_file = {file: args.tests or find_tests(file, ROOT) for file in modules}
    tests = list(dict.fromkeys(test for some in tests_by_file.values() for test in some))
    names = tree_files()
    first = Copy(ROOT, names, folder / "0")
    print(
        f"{sum(map(len, modules.values()))} mutants; first, the tests without one: "
        f"{' '.join(tests)}",
        flush=True,
    )
    start = time.monotonic()
    seconds = await measure(first, tests, f"{mark}.") if tests else {}
    limit = args.timeout or 30 + 3 * (time.monotonic() - start)
    for test in tests:
        if test not in seconds:
            print(f"left out: {test} fails, or is skipped, without a mutant", flush=True)
    if args.tests and len(seconds) < len(tests):
        return 2
    jobs = []
    for file, some in modules.items():
        fastest = sorted((t for t in tests_by_file[file] if t in seconds), key=seconds.__getitem__)
        jobs += [Job(file, mutant, fastest) for mutant in some]
    queue = iter(enumerate(jobs, 1))
    survivors: list[Job] = []

    async def worker(copy: Copy) -> None:
        for number, job in queue:
            began = time.monotonic()
            status: int | None = 0
            if job.tests:
                copy.write(job.file, job.mutant.source)
                status = await copy.test(job.tests, f"{mark}.{number}.", limit, "-x")
                copy.write(job.file, (ROOT / job.file).read_text(encoding="utf-8"))
            survives = status in (0, NO_TESTS_COLLECTED)
            if survives:
                survivors.append(job)
            word = "SURVIVES" if survives else "hangs" if status is None else "noticed"
            print(
                f"[{number}/{len(jobs)}] {word:<8} {time.monotonic() - began:4.0f} s  {job}",
                flush=True,
            )

    async with asyncio.TaskGroup() as group:
        for n in range(min(args.jobs, len(jobs))):
            group.create_task(worker(first if n == 0 else Copy(ROOT, names, folder / str(n))))
    if survivors:
        print("\nNone of its tests notices (are there others? name them with --tests):")
    for job in sorted(survivors, key=jobs.index):
        print(f"  {job}{'' if job.tests else '  (no tests were found)'}")
    print(
        f"\n{len(jobs) - len(survivors)} of {len(jobs)} mutants noticed, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if survivors else 0


async def work(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    modules = choose_mutants(args)
    if not modules:
        print("no guard and no effect in these lines")
        return 0
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as folder:
        try:
            return await judge(args, modules, Path(folder), mark)
        finally:
            await kill_marked(mark)  # what a cancelled start may have left


def line_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="all lines of these files (with --since, changed ones)",
    )
    p.add_argument(
        "--since",
        metavar="REV",
        help="lines that changed since this branch left REV (default: main)",
    )
    p.add_argument(
        "--tests",
        nargs="+",
        metavar="PATH",
        help="test files, folders or ids (default: found by imports)",
    )
    p.add_argument(
        "--lines", type=line_range, metavar="A-B", help="these lines of the one file that is named"
    )
    p.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="mutants at a time (default: 1)"
    )
    p.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="of a mutant's tests (default: 30 + 3 times without one)",
    )
    args = p.parse_args()
    if args.lines and len(args.files) != 1:
        p.error("--lines needs one FILE")
    try:
        return asyncio.run(work(args))
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143


if __name__ == "__main__":
    sys.exit(main())

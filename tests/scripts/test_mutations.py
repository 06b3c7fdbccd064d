"""`scripts/mutations.py`: which mutants it makes of a source, which lines and tests it takes, that
it leaves no process behind, and all of it in a small repository."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts import mutations
from scripts.mutations import (
    Copy,
    added_lines,
    changes_since,
    default_base,
    find_tests,
    git,
    imported_modules,
    kill_marked,
    mutants,
    run,
    seconds_of,
)

ROOT = Path(__file__).resolve().parents[2]


def changes(source: str, *lines: int) -> list[tuple[int, str]]:
    return [(m.line, m.change) for m in mutants(source, set(lines) or None)]


def sources(source: str) -> list[str]:
    return [m.source for m in mutants(source)]


def test_a_guard_that_raises_is_removed() -> None:
    assert sources("if a and b:\n    raise X\nf = 1\n") == ["if False:\n    raise X\nf = 1\n"]


def test_a_guard_that_leaves_is_tried_both_ways() -> None:
    for word in ("return", "continue", "break"):
        source = f"def f():\n    while c:\n        if a:\n            {word}\n"
        assert sources(source) == [
            source.replace("if a", "if False"),
            source.replace("if a", "if True"),
        ]


def test_an_elif_is_a_guard() -> None:
    assert changes("if a:\n    b = 1\nelif c:\n    raise X\n") == [(3, "condition is False")]


def test_an_if_that_goes_on_is_none() -> None:
    assert changes("if a:\n    b = 1\n") == []


def test_no_mutant_is_the_source_itself() -> None:
    assert changes("if False:\n    raise X\n") == []


def test_a_raise_behind_other_statements_is_removed() -> None:
    assert sources("try:\n    a = 1\nexcept E:\n    b = 1\n    raise\n") == [
        "try:\n    a = 1\nexcept E:\n    b = 1\n    pass\n"
    ]


def test_calls_for_their_effect_and_del_are_removed() -> None:
    assert sources("a.close()\n") == ["pass\n"]
    assert sources("async def f():\n    await a.close(\n        1\n    )\n") == [
        "async def f():\n    pass\n"
    ]
    assert sources("del a[0]\n") == ["pass\n"]
    assert changes("b = a.close()\n'text'\n") == []


def test_lines_of_logs_stay() -> None:
    assert changes("log.info('a')\nlogging.getLogger('a').error('b')\n") == []


def test_finally_is_emptied_once() -> None:
    source = "try:\n    a = 1\nfinally:\n    b.close()\n"
    assert changes(source) == [(4, "`finally` does nothing")]
    assert sources(source) == [source.replace("b.close()", "pass")]
    assert [line for line, _ in changes(source.replace("b.close()", "b.close()\n    c()"))] == [
        4,
        4,
        5,
    ]


@pytest.mark.parametrize(("old", "new"), [("<", "<="), ("<=", "<"), (">", ">="), (">=", ">")])
def test_comparisons_move_by_one(old: str, new: str) -> None:
    assert sources(f"x = a {old} b\n") == [f"x = a {new} b\n"]


def test_each_comparison_of_a_chain_moves() -> None:
    assert sources("x = 0 <= (a) < f(b)\n") == ["x = 0 < (a) < f(b)\n", "x = 0 <= (a) <= f(b)\n"]
    assert changes("x = a == b is not c\n") == []


def test_positions_are_those_of_utf8() -> None:
    assert sources("x = 'höö' < 'ß'; ä.close()\n") == [
        "x = 'höö' <= 'ß'; ä.close()\n",
        "x = 'höö' < 'ß'; pass\n",
    ]


def test_only_lines_that_changed() -> None:
    source = (
        "if a:\n    b = 1\n    raise X\nc.close()\nx = d < e\ntry:\n    x = 1\nfinally:\n    x = "
        "2\n    y = 3\n"
    )
    assert changes(source, 2, 7) == []
    assert changes(source, 1) == [(1, "condition is False")]
    assert changes("if a:\n    raise X\n", 2) == [(1, "condition is False")]
    assert changes(source, 4) == [(4, "call removed")]
    assert changes(source, 5) == [(5, "`<` is `<=`")]
    assert changes(source, 10) == [(9, "`finally` does nothing")]


def test_mutants_of_a_real_module_differ_and_are_python() -> None:
    source = (ROOT / "scripts" / "mutations.py").read_text(encoding="utf-8")
    made = sources(source)
    assert len(set(made)) == len(made) > 20
    assert source not in made
    for text in made:
        compile(text, "mutant", "exec")


def test_lines_of_a_diff() -> None:
    hunks = [
        "@@ -3 +3,2 @@ def f",
        "-x",
        "+y",
        "+@@ -1 +90 @@",
        "@@ -9,2 +9,0 @@",
        "@@ -20,0 +21 @@",
    ]
    diff = "\n".join(["--- a", "+++ b", *hunks, ""])
    assert added_lines(diff) == {3, 4, 21}


def test_lines_that_changed_since_the_branch_left_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    (tmp_path / "stretto").mkdir()

    def commit(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        git("add", ".")
        git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", name)
        return git("rev-parse", "HEAD").strip()

    git("init", "-q", "-b", "main")
    commit("stretto/a.py", "a\nb\nc\n")
    on_main = commit("stretto/b.py", "a\n")
    assert default_base() == "HEAD~1"
    assert changes_since("HEAD~1", []) == {"stretto/b.py": {1}}
    git("checkout", "-qb", "work")
    commit("stretto/a.py", "a\nB\nc\n")
    assert default_base() == on_main
    (tmp_path / "stretto" / "a.py").write_text("a\nB\nc\nd\n")
    (tmp_path / "stretto" / "b.py").unlink()
    for name in ("stretto/new.py", "stretto/c.txt", "other.py"):
        (tmp_path / name).write_text("a\n")
    assert changes_since(on_main, []) == {"stretto/a.py": {2, 4}, "stretto/new.py": None}
    assert changes_since(on_main, ["other.py"]) == {"other.py": None}
    with pytest.raises(SystemExit, match=r"git merge-base: fatal: .*nowhere"):
        git("merge-base", "nowhere", "HEAD")


def test_imports() -> None:
    assert imported_modules("import a.b\nfrom c.d import e as f, g\nfrom . import h\n") == {
        "a.b", "c.d", "c.d.e", "c.d.g",
    }  # fmt: skip


def test_tests_mirror_or_import_the_module(tmp_path: Path) -> None:
    def write(name: str, text: str = "") -> None:
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("server/test_loop_time.py")
    write("server/http/test_body.py", "x = 1")
    write("test_other.py", "x = 1  # a comment\nfrom stretto.server import loop_time\n")
    write("other/test_any.py", "import stretto.server.loop_time\n")
    write("other/test_near.py", "import stretto.server.loop_timer\n")
    write("other/test_server_loop_time.py")
    write(
        "help/conftest.py",
        "from stretto.server.http.body import Body\nfrom stretto.server.app import App\n",
    )
    write("help/test_by_help.py")
    found = find_tests("stretto/server/loop_time.py", tmp_path)
    assert found == [
        "tests/other/test_server_loop_time.py", "tests/server/test_loop_time.py",
        "tests/other/test_any.py", "tests/test_other.py",
    ]  # fmt: skip
    assert find_tests("stretto/server/http/body.py", tmp_path) == ["tests/server/http/test_body.py"]
    assert find_tests("stretto/server/app.py", tmp_path) == [
        "tests/help/test_by_help.py", "tests/server/test_loop_time.py",
    ]  # fmt: skip
    for n in range(20):
        write(f"many/test_{n}.py", "import stretto.many\n")
    assert len(find_tests("stretto/many.py", tmp_path)) == mutations.MAX_TEST_FILES


def test_seconds_are_of_files_that_pass() -> None:
    cases = ET.fromstring(
        """<testsuites><testsuite>
        <testcase file="tests/a/test_good.py" name="x" time="1.5"/>
        <testcase file="tests/a/test_good.py" name="y" time="2"><skipped/></testcase>
        <testcase file="tests/a/test_skipped.py" name="z" time="0"><skipped/></testcase>
        <testcase file="tests/b/test_bad.py" name="x" time="1"/>
        <testcase file="tests/b/test_bad.py" name="y" time="1"><failure/></testcase>
        <testcase classname="" name="tests.c.test_broken" time="0"><error/></testcase>
        </testsuite></testsuites>"""
    )
    assert seconds_of("tests/a/test_good.py", cases) == 3.5
    assert seconds_of("tests/a/test_good.py::x", cases) == 3.5
    assert seconds_of("tests/a/", cases) == 3.5
    for test in (
        "tests/a/test_skipped.py",
        "tests/b",
        "tests/b/test_bad.py",
        "tests/c",
        "tests/d",
        "tests/a/test_goo",
    ):
        assert seconds_of(test, cases) is None


def test_a_copy_is_apart_from_the_tree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "small.py").write_text("x = 1\n")
    (root / "large").write_bytes(bytes(mutations.LINK_BYTES + 1))
    copy = Copy(root, ["a/small.py", "large"], tmp_path / "copy")
    assert (copy.tree / "large").resolve() == root / "large"
    times = set()
    for source in ("x = 2\n", "x = 1\n", "x = 3\n"):
        copy.write("a/small.py", source)
        assert (copy.tree / "a" / "small.py").read_text() == source
        times.add((copy.tree / "a" / "small.py").stat().st_mtime)
    assert (root / "a" / "small.py").read_text() == "x = 1\n"
    assert len(times) == 3  # so that none runs with another's bytecode
    assert all(time < 1000 for time in times)


# A child says "alive" into the pipe, unless it is killed while it sleeps: with the pipe's end, both
# are known.
LEFT = "sleep 3; echo alive >&3"


class Shell:
    """Runs shell commands; what they leave writes into a pipe, which they have as descriptor 3. The
    other pipe, `ready`, lets a command wait until its child runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pipe = folder / "pipe"
        os.mkfifo(self._pipe)
        os.mkfifo(folder / "ready")
        self._reader = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)

    async def run(self, command: str, limit: float | None) -> int | None:
        words = ["sh", "-c", f"exec 3>'{self._pipe}'; {command}"]
        return await run(
            words, self.folder, dict(os.environ), "mark.1.", limit, self.folder / "output"
        )

    def read(self) -> bytes:
        os.set_blocking(self._reader, True)
        with open(self._reader, "rb") as reader:
            return reader.read()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_the_status_and_the_output_are_those_of_the_command(shell: Shell) -> None:
    assert asyncio.run(shell.run("echo words; exit 3", None)) == 3
    assert (shell.folder / "output").read_text() == "words\n"


def test_a_process_that_is_left_in_the_group_is_killed(shell: Shell) -> None:
    assert (
        asyncio.run(shell.run(f"env -i PATH=$PATH sh -c ': > ready; {LEFT}' & : < ready", None))
        == 0
    )
    assert shell.read() == b""


@pytest.mark.skipif(shutil.which("setsid") is None, reason="no setsid")
def test_a_process_with_a_session_of_its_own_is_killed(shell: Shell) -> None:
    assert asyncio.run(shell.run(f"setsid sh -c ': > ready; {LEFT}' & : < ready", None)) == 0
    assert shell.read() == b""


def test_a_command_that_hangs_is_ended(shell: Shell) -> None:
    assert asyncio.run(shell.run(LEFT, 0)) is None
    assert shell.read() == b""


def test_a_command_that_is_interrupted_is_ended(shell: Shell) -> None:
    async def interrupt() -> None:
        task = asyncio.create_task(shell.run(f"echo begun >&3; {LEFT}", None))
        reader = shell._reader
        begun = asyncio.Event()
        asyncio.get_running_loop().add_reader(reader, begun.set)
        await begun.wait()
        asyncio.get_running_loop().remove_reader(reader)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(interrupt())
    assert shell.read() == b"begun\n"


def test_processes_of_another_run_are_not_killed() -> None:
    async def other() -> int:
        env = {**os.environ, mutations.MARK: "mark.12."}
        command = ["sh", "-c", "read line; exit 7"]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, env=env
        )
        await kill_marked("mark.1.")
        await process.communicate(b"line\n")
        return await process.wait()

    assert asyncio.run(other()) == 7


def test_ranges_of_lines() -> None:
    assert list(mutations.line_range("3-5")) == [3, 4, 5]
    assert list(mutations.line_range("7")) == [7]


def test_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"{tmp_path}: no file of this repository")):
        mutations.repository_path(str(tmp_path))


MODULE = """\
def first(items):
    if not items:
        return None
    return items[0]


def old(items):
    items.clear()
"""
CHANGED = MODULE.replace(
    "    return items[0]",
    "    items.sort()\n    if items[0] < 0:\n        raise ValueError\n    return items[0]",
)
TESTS = """\
import pytest
from stretto.items import first

def test_first():
    assert first([2, 3]) == 2
    with pytest.raises(ValueError):
        first([-1])
"""


def test_a_small_repository(tmp_path: Path) -> None:
    def command(*words: str, status: int = 0) -> str:
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    for name in ("scripts", "stretto", "tests"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "scripts" / "mutations.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "stretto" / "__init__.py").write_text("")
    (tmp_path / "stretto" / "items.py").write_text(MODULE)
    (tmp_path / "tests" / "test_items.py").write_text(TESTS)
    command("git", "init", "-q")
    command("git", "add", ".")
    command("git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "Begin")
    (tmp_path / "stretto" / "items.py").write_text(CHANGED)
    printed = command(sys.executable, "scripts/mutations.py", "--since", "HEAD", status=1)
    results = re.findall(r"^\[./3\] (\w+) .*items\.py:(\d+)  (.*?):", printed, re.MULTILINE)
    assert results == [
        ("SURVIVES", "4", "call removed"),
        ("noticed", "5", "condition is False"),
        ("SURVIVES", "5", "`<` is `<=`"),
    ]
    assert "  stretto/items.py:4  call removed:  items.sort()\n" in printed
    assert "1 of 3 mutants noticed" in printed
    assert (tmp_path / "stretto" / "items.py").read_text() == CHANGED
    (tmp_path / "tests" / "test_items.py").write_text(
        TESTS.replace("[2, 3]", "[3, 0, 2]").replace("== 2", "== 0")
    )
    printed = command(sys.executable, "scripts/mutations.py", "stretto/items.py", "--lines", "4")
    assert "1 of 1 mutants noticed" in printed

"""What a recorder sees of a program: lines of functions, while it is on, in all threads and
processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.path import arithmetic, collect, of_file, recorder, totals

PROGRAM = """
import os, sys, threading
from pathlib import Path

ON = Path(sys.argv[1])


def before():
    return 1


def waiting(begin, end):
    begin.wait()
    after = 1
    end.set()


def child():
    number = 3
    os._exit(number)


class Thing:
    def method(self):
        if sys.argv[1]:
            return 1
        return 2


before()
begin, end = threading.Event(), threading.Event()
threading.Thread(target=waiting, args=(begin, end), name="helper").start()
with ON.open("r+b", buffering=0) as flag:
    flag.write(bytes([1]))
    begin.set()
    end.wait()
    Thing().method()
    if (pid := os.fork()) == 0:
        Thing().method()
        child()
    os.waitpid(pid, 0)
    flag.seek(0)
    flag.write(bytes([0]))
before()
"""


def line_of(text: str) -> int:
    return PROGRAM.splitlines().index(text) + 1


@pytest.mark.parametrize("forced", [False, True], ids=["here", "by settrace"])
def test_lines_that_run_while_it_is_on(tmp_path: Path, forced: bool) -> None:
    site, package = tmp_path / "site", tmp_path / "package"
    site.mkdir()
    package.mkdir()
    shutil.copy(recorder.__file__, site / "sitecustomize.py")
    if forced:
        text = (
            (site / "sitecustomize.py")
            .read_text()
            .replace('getattr(sys, "monitoring", None)', "None")
        )
        (site / "sitecustomize.py").write_text(text)
    (tmp_path / recorder.ON).write_bytes(b"\0")
    program = package / "stretto.preprocess.pool.worker.py"  # by its command line, a worker
    program.write_text(PROGRAM)
    names = {
        recorder.FOLDER: str(tmp_path),
        recorder.SOURCES: str(package),
        "PYTHONPATH": str(site),
    }
    command = [sys.executable, str(program), str(tmp_path / recorder.ON)]
    subprocess.run(command, env={**os.environ, **names}, check=True)

    ran, threads, processes = collect(tmp_path)
    [(name, lines)] = ran.items()
    found = {number: set(roles) for number, roles in lines.items()}
    assert found == {
        line_of("    after = 1"): {"prompt worker"},
        line_of("    end.set()"): {"prompt worker"},
        line_of("        if sys.argv[1]:"): {"prompt worker", "prompt job"},
        line_of("            return 1"): {"prompt worker", "prompt job"},
        line_of("    number = 3"): {"prompt job"},
        line_of("    os._exit(number)"): {"prompt job"},
    }
    assert threads == {name: {"prompt worker", "prompt worker/helper", "prompt job"}}
    assert processes == {"prompt worker": 1, "prompt job": 1}

    file = of_file(program, lines, threads[name])
    assert file["functions"] == ["Thing.method", "child", "waiting"]
    assert file["classes"] == ["Thing"]
    assert (file["ran"], file["to_read"], file["lines"]) == (
        6,
        4 + 3 + 4,
        len(PROGRAM.splitlines()),
    )
    assert totals({"a/x.py": file, "b/y.py": file}) == {
        "files": 2, "packages": 2, "functions": 6, "classes": 2, "ran": 12, "to_read": 22,
        "lines": 2 * file["lines"],
    }  # fmt: skip


def test_layers_and_kernels_are_left_out_of_one_total() -> None:
    assert [
        arithmetic(name)
        for name in ("layers/mlp.py", "kernels/triton/compile_ahead.py", "stage/host/host.py")
    ] == [
        True,
        True,
        False,
    ]

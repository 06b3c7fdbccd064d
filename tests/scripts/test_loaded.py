"""`scripts/loaded.py` on a small suite: it counts, names what failed, and leaves no busy loop."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import loaded

SUITE = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="")
def test_is_skipped(): pass
"""

ALONE = """
import socket
from pathlib import Path
def test_nobody_else_is_here():
    file = Path("/dev/shm/stretto-test-of-loaded")
    assert not file.exists()
    file.touch()
    everybody = [p for p in Path("/proc").iterdir() if p.name.isdigit()]
    assert len(everybody) < 10
    listener = socket.create_server(("127.0.0.1", 1))
    socket.create_connection(("127.0.0.1", 1))
"""


def namespaces() -> bool:
    """A container may refuse them even to root."""
    command = [*loaded.OWN_NAMESPACES, "true"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, check=False).returncode
    )


@pytest.mark.skipif(os.geteuid() != 0 or not namespaces(), reason="makes namespaces, as root")
def test_runs_beside_each_other_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(ALONE)
    args = ["-p", "no:cacheprovider", "-n", "0", "-c", "/dev/null", str(tmp_path)]
    found = loaded.run(args, 0, together=2)
    assert [(one["status"], one["tests"]) for one in found] == [(0, 1), (0, 1)], found
    assert not Path("/dev/shm/stretto-test-of-loaded").exists()


def test_a_run_is_counted_and_its_failures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = loaded.subprocess.Popen

    def start(*args: object, **more: object) -> object:
        started.append(process := popen(*args, **more))  # type: ignore[call-overload]
        return process

    monkeypatch.setattr(loaded.subprocess, "Popen", start)
    (tmp_path / "test_small.py").write_text(SUITE)
    args = ["-p", "no:cacheprovider", "-n", "0", "-c", "/dev/null", str(tmp_path)]
    [found] = loaded.run(args, 1)
    assert (found["status"], found["tests"], found["skipped"]) == (1, 3, 1)
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_fails"]
    loops = [process for process in started if process.args[-1] == loaded.BUSY]
    assert len(loops) == 1
    assert loops[0].returncode is not None


def test_a_run_that_wrote_no_report_has_no_tests(tmp_path: Path) -> None:
    assert loaded.outcomes(tmp_path / "none.xml")["tests"] == 0

"""Runs `stretto` as a user does, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STRETTO = [sys.executable, "-m", "stretto"]


def run_stretto(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STRETTO, *map(str, words)], capture_output=True, text=True, check=False)


def check_error(done: subprocess.CompletedProcess[str], says: str, code: int | None = None) -> None:
    assert done.returncode != 0
    assert code is None or done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr

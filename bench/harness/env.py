"""What a result was measured on: the state of the sources, the machine, the versions and the
command.

On a machine that has a copy of the sources but not their repository, the file COMMIT in their root
says what git would: the commit in its first line, then a line per changed file, none if the tree
was clean. It takes precedence over any repository that is there. Write it where the real repository
is, and delete it after the copy was used:

    git rev-parse HEAD > COMMIT; git status --porcelain -- . ':!bench/results' >> COMMIT"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.harness.results import ROOT

PACKAGES = ("triton", "transformers", "numpy", "msgspec", "starlette", "uvicorn", "pyzmq")


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def sources(root: Path = ROOT) -> dict[str, Any]:
    """The commit, and whether anything but results of benchmarks differed from it. None: not
    known."""
    commit = changed = None
    if (root / "COMMIT").exists():
        commit, _, changed = (root / "COMMIT").read_text(encoding="utf-8").partition("\n")
    elif (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", ".", ":!bench/results")
    return {
        "commit": commit.strip()[:12] if commit and commit.strip() else None,
        "clean": None if changed is None else not changed.strip(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def command() -> str:
    """As it was given, with files by their names alone."""
    program = Path(sys.argv[0]).resolve()
    inside = program.name == "__main__.py" and program.is_relative_to(ROOT)
    package = ".".join(program.parent.relative_to(ROOT).parts) if inside else "bench"
    return re.sub(r"\S*/", "", " ".join([f"python -m {package}", *sys.argv[1:]]))


def describe() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **sources(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
        "gpu": None
        if gpu is None
        else {"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # how busy the machine was just before
        "command": command(),
    }

"""What a release is made of is built, installed into a clean environment and asked a question
there, by the script of the release workflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_wheels_work_where_nothing_else_is(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="`make setup-test` installs it")
    for folder, targets in ((ROOT, ("wheel", "sdist")), (ROOT / "packages" / "nano", ("wheel",))):
        names = [word for target in targets for word in ("-t", target)]
        command = [sys.executable, "-m", "hatchling", "build", *names, "-d", str(tmp_path)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    shared = Path(np.__file__).parents[1]
    command = [sys.executable, str(ROOT / "scripts" / "check_release.py"), str(tmp_path)]
    done = subprocess.run(
        [*command, "--shared", str(shared)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s of speech" in done.stdout


def test_the_workflow_checks_what_it_publishes() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert set(jobs["publish"]["needs"]) == {"check", "image"}
    for job in ("check", "image"):
        commands = [step.get("run", "") for step in jobs[job]["steps"]]
        assert any("scripts/check_release.py" in command for command in commands), job
        assert jobs[job]["needs"] == "build"
    tested = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    assert jobs["check"]["strategy"]["matrix"] == tested["strategy"]["matrix"]
    supported = [
        line.split("::")[-1].strip(' ",')
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if "Programming Language :: Python :: 3." in line
    ]
    assert tested["strategy"]["matrix"]["python"] == supported

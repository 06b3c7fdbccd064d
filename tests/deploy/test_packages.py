"""Which packages and images are used: exact versions of all that runs in the image, and digests of
images."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
DIGESTS = ROOT / "scripts" / "digests.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIGEST = "sha256:" + "0123456789abcdef" * 4


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def test_constraints_are_names_and_versions_alone() -> None:
    """No address, no path, no build of somebody's own."""
    for line in CONSTRAINTS.read_text().splitlines():
        assert line.startswith("# ") or re.fullmatch(
            r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line
        ), line
        assert "/" not in line.replace("deploy/constraints.txt", "").replace(
            "scripts/constraints.py", ""
        ), line
    names = [
        line.partition("==")[0]
        for line in CONSTRAINTS.read_text().splitlines()
        if not line.startswith("#")
    ]
    assert len(names) == len(set(names))
    assert "torch" not in names, "its build is chosen by hand"


@pytest.mark.parametrize("extra", ["", "video", "ray"])
def test_every_dependency_of_the_image_has_a_version_that_fits(extra: str) -> None:
    stated = versions()
    for word in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        need = Requirement(word)
        if need.name != "torch":
            assert Version(stated[normal(need.name)]) in need.specifier, word


def test_versions_with_known_holes_are_not_taken() -> None:
    needs = {normal(r.name): r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert "3.1.5" not in needs["jinja2"]  # its sandbox could be left
    assert "0.49.0" not in needs["starlette"]  # a Range header could cost quadratic time


def test_digests_are_put_behind_tags(tmp_path: Path) -> None:
    for name in ("Containerfile", "compose.yaml"):
        (tmp_path / name).write_text((ROOT / "deploy" / name).read_text())
    resolver = tmp_path / "resolver"
    resolver.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/asked\necho {DIGEST}\n")
    resolver.chmod(0o755)
    command = [sys.executable, str(DIGESTS), "--folder", str(tmp_path), "--resolver", str(resolver)]
    for _ in range(2):  # a newer digest takes the place of the one that is there
        subprocess.run(command, check=True, capture_output=True)
        base = re.findall(r"^ARG BASE=(.*)$", (tmp_path / "Containerfile").read_text(), re.M)
        assert base == [f"docker.io/library/python:3.12-slim-bookworm@{DIGEST}"]
        images = re.findall(
            r"^    image: (docker\.io/\S+)$", (tmp_path / "compose.yaml").read_text(), re.M
        )
        assert len(images) == 2
        assert all(re.fullmatch(rf"docker\.io/[\w/]+:v?[\d.]+@{DIGEST}", image) for image in images)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 6
    assert not any("@" in name for name in asked)


def test_without_a_digest_nothing_is_changed(tmp_path: Path) -> None:
    for name in ("Containerfile", "compose.yaml"):
        (tmp_path / name).write_text((ROOT / "deploy" / name).read_text())
    command = [
        sys.executable,
        str(DIGESTS),
        "--folder",
        str(tmp_path),
        "--resolver",
        "echo nothing for",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no digest" in done.stderr
    for name in ("Containerfile", "compose.yaml"):
        assert (tmp_path / name).read_text() == (ROOT / "deploy" / name).read_text()

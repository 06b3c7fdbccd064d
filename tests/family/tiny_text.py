"""`examples/family` as if it were installed: its folder on the path, and the metadata that pip
would write of its pyproject.toml."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "examples" / "family"


def write_metadata(folder: Path) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def put_on_path(folder: Path) -> list[str]:
    """Of this process; returns the folders, for the path of others."""
    write_metadata(folder)
    folders = [str(PROJECT), str(folder)]
    sys.path[:0] = folders
    return folders

"""Exact versions of all that `stretto` needs to run, as they are in this environment:
deploy/constraints.txt.

    .venv/bin/python scripts/constraints.py            # writes the file
    .venv/bin/python scripts/constraints.py --check    # does it say what is installed here?

The environment is the one in which the tests ran, so these are versions that were tested together.
What an extra of the image needs and is not installed here (Ray) is resolved by pip, which installs
nothing, against the versions that are; those lines stand apart. torch is left out: its build is
chosen by hand (TORCH in scripts/setup.sh and the image), and it names the exact versions of CUDA's
libraries itself."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "deploy" / "constraints.txt"
EXTRAS = ("video", "otel", "ray")  # of the image
CHOSEN = {"torch", "stretto"}
HEAD = """\
# Versions that the tests ran with (Python {python}), for the image: pip install --constraint deploy/constraints.txt
# Written by scripts/constraints.py. torch is chosen apart from these.
"""  # noqa: E501
RESOLVED = (
    "# For the extra `ray`, which was not installed there: as pip resolves it beside the others.\n"
)


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [word for extra in EXTRAS for word in project["optional-dependencies"][extra]]
    return [Requirement(word) for word in (*project["dependencies"], *extras)]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str) -> str:
    """Without what a build adds to it (+cpu)."""
    return version.partition("+")[0]


def installed(requirements: Iterable[Requirement]) -> tuple[dict[str, str], list[Requirement]]:
    """Versions of these and of all that they need in turn; and those that are not here."""
    versions: dict[str, str] = {}
    missing: list[Requirement] = []
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    while todo:
        need = todo.pop()
        key = normal(need.name), frozenset(need.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = metadata.distribution(need.name)
        except metadata.PackageNotFoundError:
            missing.append(need)
            continue
        versions[key[0]] = public(found.version)
        todo += needs(found, need.extras)
    return {name: v for name, v in versions.items() if name not in CHOSEN}, missing


def needs(found: metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    for word in found.requires or ():
        need = Requirement(word)
        if need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield need


def resolved(missing: Iterable[Requirement], versions: dict[str, str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
        constraints.write_text(lines(versions))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        names = [str(need) for need in missing]
        subprocess.run(
            [*pip, "--report", str(report), "--constraint", str(constraints), *names], check=True
        )
        found = json.loads(report.read_text())["install"]
    all_of_them = {normal(f["metadata"]["name"]): public(f["metadata"]["version"]) for f in found}
    return {
        name: v for name, v in all_of_them.items() if name not in versions and name not in CHOSEN
    }


def lines(versions: dict[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def read(text: str) -> dict[str, str]:
    found = [
        line.partition("==") for line in text.splitlines() if line and not line.startswith("#")
    ]
    return {name: version for name, _, version in found}


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--check", action="store_true")
    args = p.parse_args()
    versions, missing = installed(wanted())
    if args.check:
        stated = read(FILE.read_text())
        wrong = {
            name: (stated.get(name), v) for name, v in versions.items() if stated.get(name) != v
        }
        for name, (there, here) in sorted(wrong.items()):
            print(f"{name}: {FILE.name} has {there}, this environment {here}")
        return 1 if wrong else 0
    text = HEAD.format(python=".".join(platform.python_version_tuple()[:2])) + lines(versions)
    if missing:
        text += RESOLVED + lines(resolved(missing, versions))
    FILE.write_text(text)
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

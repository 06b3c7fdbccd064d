"""An environment for each client, with its newest version, and what runs in it."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.slow.clients.cases import ClientCase

FORBIDDEN = ("torch", "tensorflow")  # no client needs one
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NODE_OPTIONS")


class CannotInstall(Exception):
    """What pip or npm said last."""


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    case: ClientCase
    folder: Path

    def install(self) -> None:
        """Nothing, if it is there from before."""
        if not (self.folder / "installed").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.case.tool == "pip":
                self._pip()
            else:
                self._npm()
            (self.folder / "installed").touch()

    def _pip(self) -> None:
        venv.create(self.folder, with_pip=True, symlinks=True)
        install = [str(self.python), "-m", "pip", "install", "--quiet", "--no-compile", "--upgrade"]
        _run([*install, *self.case.packages], self.folder)
        found = _run([str(self.python), "-m", "pip", "list", "--format=json"], self.folder)
        names = {p["name"].lower() for p in json.loads(found)}
        if bad := names & set(FORBIDDEN):
            raise CannotInstall(f"it brings {', '.join(sorted(bad))}")

    def _npm(self) -> None:
        (self.folder / "package.json").write_text('{"private": true, "type": "module"}')
        install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        # With a Node.js of its own: npm takes older versions where that of the system is too old.
        _run([*install, *(f"{p}@latest" for p in (*self.case.packages, "node"))], self.folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def version(self) -> str:
        if self.case.tool == "npm":
            package = self.folder / "node_modules" / self.case.package / "package.json"
            return str(json.loads(package.read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({self.case.package!r}))"
        return _run([str(self.python), "-c", code], self.folder).strip()

    def command(self, program: Path) -> list[str]:
        """A JavaScript program runs from within the folder, where its packages are found."""
        if self.case.tool == "pip":
            return [str(self.python), str(program)]
        copy = self.folder / program.name
        copy.write_text(program.read_text(encoding="utf-8"), encoding="utf-8")
        return [str(self.folder / "node_modules" / ".bin" / "node"), str(copy)]

    def variables(self, certificate: Path | None) -> dict[str, str]:
        """Of this process, without what would bring our packages in."""
        kept = {k: v for k, v in os.environ.items() if k not in OURS}
        return kept | ({"NODE_EXTRA_CA_CERTS": str(certificate)} if certificate else {})


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotInstall("\n".join((done.stderr or done.stdout).splitlines()[-5:]))
    return done.stdout

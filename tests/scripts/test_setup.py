"""scripts/setup.sh chooses a build of PyTorch and says where it cannot run. It runs as it is, in a
folder whose pip and Python write down what they are called with."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"
CPU = "https://download.pytorch.org/whl/cpu"
PIP = """#!/bin/bash
case "$*" in
  freeze*) echo torch==2.13.0+cpu ;;
  *) echo "$*" >> "$HERE/pip" ;;
esac
case "$*" in *"$REFUSED") exit 1 ;; esac
"""


@dataclass(frozen=True)
class Project:
    folder: Path

    def setup(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        usual = {"HERE": str(self.folder), "REFUSED": "nothing", "REACHABLE": "yes", "PATH": path}
        return subprocess.run(
            [str(self.folder / "scripts" / "setup.sh"), *words],
            env={"HOME": str(self.folder), **usual, **env},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def installed(self) -> list[str]:
        """The arguments of `pip install`, and of other commands of pip."""
        lines = (self.folder / "pip").read_text().splitlines()
        (self.folder / "pip").unlink()
        return [line.removeprefix("install --disable-pip-version-check ") for line in lines]

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SETUP, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]")
    it = Project(tmp_path)
    it.program(".venv/bin/pip", PIP)
    it.program(".venv/bin/python", '#!/bin/bash\n[ "$REACHABLE" = yes ]\n')
    it.program("bin/nvidia-smi", "#!/bin/bash\nexit 9\n")
    return it


no_gpu = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists(),
    reason="for machines without a GPU",
)


@no_gpu
def test_without_a_gpu_it_is_the_build_for_the_cpu(project: Project) -> None:
    done = project.setup()
    assert done.returncode == 0, done.stderr
    torch, package = project.installed
    assert torch == f"--extra-index-url {CPU} torch==2.13.0+cpu"
    assert package.endswith("-e .[video,talk]")
    assert "--quiet" not in torch + package  # pip shows how far it is
    assert (project.folder / ".venv/stamps/constraint").read_text() == "torch==2.13.0+cpu\n"
    assert project.setup().returncode == 0
    assert not (project.folder / "pip").exists()  # nothing twice


@no_gpu
def test_without_pytorchs_index_it_is_the_build_that_there_is(project: Project) -> None:
    """A mirror, or a folder of wheels, may have the build for the CPU too."""
    assert project.setup(REACHABLE="no").returncode == 0
    assert project.installed[0] == "torch==2.13.0+cpu"


@no_gpu
def test_without_any_build_for_the_cpu_it_says_what_comes(project: Project) -> None:
    done = project.setup(REACHABLE="no", REFUSED="+cpu")
    assert done.returncode == 0
    assert project.installed[:2] == ["torch==2.13.0+cpu", "torch==2.13.0"]
    assert "6 GB on disk" in done.stderr


def test_with_a_gpu_it_is_the_build_with_cuda(project: Project) -> None:
    project.program("bin/nvidia-smi", "#!/bin/bash\necho GPU 0\n")
    assert project.setup().returncode == 0
    assert project.installed[0] == "torch==2.13.0"


def test_a_gpu_that_came_later_gets_its_build(project: Project) -> None:
    (project.folder / ".venv/stamps").mkdir()
    (project.folder / ".venv/stamps/torch").write_text("torch==2.13.0+cpu\n")
    project.program("bin/nvidia-smi", "#!/bin/bash\necho GPU 0\n")
    assert project.setup().returncode == 0
    assert project.installed[:2] == ["uninstall --yes --quiet torch", "torch==2.13.0"]


def test_another_build_can_be_named(project: Project) -> None:
    assert project.setup(TORCH=f"torch==2.11.0 --index-url {CPU}").returncode == 0
    assert project.installed[0] == f"torch==2.11.0 --index-url {CPU}"


@pytest.mark.parametrize("system", ["Darwin", "MINGW64_NT-10.0"])
def test_on_another_system_it_names_the_container(project: Project, system: str) -> None:
    project.program("bin/uname", f"#!/bin/bash\necho {system}\n")
    done = project.setup()
    assert done.returncode == 1
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"Stretto runs on Linux; here (on {system}) use WSL2 or a container")
    assert "docker run --rm -p 127.0.0.1:8000:8000 stretto:cpu" in sentence
    assert not (project.folder / "pip").exists()


def test_an_old_python_is_named(project: Project) -> None:
    project.program("bin/python3", "#!/bin/bash\nexit 1\n")
    done = project.setup()
    assert done.returncode == 1
    assert done.stderr.startswith("stretto needs Python 3.11 or newer, and python3 is not")


def test_the_site_needs_no_pytorch(project: Project) -> None:
    assert project.setup("docs", REACHABLE="no").returncode == 0
    assert project.installed == ["mkdocs-material>=9.8,<10"]

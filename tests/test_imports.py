"""Imports point down only: the package's graph is as docs/path.md says, and what must stay light or
ignorant is checked in a fresh interpreter."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto import registry


def loaded(module: str) -> set[str]:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("stretto.stage.scheduler.scheduler", {"torch"}),
        ("stretto.models.qwen3_omni.prompts", {"torch", "transformers"}),
        ("stretto.engine.engine", {"torch", "transformers", "stretto.stage.stage"}),
        ("stretto.server.app", {"torch", "transformers", "stretto.stage"}),
        ("stretto.cli", {"torch", "transformers"}),
        ("stretto.registry", {"torch", "transformers"}),
        ("stretto.cpu", {"torch"}),
        ("stretto.commands.talk", {"torch"}),
        ("stretto.commands.bench", {"torch", "httpx"}),
        ("stretto.transport.shm", {"stretto.models.qwen3_omni.thinker", "stretto.stage.stage"}),
        ("stretto.stage.host.process", {"transformers", "stretto.server"}),
        ("stretto.kernels.reference.paged", {"stretto.models", "stretto.stage"}),
    ],
)
def test_stays_out(module: str, never: set[str]) -> None:
    assert not loaded(module) & never


ROOT = Path(__file__).parent.parent


def imports() -> Iterator[tuple[str, str, str]]:
    """Each import between parts of the package: file, importing part, imported part. Those within
    functions too."""
    for path in sorted((ROOT / "stretto").rglob("*.py")):
        source = path.relative_to(ROOT / "stretto").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = (
                    [f"{node.module}.{a.name}" for a in node.names]
                    if node.module == "stretto"
                    else [node.module]
                )
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                parts = name.split(".")
                if (
                    parts[0] == "stretto"
                    and len(parts) > 1
                    and parts[1] not in (source, "__version__")
                ):
                    yield str(path.relative_to(ROOT)), source, parts[1]


def layers() -> dict[str, int]:
    """The parts of the package by their layer, the lowest first, as docs/path.md lists them."""
    [listed] = re.findall(
        r"```layers\n(.*?)```", (ROOT / "docs" / "path.md").read_text(), re.DOTALL
    )
    lines = [line.split("#")[0].split() for line in listed.splitlines()]
    return {part: i for i, line in enumerate(lines) for part in line}


def test_imports_follow_the_documented_layers() -> None:
    order = layers()
    found = {
        p.stem
        for p in (ROOT / "stretto").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found - {"__init__", "__main__"} == set(order), "docs/path.md lists every part"
    wrong = [
        f"{file}: {a} imports {b}"
        for file, a, b in imports()
        if a in order and order[b] >= order[a]
    ]
    assert not wrong
    # Families are found by name. Nothing that a server runs imports one.
    assert {a for _, a, b in imports() if b == "models"} <= {"testing"}
    assert not [file for file, _, b in imports() if b == "testing"]


CYCLES: set[frozenset[str]] = set()
"""Modules that import each other. The list only gets shorter."""


def import_graph() -> dict[str, set[str]]:
    """What each module of the package imports of it, within functions and for types too."""
    files = {}
    for path in sorted((ROOT / "stretto").rglob("*.py")):
        parts = path.relative_to(ROOT / "stretto").with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names.add(node.module)
                names |= {f"{node.module}.{a.name}" for a in node.names}
        inner = {name.removeprefix("stretto.") for name in names if name.startswith("stretto.")}
        graph[module] = inner & files.keys() - {module}
    return graph


def strongly_connected(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Tarjan's algorithm: groups of modules each of which reaches all others of its group."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            groups.add(frozenset(stack[at:]))
            del stack[at:]

    for module in graph:
        if module not in index:
            visit(module)
    return {group for group in groups if len(group) > 1}


def test_no_module_imports_itself_by_way_of_another_but_those_listed() -> None:
    found = strongly_connected(import_graph())
    assert not found - CYCLES, "a new import cycle"
    assert not CYCLES - found, "a cycle is gone: take it off the list"


def test_nothing_but_models_kernels_and_their_tests_names_a_model() -> None:
    for path in sorted((ROOT / "stretto").rglob("*.py")):
        if path.relative_to(ROOT / "stretto").parts[0] in ("models", "kernels", "testing"):
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):  # docstrings may have examples
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        assert not re.search(r"thinker|talker|code2wav|qwen", ast.unparse(tree), re.IGNORECASE), (
            path
        )


def test_families_are_found_by_what_their_packages_say() -> None:
    packages = {p.parent.name for p in (ROOT / "stretto" / "models").glob("*/family.py")}
    assert {name.split(".")[2] for name in registry.FAMILIES.values()} == packages
    assert {name.split(":")[0] for name in registry.TINY.values()} == {
        f"stretto.testing.{package}" for package in packages
    }


def test_the_server_needs_no_torch() -> None:
    modules = (
        "stretto.server.run, stretto.commands.serve, stretto.models.qwen3_omni.prompts, "
        "stretto.registry"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_test_modules_import_helpers_only() -> None:
    """What several of them need is in a module that is no test."""
    others = re.compile(r"^(?:from|import) (tests(?:\.\w+)*\.test_\w+)", re.MULTILINE)
    files = (Path(__file__).parent).rglob("*.py")
    found = {f.relative_to(ROOT).as_posix(): others.findall(f.read_text("utf-8")) for f in files}
    left = {"tests/engine/spoken.py", "tests/stage/test_steps.py", "tests/gpu/test_graphs.py"}
    assert {file: names for file, names in found.items() if names and file not in left} == {}

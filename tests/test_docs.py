"""Documents name what is there: files, and words of the code in backticks."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from stretto.cli import parser

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "stretto",
    "tests",
    "bench",
    "examples",
    "recipes",
    "scripts",
    "deploy",
    "packages",
    "docs",
)
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CODE = (".py", ".toml", ".yaml", ".sh", ".js", ".html", ".service")
GENERATED = re.compile(
    r"STRETTO_\w+|\w*_(total|seconds|bytes)|__\w+__"
)  # names that code puts together
OTHERS = {"url_param", "KillMode", "rate_limits"}  # of other programs
ELSEWHERE = {
    "stretto.yaml",
    "serve.yaml",
    "openapi.json",
}  # files that readers write, or ask a server for
# results of benchmarks that were not run yet
NOT_RUN = {"loaded.json"}


ALL_PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]


def files() -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    return [*found, *(p for p in ROOT.iterdir() if p.is_file())]


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def words() -> set[str]:
    """All words of the code, and names of files without their endings."""
    paths = files()
    code = (
        p.read_text(encoding="utf-8") for p in paths if p.suffix in CODE or p.name == "Makefile"
    )
    return {w for text in code for w in re.findall(r"\w+", text)} | {p.stem for p in paths}


def named(page: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", without_code(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_words_of_the_code_are_in_the_code(page: Path, words: set[str]) -> None:
    tests = {w for w in words if w.startswith("test_")}

    def known(word: str) -> bool:
        if word in words or word in OTHERS or GENERATED.fullmatch(word):
            return True
        return any(
            word.strip("_") in test for test in tests
        )  # a test may be named by its beginning

    of_code = re.compile(r"\w*[a-z0-9]_\w+|(?:[A-Z][a-z0-9]+){2,}")  # snake_case, CamelCase
    said = {
        w for span in named(page) for w in re.findall(r"[A-Za-z_]\w*", span) if of_code.fullmatch(w)
    }
    assert {w for w in said if not known(w)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_are_there(page: Path) -> None:
    there = {p.name for p in files()} | ELSEWHERE | NOT_RUN
    said = {
        Path(p).name
        for span in named(page)
        for p in re.findall(r"[\w./-]+\.(?:py|md|yaml|toml|json)\b", span)
    }
    assert said - there == set()


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"https?:|mailto:", link):
            continue
        target = page.parent / path if path else page
        there = target.exists() and (
            not anchor or target.suffix != ".md" or anchor in anchors(target)
        )
        broken += [] if there else [link]
    assert broken == []


def test_all_pages_and_decisions_are_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.name != "README.md"]
    names = [str(p.relative_to(ROOT / "docs")) for p in pages]
    assert [name for name in names if f"({name})" not in index] == []


@pytest.mark.parametrize("page", ["architecture", "path"])
def test_methods_are_there(page: str) -> None:
    """Of the pages that lead from function to function: `Class.method`, and the file that stands
    behind it."""
    there: dict[str, set[str]] = {}  # files of each function
    for path in (ROOT / "stretto").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            inside = [
                n
                for n in ast.iter_child_nodes(node)
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            name = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for function in inside:
                there.setdefault(f"{name}{function.name}", set()).add(
                    str(path.relative_to(ROOT / "stretto"))
                )
    text = without_code(ROOT / "docs" / f"{page}.md")
    methods = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    assert len(methods) > 5
    assert methods - set(there) == set()
    placed = re.findall(r"`((?:[A-Z]\w+\.)?[a-z_]\w*)`\s(?:\(|in\s)?`([\w/]+\.py)`", text)
    placed += re.findall(r"\(`((?:[A-Z]\w+\.)?[a-z_]\w*)`,\s+`([\w/]+\.py)`\)", text)
    assert len(placed) > 5
    assert [(name, file) for name, file in placed if file not in there.get(name, ())] == []


@pytest.mark.parametrize("name", ["README.md", "docs/serve.md"])
def test_commands_of_the_documents_are_understood(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.M | re.S))
    typed = re.findall(r"^(?:\.venv/bin/)?stretto ([^#<\n]*)", blocks, re.M)
    assert len(typed) >= 3
    for words in typed:
        _, unknown = parser().parse_known_args(shlex.split(words))
        assert not unknown, words


def test_one_version_of_torch_is_installed_everywhere() -> None:
    (release,) = re.findall(
        r"^release=(torch==[\d.]+)$", (ROOT / "scripts" / "setup.sh").read_text(), re.M
    )
    for name in ("deploy/Containerfile", "scripts/check_release.py", "docs/serve.md"):
        assert set(re.findall(r"torch==[\d.]+\d", (ROOT / name).read_text())) == {release}, name

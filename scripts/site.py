"""Builds the documents as a site: `make docs`, then open build/site/index.html.

The site's navigation is the index docs/README.md. Links that lead out of docs/ lead to the
repository. The generator (mkdocs.yml) gets a copy with both, so another one can take its place."""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/stretto-engine/stretto"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
PAGE = re.compile(r"\[([^\]]+)\]\(([^)#:]+\.md)\)\s*([^\[\n]*)")

Navigation = list[dict[str, str | list[dict[str, str]]]]


def main() -> int:
    prepare(ROOT / "build")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--clean", "-f", "build/mkdocs.yml"]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def prepare(build: Path) -> None:
    """Write what the generator reads."""
    docs = build / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    shutil.copytree(ROOT / "docs", docs)
    for page in docs.rglob("*.md"):
        folder = page.parent.relative_to(build).as_posix()
        text = page.read_text(encoding="utf-8")
        page.write_text(
            LINK.sub(lambda link: f"{link[1]}{target(link[2], folder)}{link[3]}", text),  # noqa: B023
            encoding="utf-8",
        )
    nav = navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (build / "mkdocs.yml").write_text(f"{config}nav: {json.dumps(nav)}\n", encoding="utf-8")


def navigation(index: str) -> Navigation:
    """Sections begin with a word in bold or a heading; a decision's title is behind its number."""
    nav: Navigation = [{"Stretto": "README.md"}]
    for block in re.split(r"\n(?=\*\*\w+:\*\*|## )", index)[1:]:
        [title] = re.findall(r"\A(?:\*\*|## )(\w+)", block)
        pages = []
        for name, path, behind in PAGE.findall(re.sub(r"\n(?!- )", " ", block)):
            text = f"{name}. {behind.strip()}" if name.isdigit() else name
            if not path.startswith(".."):
                pages.append({text[0].upper() + text[1:]: path})
        nav.append({title: pages})
    return nav


def target(link: str, folder: str) -> str:
    """Where a link of a page in this folder leads."""
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return link
    inside = posixpath.normpath(posixpath.join(folder, path))
    if inside.startswith("docs/"):
        return link
    kind = "tree" if (ROOT / inside).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{inside}{mark}{anchor}"


if __name__ == "__main__":
    sys.exit(main())

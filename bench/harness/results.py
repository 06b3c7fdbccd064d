"""A program's command line, and the file that its result goes to. Imports no torch.

Every result is one JSON object with `env` (see env.py) and every raw sample, one line for each of
its fields, so that short fields can be read and a diff shows which field changed."""

from __future__ import annotations

import argparse
import ast
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
T = TypeVar("T")


def parser(
    name: str, doc: str | None, *, out: bool = True, package: str = "bench", **more: bool
) -> argparse.ArgumentParser:
    """Of a program or a part, whose docstring is its help. With `out`: `--out FILE`."""
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(
        f"python -m {package} {name}".rstrip(), description=doc, formatter_class=raw, **more
    )
    if out:
        p.add_argument(
            "--out", type=Path, help="file for the result, every sample included, as JSON"
        )
    return p


def first_line(path: Path) -> str:
    """Of a module's docstring, without importing it."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    """For the result. Of a path only its name, since results are published."""
    return {k: v.name if isinstance(v, Path) else v for k, v in vars(args).items()}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result, if a file was given; called again whenever there is more of it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in result.items()
    )
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


@contextmanager
def measured_part(
    name: str, result: dict[str, Any], to: Path | None
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A part of a result; call the function it yields with each thing found. What was found before
    a failure is kept, and written at once. A part carries its own `env`, since the parts of a file
    may be measured at different times."""
    start = time.monotonic()
    found: list[dict[str, Any]] = []
    result["parts"][name] = told = {"found": found, "error": None, "env": result["env"]}
    print(f"== {name}", flush=True)

    def add(one: dict[str, Any]) -> None:
        found.append(one)
        write(to, result)

    try:
        yield add
    except Exception as e:  # noqa: BLE001 - the boundary between parts: the others are still worth their time
        told["error"] = f"{type(e).__name__}: {e}"
        print(f"{name} failed: {traceback.format_exc()}", flush=True)
    told["seconds"] = time.monotonic() - start
    write(to, result)


def rounded(value: Any) -> Any:
    """Times to the microsecond: enough, and half the size."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def judged(path: Path | None, result: dict[str, Any]) -> int:
    """For a program that judges itself (`problems`): print the result without its raw samples,
    write it, and return the exit status."""
    print(json.dumps({k: v for k, v in result.items() if k != "raw"}, indent=1))
    write(path, result)
    return int(bool(result["problems"]))


def quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def progress(work: Sequence[T], what: str) -> Iterable[T]:
    """The same, with a bar on stderr."""
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(work, desc=what, mininterval=1.0)
    return bar

"""The path of a request: which files and lines of the package run for one spoken answer, in which
process.

    python -m bench path --out bench/results/path.json
    python -m bench path --placement one --tree OTHER_CHECKOUT    # another checkout's

Starts `stretto serve` with the tiny model once for each placement, asks one question so that
nothing is new any more, and records what runs while a second question is answered: one streamed
chat request with text and speech, from its POST until a while after its last byte, in the server,
the prompt worker and its jobs, and the hosts. `recorder.py` says how. What these processes do
meanwhile for nobody's request, such as a ping, is in it too; it is little.

For each file: the lines that ran (`ran`), the functions and classes that they are in, the physical
lines of these functions (`to_read`) and of the file. It reports; there is no limit to meet. `python
-m bench report --write` puts the totals into bench/notes/path.md."""

from __future__ import annotations

import argparse
import ast
import base64
import json
import os
import shutil
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import checkpoint
from bench.harness.env import describe, sources
from bench.harness.results import ROOT, arguments, parser, write
from bench.harness.serving import Server, serving
from bench.path import recorder
from stretto.errors import StrettoError

PLACEMENTS = ("one", "processes")
QUESTIONS = (
    "How are you today?",
    "Which river runs through the town?",
)  # the second one is recorded
QUIET_S = 1.0  # without a new line: the request is over everywhere
START_S = 600.0


class NoSound(StrettoError):
    """The answer was not a spoken one."""


def ask(server: Server, question: str) -> None:
    """One spoken answer, read to its end."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "stream": True,
        "max_tokens": 12,
        "max_audio_frames": 24,
        "ignore_eos": True,
    }
    url, head = (
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        {"Content-Type": "application/json"},
    )
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    num_bytes = 0
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: ")).get("choices", ()):
                    audio = choice["delta"].get("audio") or {}
                    num_bytes += len(base64.b64decode(audio.get("data", "")))
    if not num_bytes:
        raise NoSound("the answer had no sound")


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """What runs meanwhile is written, until nothing new runs."""
    on = folder / recorder.ON
    with on.open("r+b", buffering=0) as flag:
        flag.write(b"\1")
        yield
        size, quiet = -1, time.monotonic()
        while time.monotonic() - quiet < QUIET_S:
            time.sleep(0.05)
            if (now := sum(p.stat().st_size for p in folder.glob("*.lines"))) != size:
                size, quiet = now, time.monotonic()
        flag.seek(0)
        flag.write(b"\0")


@contextmanager
def recorded_server(
    args: argparse.Namespace, model: Path, folder: Path, placement: str
) -> Iterator[Server]:
    """A server whose processes can be recorded, each of which writes into `folder`."""
    (folder / recorder.ON).write_bytes(b"\0")
    (folder / "site").mkdir()
    shutil.copy(recorder.__file__, folder / "site" / "sitecustomize.py")
    more = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")])
        ),
        recorder.FOLDER: str(folder),
        recorder.SOURCES: str((args.tree / "stretto").resolve()),
    }
    args.serve = ["--placement", placement]
    with serving(args, model, folder, tree=args.tree.resolve(), more=more) as server:
        server.wait(START_S)
        yield server


def role(head: str) -> str:
    """Of a process, by the first line of its file."""
    forked, _, command = head.partition("\t")
    if "stretto.preprocess.pool.worker" in command:
        return "prompt job" if forked else "prompt worker"
    return "host" if "stretto.stage.host.process" in command else "server"


Ran = dict[
    str, dict[int, Counter[str]]
]  # how many processes of each role ran a line, by file and line


def collect(folder: Path) -> tuple[Ran, dict[str, set[str]], Counter[str]]:
    """The lines that ran; the threads of each file, as ROLE or ROLE/THREAD; the processes."""
    ran: Ran = {}
    threads: dict[str, set[str]] = {}
    processes: Counter[str] = Counter()
    for path in folder.glob("*.lines"):
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        processes[name := role(head)] += 1
        for file, line, thread in (text.split("\t") for text in lines):
            ran.setdefault(file, {}).setdefault(int(line), Counter())[name] += 1
            threads.setdefault(file, set()).add(
                name if thread == "MainThread" else f"{name}/{thread}"
            )
    return ran, threads, processes


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of a function or a class, by its qualified name."""

    name: str
    is_class: bool
    first: int
    last: int


def spans(tree: ast.AST, inside: str = "") -> Iterator[Span]:
    """Outer ones before those in them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}{node.name}"
            yield Span(
                name, isinstance(node, ast.ClassDef), node.lineno, node.end_lineno or node.lineno
            )
            yield from spans(node, f"{name}.")
        else:
            yield from spans(node, inside)


def of_file(path: Path, lines: dict[int, Counter[str]], threads: set[str]) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    functions: set[str] = set()
    classes: set[str] = set()
    to_read: set[int] = set()
    found = list(spans(ast.parse(text)))
    for line in lines:
        around = [span for span in found if span.first <= line <= span.last]
        classes |= {span.name for span in around if span.is_class}
        if within := [span for span in around if not span.is_class]:
            to_read |= {number for span in within for number in range(span.first, span.last + 1)}
            functions.add(within[-1].name)
    return {
        "ran": len(lines),
        "to_read": len(to_read),
        "lines": len(text.splitlines()),
        "functions": sorted(functions),
        "classes": sorted(classes),
        "processes": sorted(set().union(*lines.values())),
        "threads": sorted(threads),
        "line_numbers": sorted(lines),
    }


def totals(files: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {
        "files": len(files),
        "packages": len({str(Path(name).parent) for name in files}),
        "functions": sum(len(f["functions"]) for f in files.values()),
        "classes": sum(len(f["classes"]) for f in files.values()),
        "ran": sum(f["ran"] for f in files.values()),
        "to_read": sum(f["to_read"] for f in files.values()),
        "lines": sum(f["lines"] for f in files.values()),
    }


def arithmetic(name: str) -> bool:
    """Whether a file is left out of the second total, as models' arithmetic, layers and kernels."""
    return name.startswith(("layers/", "kernels/"))


def by_folder(files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    folders: dict[str, dict[str, dict[str, Any]]] = {}
    for name, file in files.items():
        folders.setdefault(str(Path(name).parent), {})[name] = file
    return {
        folder: totals(inside)
        | {"processes": sorted({p for f in inside.values() for p in f["processes"]})}
        for folder, inside in sorted(folders.items())
    }


def measure(args: argparse.Namespace, model: Path, placement: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stretto-bench-path-") as made:
        folder = Path(made)
        with recorded_server(args, model, folder, placement) as server:
            ask(server, QUESTIONS[0])
            time.sleep(QUIET_S)  # what follows an answer is over too
            with recording(folder):
                ask(server, QUESTIONS[1])
        ran, threads, processes = collect(folder)
    package = args.tree / "stretto"
    files = {name: of_file(package / name, ran[name], threads[name]) for name in sorted(ran)}
    besides = {name: file for name, file in files.items() if not arithmetic(name)}
    return {
        "placement": placement,
        "processes": dict(processes),
        "total": totals(files),
        "without_layers_and_kernels": totals(besides),
        "folders": by_folder(files),
        "files": files,
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"== {found['placement']}: "
        f"{', '.join(f'{n} {name}' for name, n in found['processes'].items())}"
    )
    for folder, inside in found["folders"].items():
        print(
            f"{folder}: {inside['ran']} of {inside['lines']} lines; "
            f"{', '.join(inside['processes'])}"
        )
        for name, file in found["files"].items():
            if str(Path(name).parent) == folder:
                print(
                    f"    {file['ran']:4} of {file['lines']:4}  "
                    f"{Path(name).name:24}{', '.join(file['threads'])}"
                )
    for name in ("total", "without_layers_and_kernels"):
        print(
            f"{name.replace('_', ' ')}: "
            f"{', '.join(f'{n} {what}' for what, n in found[name].items())}"
        )
    print(flush=True)


def main(given: Sequence[str]) -> int:
    p = parser("path", __doc__)
    p.add_argument(
        "--placement", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), help="default: both"
    )
    p.add_argument(
        "--tree",
        type=Path,
        default=ROOT,
        help="another checkout, whose server it is (default: this one)",
    )
    args = p.parse_args(given)
    result: dict[str, Any] = {"env": describe(), "arguments": arguments(args), "placements": []}
    if args.tree != ROOT:
        result["tree"] = sources(args.tree)
    args.model, args.device, args.max_rows = "tiny", "cpu", 8
    with checkpoint("tiny") as model:
        for placement in args.placement:
            result["placements"].append(found := measure(args, model, placement))
            show(found)
            write(args.out, result)
    return 0

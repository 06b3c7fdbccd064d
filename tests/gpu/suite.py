"""All tests that need a GPU, in one command, with a record of what ran where and from which commit.

    python -m tests.gpu                          # writes bench/results/gpu_tests_h200.txt
    python -m tests.gpu --out FILE --limit 470   # elsewhere, cut after so many seconds
    python -m tests.gpu --selection --out FILE   # in half the time, for changed stages or engine
    python -m tests.gpu --card sm_86 --out FILE  # with that card's limits, on a later one
    python -m tests.gpu --no-dependent-launch --out FILE
    python -m tests.gpu --selection --out FILE --device cpu -k NAME  # tries the program

Three parts: the GPU's own tests and the kernels'; the parity suite through the kernels (float32,
sizes that they take, the same oracles as on a CPU); and what needs the GPU to itself, one test
after another (marker `alone`). The first two run in several processes that share the GPU and
Triton's cache. A selection leaves out the kernels' own tests and most modules of the parity suite;
its record says so in its first line, and no document quotes it. `--card` keeps every kernel to
another card's shared memory and launches it as there; `--no-dependent-launch` switches that off
alone; the record says so. The record is written anew every
few seconds, so a run that is cut (by its own limit, SIGTERM or SIGINT) leaves one that says so.
Exits with 1 unless every part ran to its end and no test failed. Where there is no git repository,
the file COMMIT says what git would (see bench/harness/env.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness.env import describe
from bench.harness.results import RESULTS, ROOT, parser
from stretto.kernels.triton.device import CARDS

FORCED = {"STRETTO_KERNELS": "force", "STRETTO_TEST_SIZES": "even", "STRETTO_TEST_DEVICE": "cuda"}
WRITE_EVERY = 5.0  # seconds between two records of a running part
SHOWN = 20  # slowest tests
TEXT = 3000  # characters of a failure, its end


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    paths: tuple[str, ...]
    marked: str
    needs: float  # seconds kept for it while those before it run
    names: str = ""  # tests of these names alone, as pytest's -k
    parallel: bool = True
    env: dict[str, str] = field(default_factory=dict)


OWN = ("tests/gpu", "tests/kernels/triton")
PARITY = ("tests/models", "tests/stage/test_ar.py", "tests/stage/vocoder/test_core.py")
PARTS = (
    Part("GPU and kernels", OWN, "not alone", 240),
    Part("parity, kernels forced", PARITY, "not alone", 110, env=FORCED),
    Part(
        "one by one",
        (*OWN, *PARITY),
        "alone",
        25,
        parallel=False,
        env={"STRETTO_TEST_DEVICE": "cuda"},
    ),
)
SELECTED_PARITY = (
    "tests/models/qwen3_omni/test_solo.py",
    "tests/models/qwen3_omni/test_audio_graphs.py",
    "tests/models/qwen3_omni/test_vision_graphs.py",
    "tests/stage/test_ar.py",
    "tests/stage/vocoder/test_core.py",
)
SELECTION = (
    Part("GPU", ("tests/gpu",), "not alone", 120, names="not cpu"),
    Part("parity, kernels forced", SELECTED_PARITY, "not alone", 50, env=FORCED),
    Part(
        "one by one",
        ("tests/gpu", *SELECTED_PARITY),
        "alone",
        20,
        parallel=False,
        env={"STRETTO_TEST_DEVICE": "cuda"},
    ),
)
SELECTED = "not the whole suite: no tests of single kernels, few modules of the parity suite"


@dataclass(slots=True)
class Ran:
    """What is known of a part so far."""

    part: Part
    notes: Path
    workers: int
    seconds: float = 0.0
    state: str = "running"  # then: complete, cut (and why), or how pytest ended

    def tests(self) -> dict[str, dict[str, Any]]:
        """By test: how it ended (None: it has not), how long all of it took, and what it said."""
        found: dict[str, dict[str, Any]] = {}
        if not self.notes.exists():
            return found
        for line in self.notes.read_text(encoding="utf-8").splitlines():
            try:
                note = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was cut
                continue
            test = found.setdefault(note["test"], {"end": None, "seconds": 0.0, "text": ""})
            test["seconds"] += note.get("seconds", 0.0)
            if note["what"] in ("failed", "error", "skipped") or (
                note["what"] == "passed" and test["end"] is None
            ):
                test["end"] = note["what"] if test["end"] != "failed" else "failed"
                test["text"] += note.get("text", "")
        return found


def narrowed(part: Part, device: str, names: str) -> Part:
    """The same with the model on another device, and with tests that `names` chooses too."""
    if "STRETTO_TEST_DEVICE" in part.env:
        part = replace(part, env=part.env | {"STRETTO_TEST_DEVICE": device})
    both = " and ".join(f"({one})" for one in (part.names, names) if one)
    return replace(part, names=both)


def limits_of(card: str | None, no_dependent_launch: bool) -> dict[str, str]:
    """What the tests' processes are told of the card that they are to act as."""
    found = {} if card is None else {"STRETTO_KERNELS_CARD": card}
    if no_dependent_launch:
        found["STRETTO_KERNELS_DEPENDENT_LAUNCH"] = "off"
    return found


class Cut(Exception):
    """The run must end now."""


def run(ran: Ran, until: float, write: Callable[[], None]) -> None:
    """One part, to its end or to `until`; `write` is called every few seconds."""
    part = ran.part
    command = [
        sys.executable, "-m", "pytest", *part.paths, "-m", part.marked, "-q", "--tb=short", "-p",
        "no:cacheprovider",
        "-p", "tests.gpu.notes", "--notes", str(ran.notes), "-o", "faulthandler_timeout=100",
        *(("-k", part.names) if part.names else ()),
    ]  # fmt: skip
    if ran.workers > 1:
        command += ["-n", str(ran.workers), "--dist", "worksteal"]
    paths = [
        str(ROOT),
        *(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | part.env
    print(f"--- {part.name}: {ran.workers} processes", flush=True)
    begin = written = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, start_new_session=True
    )  # its workers end with it
    try:
        while process.poll() is None:
            now = time.monotonic()
            ran.seconds = now - begin
            if now > until:
                ran.state = "cut by the time limit"
                return
            if now - written > WRITE_EVERY:
                write()
                written = now
            time.sleep(0.2)
        ran.state = (
            "complete"
            if process.returncode in (0, 1)
            else f"pytest ended with {process.returncode}"
        )
    except Cut as cut:
        ran.state = str(cut)
        raise
    finally:
        ran.seconds = time.monotonic() - begin
        stop(process)
        write()


def stop(process: subprocess.Popen[bytes]) -> None:
    """The process and its workers, at once if they do not listen."""
    for sign, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def failed(ran: list[Ran], parts: Sequence[Part] = PARTS) -> bool:
    """Anything but every part at its end without a failure, and some test passed."""
    ends = Counter(t["end"] for r in ran for t in r.tests().values())
    complete = len(ran) == len(parts) and all(r.state == "complete" for r in ran)
    return not complete or bool(ends["failed"] or ends["error"]) or not ends["passed"]


def record(
    about: dict[str, Any], ran: list[Ran], seconds: float, parts: Sequence[Part] = PARTS
) -> str:
    lines = [f"{k}: {v}" for k, v in about.items()]
    lines += [
        "",
        f"{'part':24} {'passed':>7} {'failed':>7} {'errors':>7} {'skipped':>8} {'seconds':>8}  "
        f"processes, state",
    ]
    total: Counter[str] = Counter()
    tests: list[tuple[str, str, dict[str, Any]]] = []
    for r in ran:
        found = r.tests()
        ends = Counter(t["end"] or "unfinished" for t in found.values())
        total += ends
        tests += [(r.part.name, name, t) for name, t in found.items()]
        lines.append(row(r.part.name, ends, r.seconds) + f"  {r.workers}, {r.state}")
    lines.append(row("all", total, seconds))
    missing = [p.name for p in parts[len(ran) :]]
    if missing:
        lines.append(f"not run: {', '.join(missing)}")
    lines.append(f"result: {'NOT passed' if failed(ran, parts) else 'passed'}")
    lines += ["", f"the {SHOWN} slowest tests, setup and teardown counted, seconds"]
    for part, name, t in sorted(tests, key=lambda x: -x[2]["seconds"])[:SHOWN]:
        lines.append(f"{t['seconds']:8.1f}  {name}  ({part})")
    reasons = Counter(t["text"].strip() for _, _, t in tests if t["end"] == "skipped")
    lines += [
        "",
        "skipped, by reason",
        *(f"{n:8}  {reason}" for reason, n in reasons.most_common()),
    ]
    unfinished = [f"          {name}" for _, name, t in tests if t["end"] is None]
    if unfinished:
        lines += ["", "begun and not ended", *unfinished]
    for part, name, t in tests:
        if t["end"] in ("failed", "error"):
            lines += ["", f"{t['end']}: {name}  ({part})", t["text"][-TEXT:]]
    return "\n".join(lines) + "\n"


def row(name: str, ends: Counter[str], seconds: float) -> str:
    counts = f"{ends['passed']:7} {ends['failed']:7} {ends['error']:7} {ends['skipped']:8}"
    return f"{name:24} {counts} {seconds:8.1f}"


def main(given: Sequence[str]) -> int:
    p = parser("", __doc__, out=False, package="tests.gpu")
    p.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "gpu_tests_h200.txt",
        help="file for the record, as text",
    )
    p.add_argument("--selection", action="store_true", help="the GPU's own tests, some of parity")
    p.add_argument("--limit", type=float, default=470.0, help="seconds for all of it")
    p.add_argument("--workers", type=int, default=max(1, min(12, 3 * (os.cpu_count() or 1) // 4)))
    p.add_argument("--device", default="cuda", help="cpu: tries the program (default: cuda)")
    p.add_argument("--card", choices=CARDS, help="keep to the limits of this card")
    p.add_argument(
        "--no-dependent-launch", action="store_true", help="kernels wait for the one in front"
    )
    p.add_argument("-k", default="", metavar="NAME", help="tests of these names alone, as pytest's")
    args = p.parse_args(given)
    if importlib.util.find_spec("xdist") is None:
        print("no pytest-xdist here: one process, which will not do in the time", flush=True)
        args.workers = 1
    limited = limits_of(args.card, args.no_dependent_launch)
    if (args.selection or args.k or limited) and args.out == p.get_default("out"):
        p.error(
            "some of the tests need --out, and so do limits: the record in bench/results is of all"
        )
    parts = SELECTION if args.selection else PARTS
    begin = time.monotonic()
    about = describe()
    if args.selection or args.k:
        about = {"selection": SELECTED, **about}
    if limited:
        about = {"limits": ", ".join(f"{k}={v}" for k, v in limited.items()), **about}
    if about["gpu"] is None and args.device == "cuda":
        print("needs a CUDA device")
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    ran: list[Ran] = []

    def write() -> None:
        text = record(about, ran, time.monotonic() - begin, parts)
        args.out.write_text(text, encoding="utf-8")

    def on_signal(number: int, _: Any) -> None:
        raise Cut(f"cut by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for i, part in enumerate(parts):
                part = narrowed(part, args.device, args.k)
                part = replace(part, env=part.env | limited)
                ran.append(
                    Ran(part, Path(folder) / f"{i}.jsonl", args.workers if part.parallel else 1)
                )
                later = sum(p.needs for p in parts[i + 1 :])
                run(ran[-1], begin + args.limit - later, write)
        except Cut as cut:
            print(cut, flush=True)
        write()
        print(args.out.read_text(encoding="utf-8"))
        return int(failed(ran, parts))

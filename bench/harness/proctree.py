"""What a process and all its descendants hold: memory, descriptors, memory files, segments,
threads.

Read from /proc, without help of the processes, so that any version of a server can be looked at.
Imports no torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROC = Path("/proc")
SAMPLE_S = 0.25
PROMPT_WORKER, PROMPT_JOB = "prompt worker", "prompt job"
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)  # a process that ended meanwhile


def descendants(pid: int) -> dict[int, int]:
    """The process and all below it, with their parents; parents first."""
    found, queue = {pid: 0}, [pid]
    while queue:
        one = queue.pop(0)
        with suppress(*GONE):
            for task in (PROC / str(one) / "task").iterdir():
                with suppress(*GONE):
                    below = [int(child) for child in (task / "children").read_text().split()]
                    found |= dict.fromkeys(below, one)
                    queue += below
    return found


@dataclass(slots=True)
class Holding:
    """What one process holds. `anonymous` is the memory that is its own; `resident` counts shared
    pages too."""

    name: str
    resident: int = 0
    anonymous: int = 0
    descriptors: int = 0
    threads: int = 0
    memory_files: set[int] = field(default_factory=set)  # by inode
    segments: set[int] = field(default_factory=set)  # files of /dev/shm, by inode
    sizes: dict[int, int] = field(default_factory=dict)  # bytes of both, as far as they are open

    @classmethod
    def of(cls, pid: int) -> Holding:
        here = PROC / str(pid)
        held = cls(_name(pid))
        fields = dict(
            line.split(":", 1) for line in (here / "status").read_text().splitlines() if ":" in line
        )
        if "VmRSS" in fields:  # a process that has ended, but was not waited for, has none
            held.resident, held.anonymous = (
                1024 * int(fields[f].split()[0]) for f in ("VmRSS", "RssAnon")
            )
        held.threads = int(fields["Threads"])
        for fd in os.listdir(here / "fd"):
            held.descriptors += 1
            with suppress(OSError):
                held._take_file(here / "fd" / fd)
        for line in (here / "maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path.startswith("dev/shm/"):
                held.segments.add(int(line.split()[4]))
            elif path.startswith("memfd:"):
                held.memory_files.add(int(line.split()[4]))
        return held

    def _take_file(self, link: Path) -> None:
        target = os.readlink(link)
        for kind, inodes in (("/memfd:", self.memory_files), ("/dev/shm/", self.segments)):
            if target.startswith(kind):
                status = link.stat()
                inodes.add(status.st_ino)
                self.sizes[status.st_ino] = 512 * status.st_blocks


def _name(pid: int) -> str:
    """What the process does, by its command line."""
    words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    line = b" ".join(words).decode(errors="replace")
    for mark, name in (
        ("resource_tracker", "resource tracker"),
        ("stretto.preprocess", PROMPT_WORKER),
        ("stretto.stage", "host"),
        ("spawn_main", "host"),
        ("forkserver", "fork server"),
        ("stretto serve", "server"),
    ):
        if mark in line:
            return name
    return (line or "ended")[:80]


@dataclass(slots=True)
class Tree:
    """All processes of a server at one moment."""

    at: float
    processes: dict[int, Holding]

    @classmethod
    def of(cls, pid: int) -> Tree:
        found: dict[int, Holding] = {}
        for one, parent in descendants(pid).items():
            with suppress(*GONE):
                found[one] = Holding.of(one)
                if parent in found and found[parent].name == PROMPT_WORKER:
                    found[one].name = PROMPT_JOB  # forked from it, with its command line
        return cls(time.monotonic(), found)

    @property
    def resident(self) -> int:
        return sum(p.resident for p in self.processes.values())

    @property
    def anonymous(self) -> int:
        return sum(p.anonymous for p in self.processes.values())

    @property
    def file_bytes(self) -> int:
        """Of memory files and segments, each once."""
        sizes: dict[int, int] = {}
        for p in self.processes.values():
            sizes |= p.sizes
        return sum(sizes.values())

    def counts(self) -> dict[str, int]:
        """What must be as before when nobody is served."""
        held = self.processes.values()
        return {
            "processes": len(held),
            "threads": sum(p.threads for p in held),
            "descriptors": sum(p.descriptors for p in held),
            "memory_files": len(set().union(*(p.memory_files for p in held))),
            "segments": len(set().union(*(p.segments for p in held))),
        }

    def by_process(self) -> list[dict[str, Any]]:
        """For a result."""
        return [
            {
                "pid": pid,
                **{
                    k: len(v) if isinstance(v, set) else v
                    for k, v in asdict(p).items()
                    if k != "sizes"
                },
            }
            for pid, p in self.processes.items()
        ]

    def told(self) -> dict[str, Any]:
        totals = {
            "resident": self.resident,
            "anonymous": self.anonymous,
            "file_bytes": self.file_bytes,
        }
        return {**self.counts(), **totals, "by_process": self.by_process()}

    def by_name(self, what: str) -> dict[str, int]:
        """Of all processes that do the same: those that a pool replaces stand for each other."""
        found: dict[str, int] = {}
        for p in self.processes.values():
            found[p.name] = found.get(p.name, 0) + (1 if what == "processes" else getattr(p, what))
        return found

    def growth(self, later: Tree, each: Sequence[str] = ("processes", "descriptors")) -> list[str]:
        """What is more than it was: `each` by what the processes do, files and segments in all.
        Compare two moments at which the server is idle."""
        found = []
        for what in each:
            old, new = self.by_name(what), later.by_name(what)
            for name in sorted({*old, *new}):
                before, after = old.get(name, 0), new.get(name, 0)
                if after > before or (what == "processes" and after != before):
                    found.append(f"{name}: {before} {what}, then {after}")
        old, new = self.counts(), later.counts()
        found += [
            f"{old[what]} {what.replace('_', ' ')}, then {new[what]}"
            for what in ("memory_files", "segments")
            if new[what] > old[what]
        ]
        return found


@dataclass(slots=True)
class Peak:
    """The most that a tree held meanwhile, and the samples: (seconds, resident, anonymous, file
    bytes, descriptors)."""

    limit: int  # bytes of resident memory, beyond which `over` is called
    resident: int = 0
    anonymous: int = 0
    file_bytes: int = 0
    descriptors: int = 0
    stopped: bool = False
    samples: list[tuple[float, int, int, int, int]] = field(default_factory=list)

    def take(self, tree: Tree, since: float) -> None:
        descriptors = max((p.descriptors for p in tree.processes.values()), default=0)
        self.samples.append(
            (tree.at - since, tree.resident, tree.anonymous, tree.file_bytes, descriptors)
        )
        self.resident = max(self.resident, tree.resident)
        self.anonymous = max(self.anonymous, tree.anonymous)
        self.file_bytes = max(self.file_bytes, tree.file_bytes)
        self.descriptors = max(self.descriptors, descriptors)


@contextmanager
def watched(pid: int, limit: int, stop: Any) -> Iterator[Peak]:
    """Sample a tree in a thread. `stop()` is called once if it takes more than `limit` bytes: an
    attack must not take the machine with it."""
    peak, done, since = Peak(limit), threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            tree = Tree.of(pid)
            peak.take(tree, since)
            if tree.anonymous + tree.file_bytes > limit and not peak.stopped:
                peak.stopped = True
                stop()

    thread = threading.Thread(target=watch, name="watch-tree", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def settled(pid: int, before: Tree, seconds: float, poll: float = 0.1) -> Tree:
    """The tree, once nothing of it is more than before, or when the time is up."""
    until = time.monotonic() + seconds
    while True:
        now = Tree.of(pid)
        if not before.growth(now) or time.monotonic() > until:
            return now
        time.sleep(poll)

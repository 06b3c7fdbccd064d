"""What a process tree holds is seen from outside: descriptors, memory files, segments, processes;
and what stays."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.harness.proctree import Tree, descendants, watched

PROGRAM = """
import os, subprocess, sys
held, children = [], []
for line in sys.stdin:
    match line.strip():
        case "descriptor":
            held.append(os.open("/dev/null", os.O_RDONLY))
        case "memory file":
            held.append(os.memfd_create("stretto"))
            os.write(held[-1], bytes(1 << 20))
        case "close":
            os.close(held.pop())
        case "child":
            children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        case "end":
            children[-1].stdin.close()
            children.pop().wait()
    print("done", flush=True)
"""  # noqa: E501


class Child:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def does(self, *words: str) -> Tree:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for word in words:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "done\n"
        return Tree.of(self.process.pid)


@pytest.fixture
def child() -> Iterator[Child]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Child(process)
        process.kill()


def test_what_stays_is_growth_and_what_is_given_back_is_not(child: Child) -> None:
    before = child.does("descriptor")
    assert before.growth(child.does("descriptor", "close")) == []
    later = child.does("memory file")
    assert [problem.partition(": ")[2] or problem for problem in before.growth(later)] == [
        f"{before.counts()['descriptors']} descriptors, then {before.counts()['descriptors'] + 1}",
        "0 memory files, then 1",
    ]
    assert later.file_bytes - before.file_bytes == 1 << 20
    assert before.growth(child.does("close")) == []


def test_children_count_and_their_end_too(child: Child) -> None:
    before = child.does()
    later = child.does("child")
    assert list(descendants(child.process.pid).values()) == [0, child.process.pid]
    assert any("0 processes, then 1" in problem for problem in before.growth(later))
    assert any("1 processes, then 0" in problem for problem in later.growth(child.does("end")))


def test_a_process_that_takes_too_much_is_stopped_once(child: Child) -> None:
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(child.process.pid)
        child.process.kill()

    with watched(child.process.pid, 1, stop) as peak:
        child.process.wait()
    assert stopped == [child.process.pid]
    assert peak.stopped
    assert peak.anonymous > 1

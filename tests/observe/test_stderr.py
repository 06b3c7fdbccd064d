"""Whoever writes to stderr never waits for its reader; what cannot be written is counted, and told
in its place."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from stretto.observe.stderr import QueuedStderr

PIPE_BYTES = 4096  # the smallest that there is
LIMIT = 8192


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small pipe: what is read, and what is written to."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield ends
    # The other end stays open: a thread may still write to it, and its number must not become that
    # of the next test's pipe.
    with suppress(OSError):
        os.close(ends[0])


def notice(lines: int) -> str:
    return f"{lines} lines were dropped"


def read_until(fd: int, last: bytes) -> list[str]:
    got = b""
    while not got.endswith(last):
        part = os.read(fd, 65536)
        assert part
        got += part
    return got.decode().splitlines()


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    out = QueuedStderr(pipe[1], notice, LIMIT)
    print("one", "two", file=out)
    out.write("thr")
    out.write("ee\nfo")
    out.write("ur\nlast\n")
    assert read_until(pipe[0], b"last\n") == ["one two", "three", "four", "last"]
    assert out.drain()
    assert out.dropped == 0


def test_no_write_is_cut_between_those_of_other_processes() -> None:
    """A pipe of packets: what is written at once is read at once, if it is no more than PIPE_BUF
    bytes."""
    ends = os.pipe2(os.O_DIRECT)
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    out = QueuedStderr(ends[1], notice)
    for i in range(300):
        out.write(f"{i:99}\n")
    packets: list[bytes] = []
    while not packets or not packets[-1].endswith(b" 299\n"):
        packets.append(os.read(ends[0], 1 << 16))
    assert all(packet.endswith(b"\n") for packet in packets)
    assert len(packets) < 300, "those that wait are written together"
    assert out.drain()
    for fd in ends:
        os.close(fd)


def test_a_line_without_an_end_is_not_held(pipe: tuple[int, int]) -> None:
    out = QueuedStderr(pipe[1], notice, LIMIT)
    for _ in range(5):
        out.write("x" * 1000)
    assert os.read(pipe[0], PIPE_BYTES)


def test_a_progress_bar_is_shown_before_its_line_ends(pipe: tuple[int, int]) -> None:
    out = QueuedStderr(pipe[1], notice, LIMIT)
    out.write("\r 10 %")
    out.flush()
    assert os.read(pipe[0], 100) == b"\r 10 %"


def test_what_finds_no_room_is_counted_and_told_where_it_is_missing(pipe: tuple[int, int]) -> None:
    out = QueuedStderr(pipe[1], notice, LIMIT)
    for i in range(10_000):
        out.write(f"line {i}\n")
    dropped = out.dropped
    assert 0 < dropped < 10_000
    assert not out.drain(0.01), "nobody reads"
    seen = gaps = 0
    with open(pipe[0], encoding="utf-8", closefd=False) as lines:
        while seen < 10_000:  # each line is there, or counted in its place
            if found := re.fullmatch(r"(\d+) lines were dropped\n", line := lines.readline()):
                gaps += int(found[1])
                seen += int(found[1])
            else:
                assert line == f"line {seen}\n"
                seen += 1
        assert gaps == dropped
        out.write("again\n")
        assert lines.readline() == "again\n"
    assert out.dropped == dropped


def test_no_line_that_still_fits_goes_before_the_notice(pipe: tuple[int, int]) -> None:
    out = QueuedStderr(pipe[1], notice, LIMIT)
    for _ in range(30):
        out.write("x" * 1000 + "\n")
    out.write("small\n")
    reading = threading.Thread(target=lambda: found.extend(read_until(pipe[0], b"last\n")))
    found: list[str] = []
    reading.start()
    assert out.drain(60)
    out.write("last\n")
    reading.join()
    told = next(i for i, line in enumerate(found) if "were dropped" in line)
    assert "small" not in found[:told]


def test_a_line_larger_than_the_queue_is_dropped_alone(pipe: tuple[int, int]) -> None:
    out = QueuedStderr(pipe[1], notice, LIMIT)
    out.write("x" * LIMIT + "\n")
    out.write("small\n")
    assert read_until(pipe[0], b"small\n") == ["1 lines were dropped", "small"]


def test_a_reader_that_is_gone_stops_nobody(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    out = QueuedStderr(pipe[1], notice, LIMIT)
    for i in range(10):
        out.write(f"line {i}\n")
        assert out.drain(60)
    assert out.dropped == 10


def test_a_pipe_that_its_reader_made_non_blocking_is_waited_for(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    out = QueuedStderr(pipe[1], notice, 1 << 20)
    for i in range(5000):
        out.write(f"line {i}\n")
    assert read_until(pipe[0], b"line 4999\n") == [f"line {i}" for i in range(5000)]


PROGRAM = """
import logging, os, sys
from stretto.observe import logs
logs.set_up(sys.argv[1], "info")
log = logging.getLogger("x")
log.info("one\\nline\\u2028of\\x85text")
pid = os.fork()
if pid == 0:
    log.info("from the child")
    logs.drain()
    os._exit(0)
os.waitpid(pid, 0)
raise SystemExit("the last words")
"""


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_process_writes_all_before_it_ends_one_line_a_record(format: str) -> None:
    # From 3.12 on Python warns of a fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, format]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    ours, child = sorted(
        lines[:2], key=lambda line: "from the child" in line
    )  # two processes: in either order
    assert re.search(r"one\\nline\\u2028of\\(x85|u0085)text", ours)
    assert "from the child" in child
    assert lines[2] == "the last words"


ENDS = """
import fcntl, os, sys, time
os.dup2(int(sys.argv[1]), 2)
from stretto.observe import logs
logs.set_up("text", "info")
for i in range(100_000):
    sys.stderr.write("a line that nobody reads\\n")
"""


def test_a_process_whose_stderr_nobody_reads_ends(pipe: tuple[int, int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(pipe[1])], pass_fds=(pipe[1],), check=False
    )
    assert done.returncode == 0

"""Which lines of a package run, in the processes of a server. Copied as `sitecustomize.py` into a
folder of PYTHONPATH, so that each Python process of the server, and each that it starts, begins
with it. Imports the standard library alone.

While the first byte of the file `on` is not zero, each line of a function is written to the file of
its process when it runs for the first time: file, line, thread. Lines are written at once, so
nothing is lost in a process that is killed or leaves by `os._exit`. What a module or a class body
runs when it is imported does not count.

From Python 3.12 on by `sys.monitoring`, before that by `sys.settrace`. Both are there from the
start of a process: a function that runs since then is seen too."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER, SOURCES = "BENCH_PATH_FOLDER", "BENCH_PATH_SOURCES"  # names in the environment
ON = "on"
FUNCTION = 1  # CO_OPTIMIZED, of `inspect`, which takes long to import


class Recorder:
    """Of this process, and of those forked from it. `sources` is the folder of the package."""

    def __init__(self, folder: Path, sources: Path) -> None:
        self.folder, self.sources = folder, f"{sources}{os.sep}"
        with (folder / ON).open("rb") as file:
            self.on = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self.forked = False
        self.fd = -1
        self.seen: set[tuple[str, int]] = set()
        os.register_at_fork(after_in_child=self.begin_anew)

    def begin_anew(self) -> None:
        """In a process that was forked: what its parent has seen is not its own."""
        if self.fd >= 0:
            os.close(self.fd)
        self.forked, self.fd = True, -1
        self.seen.clear()

    def follows(self, code: CodeType) -> bool:
        return bool(code.co_flags & FUNCTION) and code.co_filename.startswith(self.sources)

    def saw(self, code: CodeType, line: int) -> None:
        key = (code.co_filename, line)
        if key in self.seen:
            return
        self.seen.add(key)
        if self.fd < 0:
            name = self.folder / f"{os.getpid()}.lines"
            self.fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(
                self.fd, f"{'forked' if self.forked else ''}\t{' '.join(sys.orig_argv)}\n".encode()
            )
        name = code.co_filename.removeprefix(self.sources)
        os.write(self.fd, f"{name}\t{line}\t{threading.current_thread().name}\n".encode())

    # -- by sys.settrace

    def settrace(self) -> None:
        threading.settrace(self.called)
        sys.settrace(self.called)

    def called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self.ran if self.follows(frame.f_code) else None

    def ran(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line" and self.on[0]:
            self.saw(frame.f_code, frame.f_lineno)
        return self.ran

    # -- by sys.monitoring

    def monitor(self, monitoring: Any) -> None:
        tool, off = monitoring.COVERAGE_ID, monitoring.DISABLE

        def ran(code: CodeType, line: int) -> Any:
            if not self.follows(code):
                return off
            if not self.on[0]:
                return None
            self.saw(code, line)
            return off

        monitoring.use_tool_id(tool, "bench path")
        monitoring.register_callback(tool, monitoring.events.LINE, ran)
        monitoring.set_events(tool, monitoring.events.LINE)
        os.register_at_fork(after_in_child=monitoring.restart_events)


def begin(folder: Path, sources: Path) -> None:
    recorder, monitoring = Recorder(folder, sources), getattr(sys, "monitoring", None)
    if monitoring is None:
        recorder.settrace()
    else:
        recorder.monitor(monitoring)


if __name__ == "sitecustomize" and FOLDER in os.environ:
    begin(Path(os.environ[FOLDER]), Path(os.environ[SOURCES]))

"""A process's stderr behind a bounded queue, so that nobody who writes to it waits for whoever
reads it.

A pipe that nobody reads is full after 64 KiB; a write to it would stop the event loop, or a host's,
for good. Here a thread writes, and what finds the queue full is dropped and counted. `logs.set_up`
puts it in the place of `sys.stderr`, so that log lines, progress bars, banners and stack traces of
other libraries go through it too. Any thread may write; the thread that writes to the descriptor
starts with the first line, and anew in a child that was forked. Imports nothing of ours."""

from __future__ import annotations

import atexit
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

QUEUE_BYTES = 1 << 20
# a write of so many bytes to a pipe is never mixed with those of other processes (PIPE_BUF)
PIECE_BYTES = 4096
DRAIN_S = 1.0  # at the end of the process


class QueuedStderr(io.TextIOBase):
    """`notice`: the line that says how many lines were dropped. It comes where they would have
    been, as soon as half of the queue is free again; until then, further lines are dropped too, so
    that there is one notice and not many."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, notice: Callable[[int], str], limit: int = QUEUE_BYTES) -> None:
        super().__init__()
        self.notice = notice
        self.dropped = 0  # lines, since the process began
        self._fd = fd
        self._limit = limit
        self._changed = threading.Condition()  # around an RLock: a signal handler may write, too
        self._queue: deque[bytes] = deque()
        self._size = 0  # bytes in the queue
        self._partial = ""  # a line that is not complete yet
        self._unannounced = 0  # lines that were dropped since the last notice
        self._failed = 0  # lines that the descriptor refused since the last that it took
        self._writing = False
        self._thread: threading.Thread | None = None
        os.register_at_fork(
            before=self._changed.acquire,
            after_in_parent=self._changed.release,
            after_in_child=self._after_fork,
        )
        atexit.register(self.drain)

    # ---- what a text stream has

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Queues complete lines."""
        with self._changed:
            lines, newline, rest = text.rpartition("\n")
            if newline:
                self._put(self._partial + lines + newline)
                self._partial = rest
            else:
                self._partial += rest
                if len(self._partial) > PIECE_BYTES:
                    self.flush()
        return len(text)

    def flush(self) -> None:
        """Queues a line that is not complete, as progress bars write them. `drain` waits until all
        is written."""
        with self._changed:
            if self._partial:
                text = self._partial
                self._partial = ""
                self._put(text)

    # ---- the queue

    def drain(self, seconds: float = DRAIN_S) -> bool:
        """Wait until everything is written, but not for ever. Called before the process ends."""
        self.flush()
        end = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._queue or self._writing or self._unannounced),
                end - time.monotonic(),
            )

    def _put(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        self._announce()
        if self._start() and not self._unannounced and self._size + len(data) <= self._limit:
            self._queue.append(data)
            self._size += len(data)
        else:
            self.dropped += _lines(data)
            self._unannounced += _lines(data)
            self._announce()
        self._changed.notify_all()

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="stderr", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no memory for another thread, or the interpreter is ending
                return False
            self._thread = thread
        return True

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                data = self._take()
                self._writing = True
            written = self._write(data)
            with self._changed:
                self._writing = False
                if written:
                    self._unannounced += self._failed
                    self._failed = 0
                else:
                    self.dropped += _lines(data)
                    self._failed += _lines(data)
                self._announce()
                self._changed.notify_all()

    def _take(self) -> bytes:
        """The oldest line, and those behind it that fit into one write with it."""
        taken = [self._queue.popleft()]
        size = len(taken[0])
        while self._queue and size + len(self._queue[0]) <= PIECE_BYTES:
            taken.append(self._queue.popleft())
            size += len(taken[-1])
        self._size -= size
        return b"".join(taken)

    def _announce(self) -> None:
        if self._unannounced and self._size <= self._limit // 2:
            data = (self.notice(self._unannounced) + "\n").encode("utf-8", "backslashreplace")
            self._unannounced = 0
            self._queue.append(data)
            self._size += len(data)

    def _write(self, data: bytes) -> bool:
        """False: the descriptor takes nothing (its reader is gone, its disk is full)."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # whoever shares it made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True

    def _after_fork(self) -> None:
        """In the child: what is in the queue is the parent's to write, and so is the thread."""
        self._changed = threading.Condition()
        self._queue.clear()
        self._size = 0
        self._partial = ""
        self._writing = False
        self._thread = None
        self._unannounced = self._failed = self.dropped = 0


def _lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))

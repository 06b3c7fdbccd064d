"""Bytes in a file that has no name and lies in memory (memfd): filled piece by piece, handed to
another process by its descriptor, so that nobody copies a large request on the event loop.

Each file has one owner, which closes it: `with MemFile.of(...) as file`, on the event loop `async
with`, or by `close`. A function that returns one says that its caller closes it.

A file that comes from another process is mapped only if it is sealed: one that could still shrink
would end this process with a bus error."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Thread

from stretto.errors import StageDead, WireError

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SMALL_BYTES = 1 << 20
"""Files of this size are freed in a fraction of a millisecond."""
Buffer = bytes | bytearray | memoryview
_CLOSING: SimpleQueue[int] = SimpleQueue()


@dataclass(slots=True, eq=False)
class MemFile:
    """Whoever makes one, by any of the class methods, closes it."""

    fd: int
    size: int = 0

    @classmethod
    def new(cls) -> MemFile:
        return cls(os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    @classmethod
    def of(cls, *parts: Buffer) -> MemFile:
        memfile = cls.new()
        try:
            for part in parts:
                memfile.append(part)
        except BaseException:
            memfile.close()
            raise
        return memfile

    @classmethod
    def sealed(cls, *parts: Buffer) -> MemFile:
        """One that never changes again."""
        memfile = cls.of(*parts)
        fcntl.fcntl(memfile.fd, fcntl.F_ADD_SEALS, SEALS)
        return memfile

    @classmethod
    def received(cls, fd: int) -> MemFile:
        """One that another process made: it must not be able to change any more. A descriptor that
        is refused is closed here."""
        file = cls(fd)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise WireError("a memory file that its sender can still change")
            file.size = os.fstat(fd).st_size
        except OSError as e:  # a descriptor of something else
            file.close()
            raise WireError(f"no memory file ({e.strerror})") from None
        except WireError:
            file.close()
            raise
        return file

    @classmethod
    def trusted(cls, fd: int) -> MemFile:
        """One that the server made, which is trusted."""
        return cls(fd, os.fstat(fd).st_size)

    def append(self, data: Buffer) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            written = os.write(self.fd, rest)
            self.size += written
            rest = rest[written:]

    def read(self, start: int, stop: int) -> bytes:
        """A copy of some of it."""
        data = os.pread(self.fd, stop - start, start)
        if (
            len(data) < stop - start
        ):  # the kernel gives at most 2 GiB at once, and media are limited to far less
            raise WireError(
                f"a memory file of {self.size} bytes gave {len(data)} of {stop - start}"
            )
        return data

    def view(self) -> memoryview:
        """All of it, read-only and not copied. The memory stays until the last view of it is
        gone."""
        if not self.size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close_in_thread(self) -> None:
        """`close` for the event loop, which has no time to free the pages of a large file. Not for
        a process that was forked from one that has called this."""
        if self.size <= SMALL_BYTES:
            self.close()
        elif self.fd >= 0:
            _start_closing()
            _CLOSING.put(self.fd)
            self.fd = -1

    def __enter__(self) -> MemFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> MemFile:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close_in_thread()


def check_room(size: int) -> None:
    """Refuses a process that may not make memory files of this size."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < size:
        raise StageDead(
            f"requests and prompts go through memory files of up to {size >> 20:,} MiB, but files "
            f"may have at most "
            f"{most:,} bytes here (ulimit -f)"
        )


@cache
def _start_closing() -> None:
    """A thread that closes files: to free the pages of 100 MB takes 20 ms, which no event loop
    has."""

    def close_files() -> None:
        while True:
            fd = _CLOSING.get()
            try:
                os.close(fd)
            except OSError as e:
                log.error("a memory file (descriptor %d) could not be closed: %s", fd, e)

    Thread(target=close_files, name="memfile-closer", daemon=True).start()


class MemFileSlice:
    """Bytes that stay in their memory file, from `start` on: read piece by piece and never mapped,
    since unmapping is slow too. The object owns the file: it is closed when the object is freed."""

    def __init__(self, file: MemFile, start: int) -> None:
        self._file = file
        self._start = start
        _start_closing()

    def __len__(self) -> int:
        return self._file.size - self._start

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self._file.read(self._start + start, self._start + stop)

    def __bytes__(self) -> bytes:
        return self[:]

    def __del__(self) -> None:
        # Anything may be under way on this thread, with any lock held: this queue's `put` is made
        # for that.
        fd = self._file.fd
        self._file.fd = -1
        if fd >= 0:
            _CLOSING.put(fd)

"""Bytes in a file that has no name and lies in memory (memfd): filled piece by piece, handed to another process by
its descriptor, so that nobody copies a large request on the event loop.

A file that comes from another process is mapped only if it is sealed: one that could still shrink would end this
process with a bus error."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

from stretto.errors import WireError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
Buffer = bytes | bytearray | memoryview


@dataclass(slots=True, eq=False)
class Spool:
    fd: int
    size: int = 0

    @classmethod
    def new(cls) -> Spool:
        return cls(os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    @classmethod
    def of(cls, *parts: Buffer) -> Spool:
        spool = cls.new()
        for part in parts:
            spool.append(part)
        return spool

    @classmethod
    def received(cls, fd: int) -> Spool:
        """One that another process made: it must not be able to change any more."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            os.close(fd)
            raise WireError("a memory file that its sender can still change")
        return cls(fd, os.fstat(fd).st_size)

    def append(self, data: Buffer) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            written = os.write(self.fd, rest)
            self.size += written
            rest = rest[written:]

    def seal(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

    def view(self) -> memoryview:
        """All of it, read-only and not copied. The memory stays until the last view of it is gone."""
        if not self.size:
            return memoryview(b"")
        return memoryview(mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

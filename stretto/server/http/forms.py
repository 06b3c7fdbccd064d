"""Cuts a body of multipart/form-data into its fields and files. Routes that take files call it on
worker threads: a form may be large, so it is searched window by window, and no call of C code holds
the interpreter for more than a millisecond."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stretto.errors import Invalid
from stretto.preprocess.pool.jobs import ByteRange
from stretto.preprocess.pool.memfile import MemFile

MAX_PARTS = 32
MAX_HEAD = 4096  # bytes of a part's headers
MAX_FIELD = 64 << 10  # bytes of a field that is no file
WINDOW = 256 << 10  # bytes that are searched in one call
_BOUNDARY = re.compile(r"boundary=(?:\"([^\"\r\n]{1,70})\"|([^;\s\"]{1,70}))", re.I)
_NAME = re.compile(rb"[;\s]name=\"([^\"\r\n]{1,64})\"")
_FILE = re.compile(rb"[;\s]filename(?:=|\*=)")
Source = bytes | MemFile
"""A body: small ones are bytes, large ones lie in a memory file."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form:
    fields: dict[str, str]
    # where each file is in the body, by the field's name; the file's own name is not used
    files: dict[str, ByteRange]


def boundary(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise Invalid("multipart/form-data needs a boundary in its Content-Type")
    return (found[1] or found[2]).encode("ascii", "replace")


def parse_form(body: Source, mark: bytes) -> Form:
    """Fields and files. What does not fit the format is `Invalid`."""
    form = Form({}, {})
    line = b"--" + mark
    size = _size(body)
    at = _find(body, line, 0, size)
    if at < 0 or (at and _read(body, max(0, at - 2), at) != b"\r\n"):
        raise Invalid("the body does not begin as multipart/form-data")
    for _ in range(MAX_PARTS):
        at += len(line)
        if _read(body, at, at + 2) == b"--":
            return form
        head = _read(body, at, at + MAX_HEAD)
        head_size = head.find(b"\r\n\r\n")
        start = at + head_size + 4
        end = _find(body, b"\r\n" + line, start - 2, size) if head_size >= 0 else -1
        if head[:2] != b"\r\n" or end < 0:
            raise Invalid("the body is not whole multipart/form-data")
        _take(form, body, head[:head_size], (start, max(end, start)))
        at = end + 2
    raise Invalid(f"a form has at most {MAX_PARTS} fields")


def _take(form: Form, body: Source, head: bytes, value: ByteRange) -> None:
    found = _NAME.search(head)
    if found is None:
        raise Invalid("a field of the form has no name")
    name = found[1].decode("utf-8", "replace")
    # a list comes as several fields of one name
    before = form.fields.pop(name, None) if name.endswith("[]") else None
    if name in form.fields or name in form.files:
        raise Invalid(f"{name} is there twice", name)
    if _FILE.search(head):
        form.files[name] = value
        return
    if value[1] - value[0] > MAX_FIELD:
        raise Invalid(
            f"{name} has more than the {MAX_FIELD:,} bytes of a field that is no file", name
        )
    try:
        text = _read(body, *value).decode()
        form.fields[name] = text if before is None else f"{before},{text}"
    except UnicodeDecodeError:
        raise Invalid(f"{name} is not UTF-8", name) from None


def copy_part(body: Source, part: ByteRange, to: MemFile) -> None:
    """Append a part of a body to a memory file; the kernel copies, so that other threads run."""
    if isinstance(body, bytes):
        to.append(memoryview(body)[slice(*part)])
        return
    start, stop = part
    while start < stop:
        copied = os.sendfile(to.fd, body.fd, start, stop - start)
        start = start + copied
        to.size = to.size + copied


def part_of(body: Source, part: ByteRange) -> MemFile:
    """A memory file with a part of a body; the caller closes it."""
    file = MemFile.new()
    try:
        copy_part(body, part, file)
    except BaseException:
        file.close()
        raise
    return file


async def in_thread(body: Source, work: Callable[[Source], T], discard: Callable[[T], None]) -> T:
    """Do `work` with a body on a worker thread. The thread has a descriptor of its own for a memory
    file: a request that ends meanwhile closes its one, and the result, of which nobody knows any
    more, is discarded."""
    own = MemFile(os.dup(body.fd), body.size) if isinstance(body, MemFile) else body

    def run() -> T:
        try:
            return work(own)
        finally:
            if isinstance(own, MemFile):
                own.close()

    def finish(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    task = asyncio.create_task(asyncio.to_thread(run))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(finish)
        raise


def _size(body: Source) -> int:
    return len(body) if isinstance(body, bytes) else body.size


def _read(body: Source, start: int, stop: int) -> bytes:
    if isinstance(body, bytes):
        return body[start:stop]
    stop = min(stop, body.size)
    return body.read(start, stop) if start < stop else b""


def _find(body: Source, what: bytes, start: int, stop: int) -> int:
    """Where it begins, or -1."""
    while start + len(what) <= stop:
        window = _read(body, start, min(stop, start + WINDOW))
        at = window.find(what)
        if at >= 0:
            return start + at
        start += len(window) - len(what) + 1
    return -1

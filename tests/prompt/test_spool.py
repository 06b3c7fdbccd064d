"""Bytes in memory files, read without being mapped."""

from __future__ import annotations

import gc
import os

import pytest

from stretto.errors import WireError
from stretto.prompt import spool
from stretto.prompt.spool import Spool, Stored


def test_stored_bytes_read_like_bytes() -> None:
    data = os.urandom(1000)
    stored = Stored(Spool.of(b"head", data), 4)
    assert len(stored) == len(data)
    assert bytes(stored) == data
    for part in (slice(0, 10), slice(10, 300), slice(990, 2000), slice(5, 5), slice(None)):
        assert stored[part] == data[part]


def test_the_file_goes_with_what_is_stored_in_it() -> None:
    """On another thread: nobody who drops a prompt waits for its pages to be freed."""
    file = Spool.of(b"x" * 100)
    fd = file.fd
    stored = Stored(file, 0)
    del stored
    gc.collect()
    spool._CLOSERS.submit(lambda: None).result()
    assert file.fd == -1
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_file_that_gives_too_little_is_refused() -> None:
    file = Spool.of(b"short")
    with pytest.raises(WireError, match="gave 5 of 6"):
        file.read(0, 6)
    file.close()

"""Bytes in memory files, read without being mapped."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import os
import threading

import pytest

from stretto.errors import WireError
from stretto.preprocess.pool.memfile import SMALL_BYTES, MemFile, MemFileSlice
from tests.preprocess.pool.files import until_all_are_closed


def test_stored_bytes_read_like_bytes() -> None:
    data = os.urandom(1000)
    stored = MemFileSlice(MemFile.of(b"head", data), 4)
    assert len(stored) == len(data)
    assert bytes(stored) == data
    for part in (slice(0, 10), slice(10, 300), slice(990, 2000), slice(5, 5), slice(None)):
        assert stored[part] == data[part]


def test_the_file_goes_with_what_is_stored_in_it() -> None:
    """On another thread: nobody who drops a prompt waits for its pages to be freed."""
    file = MemFile.of(b"x" * 100)
    fd = file.fd
    stored = MemFileSlice(file, 0)
    del stored
    gc.collect()
    until_all_are_closed()
    assert file.fd == -1
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_large_file_is_closed_in_a_thread_and_a_small_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[int, str] = {}
    close = os.close

    def closed(fd: int) -> None:
        threads.setdefault(fd, threading.current_thread().name)  # its number is used again
        close(fd)

    monkeypatch.setattr(os, "close", closed)
    large = MemFile.of(bytes(SMALL_BYTES + 1))
    small = MemFile.of(bytes(SMALL_BYTES))
    fds = [large.fd, small.fd]
    large.close_in_thread()
    small.close_in_thread()
    large.close_in_thread()  # has no effect a second time
    until_all_are_closed()
    assert [threads[fd] for fd in fds] == ["memfile-closer", threading.current_thread().name]
    assert (large.fd, small.fd) == (-1, -1)


def test_a_file_that_fails_to_close_is_logged_others_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_descriptor = 1 << 30
    MemFile(no_descriptor, SMALL_BYTES + 1).close_in_thread()
    until_all_are_closed()
    assert f"descriptor {no_descriptor}) could not be closed" in caplog.text


def test_what_is_stored_may_go_at_any_moment() -> None:
    """The garbage collector may find it while this thread hands work to an executor, whose lock it
    then holds."""
    stored = [MemFileSlice(MemFile.of(b"x"), 0)]

    def drop() -> None:
        with concurrent.futures.thread._global_shutdown_lock:
            stored.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join()
    until_all_are_closed()


def test_a_file_that_gives_too_little_is_refused() -> None:
    file = MemFile.of(b"short")
    with pytest.raises(WireError, match="gave 5 of 6"):
        file.read(0, 6)
    file.close()

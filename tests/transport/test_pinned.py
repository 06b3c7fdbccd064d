"""The shared mapping, on a machine or in a process without CUDA: plain, shared, alive as long as a
view of it."""

from __future__ import annotations

import os

import pytest
import torch

from stretto.transport.pinned import map_shared


@pytest.fixture
def file() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 16)
    return fd


def test_two_mappings_share_their_bytes(file: int) -> None:
    ours, theirs = map_shared(file, 1 << 16), map_shared(file, 1 << 16)
    os.close(file)
    tensor = torch.frombuffer(memoryview(theirs)[4096:], dtype=torch.int32, count=4)
    ours[4096:4100] = b"\x07\0\0\0"
    del ours, theirs
    assert tensor.tolist() == [7, 0, 0, 0], "the view keeps the mapping"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_nothing_is_registered(file: int) -> None:
    mapping = map_shared(file, 1 << 16)
    os.close(file)
    assert not mapping.register()

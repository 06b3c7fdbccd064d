"""Rows of media that are kept beside cached blocks."""

from collections.abc import Sequence

import torch

from stretto.stage.media_rows import MediaOutput, PayloadStore
from stretto.stage.request import BlockId, RowId
from stretto.stage.scheduler.batch import Published, RowJoin
from stretto.stage.scheduler.blocks import PayloadHandle
from stretto.types import RequestId


def joined(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, None]:
    return torch.cat(list(rows)), None


def output(places: list[int]) -> MediaOutput:
    return MediaOutput(places, torch.tensor(places)[:, None], None)


def join(handles: Sequence[PayloadHandle]) -> RowJoin:
    payloads = tuple(enumerate(handles))
    return RowJoin(RequestId("r"), RowId(0), (), 8, 0, payloads)


def test_a_block_keeps_its_own_rows_of_all_that_was_handed_out() -> None:
    store, handles = PayloadStore(), []

    def attach(block: BlockId, key: bytes, handle: PayloadHandle) -> bool:
        handles.append(handle)
        return True

    blocks = [
        Published(BlockId(5), b"a", 0, 4),
        Published(BlockId(6), b"b", 4, 8),
        Published(BlockId(7), b"c", 8, 12),
    ]
    store.keep(blocks, [output([1, 2, 3]), output([5, 9])], joined, attach)
    assert len(store) == 3
    found = store.found(join(handles[:2]), joined)
    assert found is not None
    assert found.places == [1, 2, 3, 5]
    assert found.rows[:, 0].tolist() == [1, 2, 3, 5]
    for handle in handles:
        store.drop(handle)
    assert not len(store)


def test_blocks_without_media_or_refused_store_nothing() -> None:
    store = PayloadStore()
    blocks = [Published(BlockId(5), b"a", 0, 4)]
    store.keep(blocks, [output([4])], joined, lambda *_: True)
    store.keep(blocks, [output([3])], joined, lambda *_: False)
    assert not len(store)
    assert store.found(join([]), joined) is None

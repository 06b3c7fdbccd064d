"""Rows of media that are kept with cached blocks."""

from collections.abc import Sequence

import torch

from stretto.stage.media_rows import MediaOutput, cached_media, media_of_block
from stretto.stage.request import BlockId, RowId
from stretto.stage.scheduler.batch import Published, RowJoin
from stretto.types import RequestId


def joined(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, None]:
    return torch.cat(list(rows)), None


def output(places: list[int]) -> MediaOutput:
    return MediaOutput(places, torch.tensor(places)[:, None], None)


def join(*payloads: MediaOutput) -> RowJoin:
    return RowJoin(RequestId("r"), RowId(0), (), 8, 0, payloads)


def test_a_block_keeps_its_own_rows_of_all_that_was_handed_out() -> None:
    sent = [output([1, 2, 3]), output([5, 9])]
    blocks = [Published(BlockId(i), b"", 4 * i, 4 * i + 4) for i in range(3)]
    first, second, third = (media_of_block(block, sent, joined) for block in blocks)
    assert first is not None
    assert second is not None
    assert third is not None
    assert third.places == [9]
    found = cached_media(join(first, second), joined)
    assert found is not None
    assert found.places == [1, 2, 3, 5]
    assert found.rows[:, 0].tolist() == [1, 2, 3, 5]


def test_without_media_there_are_no_rows() -> None:
    assert media_of_block(Published(BlockId(5), b"a", 0, 4), [output([4])], joined) is None
    assert cached_media(join(), joined) is None

"""Accept-layer rows of a prompt's media: a stage hands them out with its tokens, and keeps them
with the blocks of the prefix cache (`BlockPool.payloads`), so that a later prompt with the same
beginning has them without computing them. Used by `StageCore`, on the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stretto.stage.scheduler.batch import Published, RowJoin

Join = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.cuda.Event | None]]
"""`Runner.joined`: rows of earlier steps as one tensor, on the stage's stream."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaOutput:
    """Accept-layer rows of prompt positions, on the device; complete once `event` has fired (None:
    now)."""

    places: Sequence[int]
    rows: torch.Tensor
    event: torch.cuda.Event | None


def cached_media(joined: RowJoin, join: Join) -> MediaOutput | None:
    """The rows of a request's beginning that was found in the cache; None: it has none that are
    needed."""
    cached: Sequence[MediaOutput] = joined.payloads
    if not cached:
        return None
    places = [place for media in cached for place in media.places]
    return MediaOutput(places, *join([media.rows for media in cached]))


def media_of_block(block: Published, sent: Sequence[MediaOutput], join: Join) -> MediaOutput | None:
    """The rows of a block, of all that its request has handed out; None: it has none."""
    places: list[int] = []
    rows: list[torch.Tensor] = []
    for media in sent:
        where = np.asarray(media.places)
        low, high = np.searchsorted(where, [block.start, block.stop])
        if low < high:
            places += where[low:high].tolist()
            rows.append(media.rows[low:high])
    if not rows:
        return None
    joined, _ = join(rows)  # cached rows are read on the stage's own stream: they need no event
    return MediaOutput(places, joined, None)

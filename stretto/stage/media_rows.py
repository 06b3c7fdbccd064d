"""Accept-layer rows of a prompt's media: handed out beside a stage's tokens, and kept beside the
prefix cache's blocks, so that a later prompt with the same beginning has them without computing
them. On the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stretto.stage.request import BlockId
from stretto.stage.scheduler.batch import Published, RowJoin
from stretto.stage.scheduler.blocks import PayloadHandle

Join = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.cuda.Event | None]]
"""`Runner.joined`: rows of earlier steps as one tensor, on the stage's stream."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaOutput:
    """Accept-layer rows of prompt positions, on the device; complete once `event` has fired (None:
    now)."""

    places: Sequence[int]
    rows: torch.Tensor
    event: torch.cuda.Event | None


@dataclass(slots=True, eq=False)
class CachedRows:
    """Accept-layer rows that belong to a cached block."""

    places: list[int]
    rows: torch.Tensor


class PayloadStore:
    """Rows kept beside cached blocks, by handle. The scheduler says when a handle is no longer
    needed (`drop`)."""

    def __init__(self) -> None:
        self._rows: dict[PayloadHandle, CachedRows] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    def drop(self, handle: PayloadHandle) -> None:
        del self._rows[handle]

    def keep(
        self,
        blocks: Sequence[Published],
        handed: Sequence[MediaOutput],
        join: Join,
        attach: Callable[[BlockId, bytes, PayloadHandle], bool],
    ) -> None:
        """Blocks became findable: keep what was handed out of their rows, unless `attach` refuses
        it."""
        for block in blocks:
            rows = _within(block, handed, join)
            if rows is not None:
                handle = PayloadHandle(self._next)
                self._next += 1
                self._rows[handle] = rows
                if not attach(block.block, block.key, handle):
                    self.drop(handle)

    def found(self, joined: RowJoin, join: Join) -> MediaOutput | None:
        """The rows of a request's beginning that was found in the cache; None: it has none that are
        needed."""
        cached = [self._rows[handle] for _, handle in joined.payloads]
        return (
            MediaOutput([p for k in cached for p in k.places], *join([k.rows for k in cached]))
            if cached
            else None
        )


def _within(block: Published, handed: Sequence[MediaOutput], join: Join) -> CachedRows | None:
    places: list[int] = []
    rows: list[torch.Tensor] = []
    for media in handed:
        where = np.asarray(media.places)
        low, high = np.searchsorted(where, [block.start, block.stop])
        if low < high:
            places += where[low:high].tolist()
            rows.append(media.rows[low:high])
    # Read by `found` again, on that stream.
    return CachedRows(places, join(rows)[0]) if rows else None

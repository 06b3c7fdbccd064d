"""What passes between scheduler and runner: one `Batch` per step on the way there, one `StepResult`
on the way back. The field comments are the protocol. Made and read on the stage's loop thread;
imports no torch.

The runner keeps, per row id, a block table and the last sampled token on the device. For each
batch, in this order, it sets up the rows in `joined`, then runs `spans`. Batches are launched and
retired in order; one whose launch fails is retired like any other, with `StepResult.failed`, once
those before it are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stretto.errors import StrettoError
from stretto.stage.request import BlockId, Confirmed, Reason, RowId, StageRequest
from stretto.types import RequestId


class RowSpan(NamedTuple):
    """What one row computes in one step: positions [start, stop) of its sequence."""

    request: StageRequest
    row: RowId
    start: int
    stop: int
    # the row at stop - 1 samples token `stop`, into the device row (and later to the host)
    samples: bool
    # True: stop == start + 1, and the input token is the one that the row's previous step sampled,
    # taken from the device row (the host may not know it yet); or it is the prompt's last row, of a
    # request that is `last_on_device`. False: the inputs of all rows are on the host, in
    # `StageRequest.ids` or where the stage keeps input that has no id. After a preemption they are
    # asked for again, generated ones too, so the stage keeps a request's inputs until it is DONE.
    from_device: bool
    # Rows below this were published before and are only computed again for their KV (after a
    # preemption): publish payload for [max(start, publish_from), stop) alone.
    publish_from: int
    # table[first_block : first_block + len(new_blocks)] = new_blocks, before the step runs. What
    # the table holds beyond the block of row stop - 1 is stale.
    first_block: int
    new_blocks: tuple[BlockId, ...]
    # the scheduler's: results of an older epoch are surplus
    epoch: int


class RowJoin(NamedTuple):
    """A row changes hands, before the spans of its batch."""

    request: StageRequest
    row: RowId
    # the whole table so far; `new_blocks` of the same batch come on top
    blocks: tuple[BlockId, ...]
    # rows whose KV is in those blocks
    filled: int
    # Rows [reused_from, filled) came from the prefix cache and were never launched for this
    # request: their output is confirmed, and their payload, where they have one and the request
    # needs it, is in `payloads`, block by block. Often an empty range.
    reused_from: int
    payloads: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, as the scheduler wants it."""

    # 0, 1, 2, ... in launch order
    step: int
    # at most one per row; decodes first, then prefill chunks; most urgent first in each
    spans: tuple[RowSpan, ...]
    # spans[:num_decodes] each compute one row and sample
    num_decodes: int
    # rows computed by all spans
    num_tokens: int
    # since the batch before; no step in flight uses these rows
    joined: tuple[RowJoin, ...]

    @property
    def decode_only(self) -> bool:
        """One row per span, all sampling: fits a captured graph of at least `len(spans)` rows."""
        return self.num_decodes == len(self.spans)

    @property
    def kind(self) -> str:
        """Of its step, one of `counters.KINDS`."""
        if self.decode_only:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host learned from one step."""

    # What each span picked, in their order: all columns, of which the first is its token. Ignored
    # where the span does not sample.
    rows: Sequence[Sequence[int]]
    # these requests fail, the others stand
    errors: Mapping[RequestId, StrettoError] = field(default_factory=dict)

    @classmethod
    def failed(cls, batch: Batch, error: StrettoError) -> StepResult:
        """The whole step failed."""
        return cls([()] * len(batch.spans), {span.request.id: error for span in batch.spans})


class Published(NamedTuple):
    """A block that became findable, has media rows, and awaits `BlockPool.attach`."""

    block: BlockId
    key: bytes
    # its rows
    start: int
    stop: int


class Outcome(NamedTuple):
    """What a retired step meant for one request. Surplus spans have none."""

    request: StageRequest
    # index of its span in the batch
    at: int
    # rows; as many as before if the span only computed rows again
    confirmed: Confirmed
    # newly certain: all columns of token `confirmed`; empty if the span did not sample
    row: Sequence[int]
    # why the request ended with this step
    reason: Reason | None
    published: tuple[Published, ...]

"""What requests hold: rows of the device state and blocks of KV. Gives them out and takes them
back; never chooses who gets or loses them (the scheduler does). Loop thread only.

Whatever a step in flight still uses goes into deferred_free when its request gives it up, filed
under the last step that uses it, and comes free when that step retires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.stage.request import BlockId, RowId, StageRequest, State
from stretto.stage.scheduler.batch import RowJoin
from stretto.stage.scheduler.blocks import BlockPool


class Allocation:
    def __init__(self, pool: BlockPool, block_size: int, max_rows: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_rows = max_rows
        self.by_row: dict[RowId, StageRequest] = {}
        # since the last batch
        self.joined: list[RowJoin] = []
        # blocks in deferred_free
        self.num_deferred = 0
        self.free_rows = [RowId(i) for i in reversed(range(max_rows))]
        self.deferred_free: dict[int, list[tuple[list[BlockId], RowId | None]]] = {}

    def num_blocks(self, rows: int) -> int:
        return -(-rows // self.block_size)

    def num_needed(
        self, head: StageRequest, found: list[BlockId], gone: Sequence[StageRequest] = ()
    ) -> int:
        """Blocks with which a new request can be admitted: for all its known rows, beside what the
        running requests need now (but for those that are `gone`), with a block to spare for each of
        these. With fewer it would be preempted, or preempt, at once, and a running request that
        lacks a block could lack it for ever."""
        needed = self.num_blocks(head.cursor.known) - len(head.blocks) - len(found)
        for other in self.by_row.values():
            if other.state is State.RUNNING and other not in gone:
                needed += 1 + max(0, self.num_blocks(other.cursor.known) - len(other.blocks))
        return needed

    def assign_row(self, request: StageRequest, found: list[BlockId]) -> None:
        """Gives the request a row, and the blocks found for its prefix."""
        cursor, row = request.cursor, self.free_rows.pop()
        reused_from = cursor.confirmed
        payloads: list[Any] = []
        if found:
            request.blocks = found
            request.published = len(found)
            cursor.reuse(len(found) * self.block_size)
            if request.spec.needs_payload:
                by_block = self.pool.payloads
                unsent = found[reused_from // self.block_size :]
                payloads = [by_block[block] for block in unsent if block in by_block]
        self.joined.append(
            RowJoin(
                request=request,
                row=row,
                blocks=tuple(request.blocks),
                filled=cursor.filled,
                reused_from=min(reused_from, cursor.filled),
                payloads=tuple(payloads),
            )
        )
        request.row = row
        request.was_admitted = True
        request.num_cached += cursor.filled - self.joined[-1].reused_from
        self.by_row[row] = request

    def release_row(self, request: StageRequest) -> None:
        row = request.row
        if row is None:
            return
        del self.by_row[row]
        request.row = None
        request.device_at = -1
        if self._undo_join(request, row):
            return
        if request.in_flight:
            self.deferred_free.setdefault(request.last_step, []).append(([], row))
        else:
            self.free_rows.append(row)

    def trim(self, request: StageRequest) -> None:
        """Gives up the blocks beyond `filled`. (One that is partly filled is never one that others
        may read.)"""
        keep = self.num_blocks(request.cursor.filled)
        dropped = request.blocks[keep:]
        del request.blocks[keep:]
        request.published = min(request.published, keep)
        if dropped and request.in_flight:
            self.deferred_free.setdefault(request.last_step, []).append((dropped, None))
            self.num_deferred += len(dropped)
        else:
            self.pool.release(dropped)

    def drop(self, request: StageRequest) -> None:
        """Gives up all blocks."""
        request.cursor.vacate()
        self.trim(request)

    def retire(self, step: int) -> None:
        """Step `step` and all before it have retired: what they alone still used is free."""
        for blocks, row in self.deferred_free.pop(step, ()):
            self.num_deferred -= len(blocks)
            self.pool.release(blocks)
            if row is not None:
                self.free_rows.append(row)

    def _undo_join(self, request: StageRequest, row: RowId) -> bool:
        """Takes back a join that was in no batch yet. What it reused from the cache goes too, or
        the payload of those rows would be taken for published."""
        join = next((join for join in self.joined if join.row == row), None)
        if join is None:
            return False
        self.joined.remove(join)
        self.free_rows.append(row)
        if join.reused_from < join.filled:
            self.drop(request)
            request.cursor.disown(join.reused_from)
            request.num_cached -= join.filled - join.reused_from
        return True

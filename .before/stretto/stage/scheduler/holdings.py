"""What requests hold: rows of the device state and blocks of KV. Gives them out and takes them back; never chooses
who gets or loses them (the scheduler does). Loop thread only.

Whatever a step in flight still uses goes into limbo when its request gives it up, filed under the last step that
uses it, and comes free when that step retires."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from stretto.errors import Bug
from stretto.stage.request import BlockId, RowId, StageRequest
from stretto.stage.scheduler.batch import Leave, RowJoin, RowLeave
from stretto.stage.scheduler.blocks import BlockPool, chain_keys


class Holdings:
    def __init__(self, pool: BlockPool, block_size: int, max_rows: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_rows = max_rows
        self.seated: dict[RowId, StageRequest] = {}
        self.joined: list[RowJoin] = []  # since the last batch
        self.left: list[RowLeave] = []
        self.num_limbo = 0  # blocks in limbo
        self._free_rows = [RowId(i) for i in reversed(range(max_rows))]
        self._limbo: dict[int, list[tuple[list[BlockId], RowLeave | None]]] = {}

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def num_blocks(self, rows: int) -> int:
        return -(-rows // self.block_size)

    def find_prefix(self, request: StageRequest) -> list[BlockId]:
        """Cached blocks for the start of a request that has none, held for it from now on. At least the last known
        row is left to compute, because its output is not in the cache."""
        cursor, size = request.cursor, self.block_size
        chain_keys(request, cursor.known - 1, size)
        # Rows that were confirmed before need no payload: it has been published.
        needs = request.spec.needs_payload
        # A generator, because most searches end early and one that finds no room is repeated at every step.
        wanted = (
            (key, needs and media and (i + 1) * size > cursor.confirmed)
            for i, (key, media) in enumerate(islice(request.keys, (cursor.known - 1) // size))
        )
        found = self.pool.find(wanted)
        self.pool.hold(found)
        return found

    def seat(self, request: StageRequest, found: list[BlockId]) -> None:
        """Gives the request a row, and the blocks found for its prefix."""
        cursor, row = request.cursor, self._free_rows.pop()
        reused_from = cursor.confirmed
        payloads = []
        if found:
            needs = request.spec.needs_payload
            request.blocks, request.published = found, len(found)
            cursor.reuse(len(found) * self.block_size)
            for index in range(reused_from // self.block_size, len(found)):
                payload = self.pool.payload(found[index])
                if needs and payload is not None:
                    payloads.append((index, payload))
        self.joined.append(
            RowJoin(
                request=request.id,
                row=row,
                resumed=request.was_admitted,
                blocks=tuple(request.blocks),
                filled=cursor.filled,
                reused_from=min(reused_from, cursor.filled),
                payloads=tuple(payloads),
            )
        )
        request.row, request.was_admitted = row, True
        self.seated[row] = request

    def unseat(self, request: StageRequest, why: Leave) -> None:
        row = request.row
        if row is None:
            return
        del self.seated[row]
        request.row, request.device_at = None, -1
        if self._unjoin(request, row):
            return
        leave = RowLeave(request.id, row, why)
        if request.in_flight:
            self._limbo.setdefault(request.last_step, []).append(([], leave))
        else:
            self._free_row(leave)

    def grow(self, request: StageRequest, count: int) -> None:
        request.blocks.extend(self.pool.take(count))

    def trim(self, request: StageRequest) -> None:
        """Gives up the blocks beyond `filled`. A partly filled block that others may read cannot be written again:
        it goes as well, and its rows are computed again in a block of our own."""
        cursor = request.cursor
        whole, part = divmod(cursor.filled, self.block_size)
        if part and whole < request.published:
            cursor.vacate(whole * self.block_size)
            part = 0
        keep = whole + (part > 0)
        dropped = request.blocks[keep:]
        del request.blocks[keep:]
        request.published = min(request.published, whole)
        self._release(request, dropped)

    def drop(self, request: StageRequest) -> None:
        """Gives up all blocks."""
        request.cursor.vacate()
        self.trim(request)

    def retire(self, step: int) -> None:
        """Step `step` and all before it have retired: what they alone still used is free."""
        for blocks, leave in self._limbo.pop(step, ()):
            self.num_limbo -= len(blocks)
            self.pool.release(blocks)
            if leave is not None:
                self._free_row(leave)

    def _release(self, request: StageRequest, blocks: list[BlockId]) -> None:
        if not blocks:
            return
        if request.in_flight:
            self._limbo.setdefault(request.last_step, []).append((blocks, None))
            self.num_limbo += len(blocks)
        else:
            self.pool.release(blocks)

    def _free_row(self, leave: RowLeave) -> None:
        self._free_rows.append(leave.row)
        self.left.append(leave)

    def _unjoin(self, request: StageRequest, row: RowId) -> bool:
        """Takes back a join that no batch has told the runner of. What it reused from the cache goes too, or the
        payload of those rows would be taken for published."""
        join = next((join for join in self.joined if join.row == row), None)
        if join is None:
            return False
        self.joined.remove(join)
        self._free_rows.append(row)
        if join.reused_from < join.filled:
            self.drop(request)
            request.cursor.disown(join.reused_from)
        return True

    def check(self, requests: list[StageRequest]) -> None:
        """Every block and row is held exactly by those who say so."""
        refs = Counter(block for request in requests for block in request.blocks)
        limbo = [entry for entries in self._limbo.values() for entry in entries]
        refs.update(block for blocks, _ in limbo for block in blocks)
        self.pool.check([refs[BlockId(b)] for b in range(self.pool.num_blocks)])
        if self.num_limbo != sum(len(blocks) for blocks, _ in limbo):
            raise Bug("limbo miscounted")
        rows = self._free_rows + list(self.seated) + [leave.row for _, leave in limbo if leave is not None]
        if sorted(rows) != list(range(self.max_rows)):
            raise Bug(f"rows lost or shared: {sorted(rows)}")
        if {r.arrival for r in requests if r.row is not None} != {r.arrival for r in self.seated.values()}:
            raise Bug("seated requests and their rows differ")
        for request in requests:
            if request.cursor.filled > len(request.blocks) * self.block_size:
                raise Bug(f"{request.id}: {request.cursor.filled} rows in {len(request.blocks)} blocks")

"""What holds of a scheduler between any two calls: states, queue, rows and blocks agree. Asserted
by tests after steps and at idle moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stretto.stage.request import BlockId, Cursor, StageRequest, State
from stretto.stage.scheduler.allocation import Allocation
from stretto.stage.scheduler.blocks import BlockPool
from stretto.stage.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    table = scheduler.table
    requests = list(table.requests.values())
    check_holdings(table.allocation, requests)
    for r in requests:
        check_cursor(r.cursor)
        state, seated = r.state, r.row is not None
        assert state is not State.DONE, r.id
        assert seated or state is not State.RUNNING, r.id
        assert not (seated and state is State.WAITING), r.id
        assert (state is State.WAITING) == (r.id in table.waiting), f"{r.id} is {state.name}"
        assert r.starved == (state is State.STARVED), f"{r.id} is {state.name}, starved={r.starved}"
        assert r.in_flight == sum(
            span.request is r for batch in scheduler.in_flight for span in batch.spans
        ), r.id


def check_cursor(c: Cursor) -> None:
    assert 0 <= c.confirmed <= c.launched <= c.known, c
    assert 0 <= c.filled <= c.launched, c
    assert c.prompt <= c.known, c


def check_holdings(allocation: Allocation, requests: Sequence[StageRequest]) -> None:
    """Every block and row is held exactly by those who say so."""
    refs = Counter(block for request in requests for block in request.blocks)
    deferred_free = [entry for entries in allocation.deferred_free.values() for entry in entries]
    refs.update(block for blocks, _ in deferred_free for block in blocks)
    check_pool(allocation.pool, [refs[BlockId(b)] for b in range(allocation.pool.num_blocks)])
    assert allocation.num_deferred == sum(len(blocks) for blocks, _ in deferred_free)
    rows = (
        allocation.free_rows
        + list(allocation.by_row)
        + [row for _, row in deferred_free if row is not None]
    )
    assert sorted(rows) == list(range(allocation.max_rows)), "rows lost or shared"
    assert {r.arrival for r in requests if r.row is not None} == {
        r.arrival for r in allocation.by_row.values()
    }
    for r in requests:
        assert r.cursor.filled <= len(r.blocks) * allocation.block_size, (
            f"{r.id}: {r.cursor.filled} rows"
        )


def check_pool(pool: BlockPool, refs: Sequence[int] | None = None) -> None:
    """Conservation, and that each block is where its reference count and key say. `refs`: how often
    each block is referred to, as counted by the caller."""
    free, cached = set(pool.free), set(pool.cached)
    held = {BlockId(b) for b, n in enumerate(pool.refs) if n > 0}
    assert len(free) == len(pool.free)
    assert len(free | cached | held) == len(free) + len(cached) + len(held), (
        "a block is in two places"
    )
    assert len(free) + len(held) + len(cached) == pool.num_blocks, "blocks lost"
    assert all(pool.keys[block] is None for block in free)
    assert all(pool.keys[block] is not None for block in cached)
    assert {key: block for block, key in enumerate(pool.keys) if key is not None} == pool.index
    assert all(pool.keys[block] is not None for block in pool.payloads)
    if refs is not None:
        assert list(refs) == pool.refs

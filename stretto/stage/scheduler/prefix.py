"""The prefix cache, as the scheduler uses it: which blocks the beginning of a request is in
already, and which of its own others may find from now on. On the stage's loop thread."""

from __future__ import annotations

from itertools import islice

from stretto.stage.request import BlockId, StageRequest
from stretto.stage.scheduler.batch import Published
from stretto.stage.scheduler.blocks import BlockPool, chain_keys


def search(pool: BlockPool, request: StageRequest, size: int) -> list[BlockId]:
    """Cached blocks for the start of a request that has none. At least the last known row is left
    to compute, because its output is not in the cache."""
    cursor = request.cursor
    chain_keys(request, cursor.known - 1, size)
    # Rows that were confirmed before need no payload: it has been published.
    needs = request.spec.needs_payload
    # A generator, because most searches end early and one that finds no room is repeated at every
    # step.
    keys = (
        (key, needs and media and (i + 1) * size > cursor.confirmed)
        for i, (key, media) in enumerate(islice(request.keys, (cursor.known - 1) // size))
    )
    return pool.find(keys)


def publish(pool: BlockPool, request: StageRequest, stop: int, size: int) -> tuple[Published, ...]:
    """Makes blocks findable that are full with the step that computed rows up to `stop`.
    (`confirmed` may be ahead of it: then these rows are computed for a second time, and those after
    them are not there yet.) Returns those that await their payload."""
    # A request that was preempted while the step was in flight has no blocks left to offer.
    rows = min(stop, request.keyable, len(request.blocks) * size)
    chain_keys(request, rows, size)
    awaiting = []
    for index in range(request.published, rows // size):
        key, media = request.keys[index]
        brings_payload = media and request.spec.needs_payload
        if pool.publish(request.blocks[index], key, brings_payload) and brings_payload:
            awaiting.append(Published(request.blocks[index], key, index * size, (index + 1) * size))
    request.published = max(request.published, rows // size)
    return tuple(awaiting)

"""The prefix cache: by which keys the blocks of a request can be found, which of them it finds when
it comes, and which of its own others may find from now on. Called by the scheduler, on the stage's
loop thread."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

from stretto.stage.request import BlockId, Salt, StageRequest
from stretto.stage.scheduler.batch import Published
from stretto.stage.scheduler.blocks import BlockPool

_DIGEST_SIZE = 16


def _digest(parent: bytes, ids: bytes, start: int, salts: Sequence[Salt]) -> bytes:
    """The key of the rows from `start` on with these ids (8 bytes each), after rows whose key is
    `parent`. A salt enters with its place relative to `start`, so that media items side by side
    cannot be mistaken for one another."""
    content = parent + ids
    stop = start + len(ids) // 8
    for salt in salts:
        place = (salt.span.start - start, min(salt.span.stop, stop) - start, len(salt.digest))
        content += array("q", place).tobytes() + salt.digest
    return blake2b(content, digest_size=_DIGEST_SIZE).digest()


def _root(root: bytes) -> bytes:
    return blake2b(root, digest_size=_DIGEST_SIZE, person=b"prefix root").digest()


def prefix_keys(ids: Sequence[int], salts: Sequence[Salt]) -> list[bytes]:
    """For each salt, which come in order, a key for the whole prefix up to its end, whatever the
    block size: other stages salt rows with it that depend on this one's."""
    prefix = blake2b(digest_size=_DIGEST_SIZE, person=b"prefix")
    at = 0
    keys = []
    for salt in salts:
        start, stop = salt.span.start, salt.span.stop
        prefix.update(array("q", (start - at, stop - at, *ids[at:stop])).tobytes() + salt.digest)
        keys.append(prefix.digest())
        at = stop
    return keys


def chain_keys(request: StageRequest, rows: int, block_size: int) -> None:
    """Computes the keys of the request's full blocks below `rows` that are not there yet. Each key
    chains the one before, so a key stands for the whole prefix up to the end of its block."""
    keys = request.keys
    begin, end = len(keys) * block_size, min(rows, request.keyable) // block_size * block_size
    if begin >= end:
        return
    key = keys[-1][0] if keys else _root(request.spec.cache_root)
    ids = array("q", request.ids[begin:end]).tobytes()
    # they come in order, and none reaches into another
    salts, first, last = request.salts, 0, 0
    for start in range(begin, end, block_size):
        stop = start + block_size
        while first < len(salts) and salts[first].span.stop <= start:
            first += 1
        while last < len(salts) and salts[last].span.start < stop:
            last += 1
        inside = salts[first:last]
        key = _digest(key, ids[(start - begin) * 8 : (stop - begin) * 8], start, inside)
        keys.append((key, bool(inside)))


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

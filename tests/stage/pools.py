"""A stage's KV blocks: how many are held, and a prefix cache that forgets."""

from __future__ import annotations

from stretto.stage.scheduler.blocks import BlockPool


def num_held(pool: BlockPool) -> int:
    return pool.num_blocks - pool.num_available


def clear_cache(pool: BlockPool) -> None:
    """Forget everything findable that nobody holds."""
    pool.release(pool.take(pool.num_available))

"""The pool of KV blocks: who holds which block, and which blocks can be found again by their
content. Owned by the scheduler, called on the stage's loop thread only. Knows block ids, never
device memory.

A block is in exactly one of three places:

    free     no request refers to it, and it cannot be found
    held     at least one request (or a step in flight) refers to it; it may also be findable
    cached   no request refers to it, but it can be found; the least recently used goes first

so `free + held + cached == total`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from stretto.errors import Bug
from stretto.stage.request import BlockId


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = [BlockId(i) for i in reversed(range(num_blocks))]
        # oldest first
        self.cached: OrderedDict[BlockId, None] = OrderedDict()
        self.refs = [0] * num_blocks
        self.keys: list[bytes | None] = [None] * num_blocks
        self.index: dict[bytes, BlockId] = {}
        # What a stage keeps with a block that can be found (the accept-layer rows of its media), so
        # that a later request can send those rows on without computing them.
        self.payloads: dict[BlockId, Any] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks to write, free ones first, then the least recently used cached ones."""
        if count > self.num_available:
            raise Bug(f"{count} blocks requested, {self.num_available} available")
        blocks = []
        for _ in range(count):
            if not self.free:
                self._forget(next(iter(self.cached)))
            block = self.free.pop()
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def find(self, keys: Iterable[tuple[bytes, bool]]) -> list[BlockId]:
        """The longest run of leading blocks found under `keys`, each (key, whether a payload must
        be kept with it). Nothing is held yet: call `hold` before anything else can evict them."""
        found = []
        for key, needs_payload in keys:
            block = self.index.get(key)
            if block is None or (needs_payload and block not in self.payloads):
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                del self.cached[block]
            self.refs[block] += 1

    def num_refs(self, block: BlockId) -> int:
        return self.refs[block]

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Gives up one reference to each. In reverse, so that the end of a prefix is evicted before
        its start."""
        for block in reversed(blocks):
            if self.refs[block] <= 0:
                raise Bug(f"block {block} released twice")
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self.keys[block] is None:
                    self.free.append(block)
                else:
                    self.cached[block] = None

    def publish(self, block: BlockId, key: bytes, brings_payload: bool) -> bool:
        """Makes a full, confirmed block findable. False if an equal block already is; a block that
        will bring a payload takes the place of one that has none."""
        other = self.index.get(key)
        if other == block:
            return True
        if self.keys[block] is not None:
            raise Bug(f"block {block} published under two keys")
        if other is not None:
            if not brings_payload or other in self.payloads:
                return False
            self._forget(other)
        self.index[key], self.keys[block] = block, key
        return True

    def attach(self, block: BlockId, key: bytes, payload: Any) -> None:
        """Keeps a payload with a published block, unless the block has been evicted or replaced
        since, or has a payload already."""
        if self.keys[block] == key:
            self.payloads.setdefault(block, payload)

    def _forget(self, block: BlockId) -> None:
        key = self.keys[block]
        if key is None:
            raise Bug(f"block {block} is not findable")
        del self.index[key]
        self.keys[block] = None
        self.payloads.pop(block, None)
        if self.refs[block] == 0:
            del self.cached[block]
            self.free.append(block)

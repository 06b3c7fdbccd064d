"""Media features that a stage asks for, since they were not along with its request: their rows were
thought to be in its caches. Called by the engine, on the event loop; imports no torch."""

from __future__ import annotations

import asyncio

import numpy as np

from stretto.engine.pipeline import PIECE
from stretto.engine.request import Ticket
from stretto.errors import Gone
from stretto.messages.requests import MediaData, MediaRequest
from stretto.preprocess.packed_prompt import PackedPiece


async def supply(t: Ticket, ask: MediaRequest, before: asyncio.Task[None] | None) -> None:
    """Send a stage the features that it asks for, behind those that it asked for `before`: their
    pieces must not be mixed."""
    if before is not None:
        await before
    metas, parts, size = [], [], 0
    for digest in ask.digests:
        piece = t.media.get(digest)
        if piece is None or piece.values is None:
            t.fail(Gone(f"{t.id}: {ask.stage} asks for media that are not there any more"))
            return
        metas.append(PackedPiece(piece.shape, digest, size))
        parts.append(np.ascontiguousarray(piece.values).tobytes())
        size += len(parts[-1])
    blob = b"".join(parts)
    if len(blob) > PIECE:
        await t.pipeline.send_features((ask.stage,), t.id, blob)
        blob = b""
    t.pipeline.send((ask.stage,), MediaData(t.id, ask.stage, tuple(metas)), blob)

"""How the prefix cache tells rows of prompts apart: by token ids, and where ids do not say it all, by salts.

Pure; called by the thinker's and the talker's node when they admit a request or its prompt grows."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.control.messages import Admit
from stretto.models.qwen3_omni.bridge import NUM_OPENING, TalkerPrompt
from stretto.models.qwen3_omni.lanes.talker import TalkerInput
from stretto.models.qwen3_omni.pieces import MediaPiece
from stretto.stage.request import Salt
from stretto.stage.scheduler.blocks import prefix_keys
from stretto.types import Span

OPENING_ID = 1 << 40
"""Ids of the talker's opening rows in the prefix cache begin here: beyond any vocabulary."""


def thinker_salts(pieces: Sequence[MediaPiece]) -> list[Salt]:
    """What tells media rows apart, whose ids are all the same: the digest of the piece that they are of."""
    return sorted((Salt(run, p.digest) for p in pieces for run in p.runs), key=lambda salt: salt.span.start)


def talker_salts(ids: Sequence[int], salts: Sequence[Salt], plan: TalkerPrompt) -> list[Salt]:
    """What tells media rows apart: the thinker's whole prefix up to their end, which they depend on though the talker
    never sees its text. `salts` are the thinker's. What comes behind a piece does not change its salt."""
    rows = {place: row for row, place in enumerate(plan.places)}
    keyed = zip(salts, prefix_keys(ids, salts), strict=True)
    found = ((rows.get(salt.span.start), len(salt.span), key) for salt, key in keyed)
    return [Salt(Span(row, row + size), key) for row, size, key in found if row is not None]


def talker_root(a: Admit, plan: TalkerPrompt) -> bytes:
    """Rows meet in the talker's cache only if they are of one owner and one voice."""
    return b"%d " % plan.speaker + a.cache_root


def row_ids(given: TalkerInput, start: int, stop: int) -> list[int]:
    """What tells the talker's prompt rows [start, stop), for the prefix cache: user tokens by id, opening rows by their
    place, and the last one by the text token in it. (Voices are kept apart by the cache's root.)"""
    users = len(given.prompt.ids)
    last = users + NUM_OPENING - 1
    ids = list(given.prompt.ids[start : min(stop, users)])
    for row in range(max(start, users), stop):
        ids.append(OPENING_ID + row - users if row < last else OPENING_ID + NUM_OPENING + given.text[0])
    return ids

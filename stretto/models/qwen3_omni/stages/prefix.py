"""By what the prefix cache distinguishes rows of prompts: by token ids and, where ids do not
describe them, by salts.

Pure; called by the thinker's and the talker's stage when they admit a request or its prompt
grows."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.models.qwen3_omni.bridge import NUM_OPENING, TalkerPrompt
from stretto.models.qwen3_omni.pieces import MediaPiece
from stretto.models.qwen3_omni.talker import TalkerInput
from stretto.stage.request import Salt
from stretto.stage.scheduler.prefix import prefix_keys
from stretto.types import Span

OPENING_ID = 1 << 40
"""Ids of the talker's opening rows in the prefix cache begin here: beyond any vocabulary."""
SPEAKER_ID, SPEAKER_ROW = 1 << 41, 6
"""Those of the row that carries the voice, and which of the opening rows that is."""


def thinker_salts(pieces: Sequence[MediaPiece]) -> list[Salt]:
    """Salts of media rows, whose ids are all the same: the digest of the piece that they belong
    to."""
    return sorted(
        (Salt(run, p.digest) for p in pieces for run in p.runs), key=lambda salt: salt.span.start
    )


def talker_salts(ids: Sequence[int], salts: Sequence[Salt], plan: TalkerPrompt) -> list[Salt]:
    """Salts of media rows: the thinker's whole prefix up to their end, on which they depend though
    the talker never sees its text. `salts` are the thinker's. What comes behind a piece does not
    change its salt."""
    rows = {place: row for row, place in enumerate(plan.places)}
    keyed = zip(salts, prefix_keys(ids, salts), strict=True)
    found = ((rows.get(salt.span.start), len(salt.span), key) for salt, key in keyed)
    return [Salt(Span(row, row + size), key) for row, size, key in found if row is not None]


def row_ids(state: TalkerInput, start: int, stop: int) -> list[int]:
    """Ids of the talker's prompt rows [start, stop) for the prefix cache: of user rows their token,
    of opening rows their place, of one of these the voice in it, of the last one its text token."""
    users = len(state.prompt.ids)
    row_ids = {SPEAKER_ROW: SPEAKER_ID + state.prompt.speaker}
    if state.text:
        row_ids[NUM_OPENING - 1] = OPENING_ID + NUM_OPENING + state.text[0]
    opening = range(max(start - users, 0), max(stop - users, 0))
    return [*state.prompt.ids[start:stop], *(row_ids.get(row, OPENING_ID + row) for row in opening)]

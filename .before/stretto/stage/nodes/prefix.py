"""How the prefix cache tells rows of prompts apart: by token ids, and where ids do not say it all, by salts.

Pure; called by the thinker's and the talker's node when they admit a request or its prompt grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.models.qwen3_omni.bridge import NUM_OPENING, TalkerPrompt
from stretto.orchestrator.messages import Admit
from stretto.prompt.prompt import Prompt
from stretto.stage.request import Salt
from stretto.stage.runner.talker import TalkerInput
from stretto.stage.scheduler.blocks import prefix_key
from stretto.types import Span

OPENING_ID = 1 << 40
"""Ids of the talker's opening rows in the prefix cache begin here: beyond any vocabulary."""


def runs_of(places: Sequence[int]) -> list[Span]:
    """Rising positions as runs."""
    runs: list[Span] = []
    for p in places:
        if runs and runs[-1].stop == p:
            runs[-1] = Span(runs[-1].start, p + 1)
        else:
            runs.append(Span(p, p + 1))
    return runs


def thinker_salts(a: Admit, prompt: Prompt, pads: Sequence[int]) -> list[Salt]:
    """What tells media rows apart, whose ids are all the same `pads`: the digest of the media, `a.media`."""
    return [Salt(run, a.media) for run in runs_of(np.flatnonzero(np.isin(prompt.ids, pads)).tolist())]


def talker_salts(a: Admit, prompt: Prompt, plan: TalkerPrompt) -> list[Salt]:
    """What tells media rows apart: the thinker's whole prefix up to their end, which they depend on though the talker
    never sees its text. `a.media` is the digest of the media themselves."""
    if not a.media:
        return []
    told = [Salt(Span(0, len(prompt.ids)), a.media)]
    return [
        Salt(run, prefix_key(prompt.ids[: plan.places[run.stop - 1] + 1], told))
        for run in runs_of(np.flatnonzero(plan.is_media).tolist())
    ]


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

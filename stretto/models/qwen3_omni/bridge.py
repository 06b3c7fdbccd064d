"""What a thinker's row means to the talker.

The talker sees the user's turns and the answer, never system or earlier assistant turns. Its prompt
is the rows of the user turns in order (text by id, media by the thinker's accept-layer rows), then
nine rows that open the answer; the last of them carries the first text token. All but the media
rows and that last row is known from the ids alone, when the request arrives. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.errors import Invalid
from stretto.models.qwen3_omni.config import OmniConfig, TokenIds
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.preprocess.prompt import Prompt

NUM_OPENING = 9
"""Rows that open the answer: role, voice and codec markers, and the first text token."""


@dataclass(frozen=True, slots=True, eq=False)
class TalkerPrompt:
    """The talker's prompt as known when the request arrives. Host data."""

    ids: tuple[int, ...]  # ids of the user turns
    places: tuple[int, ...]  # their positions in the thinker's prompt
    is_media: npt.NDArray[np.bool_]  # [len(ids)]: rows that wait for the thinker
    positions: npt.NDArray[np.float32]  # [3, len(ids) + 9]
    first_decode: float  # rotary position of the first row after the prompt
    role: tuple[int, ...]  # the three ids that open the answer's turn
    speaker: int

    def __len__(self) -> int:
        return len(self.ids) + NUM_OPENING


def user_places(ids: Sequence[int], tokens: TokenIds) -> list[int]:
    """Positions inside user turns: from a turn's <|im_start|> up to the next one."""
    flat = np.asarray(ids)
    starts = np.flatnonzero(flat == tokens.im_start)
    places: list[int] = []
    for start, stop in zip(starts, [*starts[1:], len(flat)], strict=True):
        if start + 1 < len(flat) and flat[start + 1] == tokens.user:
            places.extend(range(int(start), int(stop)))
    return places


def talker_prompt(
    prompt: Prompt, config: OmniConfig, voice: str | None = None, *, prefill_only: bool = False
) -> TalkerPrompt:
    """`prefill_only`: of a prompt that goes on, so that there is no answer to be opened yet."""
    talker, tokens = config.talker, config.tokens
    role = prompt.ids[-3:]
    if not prefill_only and role[:2] != (tokens.im_start, tokens.assistant):
        raise Invalid(
            "a prompt to be answered aloud must end with the opening of the assistant's turn",
            "messages",
        )
    places = user_places(prompt.ids, tokens)
    ids = [prompt.ids[p] for p in places]
    # A sound track merged into a video gets plain consecutive positions here: the reference model
    # never tells its talker that the two were merged.
    merged = prompt.audio_in_video
    positions, first_decode = rope_positions(
        [tokens.tts_pad if merged and i in tokens.media_pads else i for i in ids]
        + [tokens.tts_pad] * NUM_OPENING,
        tokens,
        talker.merge,
        talker.positions_per_second,
        () if merged else prompt.images,
        () if merged else prompt.videos,
    )
    return TalkerPrompt(
        ids=tuple(ids),
        places=tuple(places),
        is_media=np.isin(np.asarray(ids, dtype=np.int64), tokens.media_pads),
        positions=positions,
        first_decode=first_decode,
        role=role,
        speaker=talker.speaker_id(voice if voice is not None else talker.default_voice),
    )

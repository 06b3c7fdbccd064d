"""Training rows of the talker in the released layout, position by position.

An example is the user's turns, nine opening rows (role, marks, voice, the first word) and one row
per frame. Row `9 - 1 + j` of the answer gives frame j (its own code 0, and codes 1..15 through the
predictor), from the previous frame's codes and one more word: the text is fed one token per frame,
then one end mark, then padding. After the last frame comes the end code. `docs`: "Talker prompt
rows" in the model's description; a test compares these rows with `transformers`. Called by
`talker.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.models.qwen3_omni.config import OmniConfig

NONE = -1
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """Which word each token of an answer is of, and which word each frame is of."""

    tokens: npt.NDArray[np.int64]  # rising
    frames: npt.NDArray[np.int64]  # numbers that no token has: of no word

    def rows(self, first: int) -> tuple[Ints, Ints]:
        """For every frame, the first and the last row with text of its word, as far as they have
        been fed by then."""
        low = np.searchsorted(self.tokens, self.frames, side="left") + first
        high = np.searchsorted(self.tokens, self.frames, side="right") - 1 + first
        high = np.minimum(high, first + np.arange(len(self.frames)))
        there = low <= high
        return np.where(there, low, NONE).astype(np.int32), np.where(there, high, NONE).astype(
            np.int32
        )


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Rows of one utterance; all of one length."""

    text: Ints  # id whose projected embedding is added, or NONE: nothing is
    # id of the talker's vocabulary that is added, or NONE; where a frame precedes, it is its code 0
    mark: Ints
    before: Ints  # number of the frame whose codes 1..15 are added, or NONE
    frame: Ints  # number of the frame this row has to give, or NONE
    end: npt.NDArray[np.bool_]  # this row has to give the end code
    low: Ints  # the first row with text of the word that this row's frame is part of, or NONE
    high: Ints  # the last such row


def example(
    config: OmniConfig,
    user: Sequence[int],
    role: Sequence[int],
    spoken: Sequence[int],
    frames: int,
    voice: str,
    said: Said | None = None,
) -> Example:
    """`user`: ids of the user's turns; `role`: the three ids that open the answer; `spoken`: ids of
    the answer."""
    t, codec = config.tokens, config.talker.codec
    prefix = len(user)
    length = prefix + 9 + frames
    text = np.full(length, t.tts_pad, np.int32)
    text[:prefix] = user
    text[prefix : prefix + 3] = role
    text[prefix + 7] = t.tts_bos
    words = np.array([*spoken, t.tts_eos], np.int32)[: frames + 1]
    text[prefix + 8 : prefix + 8 + len(words)] = words
    mark = np.full(length, NONE, np.int32)
    speaker = config.talker.speaker_id(voice)
    mark[prefix + 3 : prefix + 9] = (
        codec.nothink,
        codec.think_bos,
        codec.think_eos,
        speaker,
        codec.pad,
        codec.bos,
    )
    before, frame = np.full(length, NONE, np.int32), np.full(length, NONE, np.int32)
    before[prefix + 9 :] = np.arange(frames)
    frame[prefix + 8 : prefix + 8 + frames] = np.arange(frames)
    end = np.zeros(length, np.bool_)
    end[-1] = True
    low, high = np.full(length, NONE, np.int32), np.full(length, NONE, np.int32)
    if said is not None:
        low[prefix + 8 : prefix + 8 + frames], high[prefix + 8 : prefix + 8 + frames] = said.rows(
            prefix + 8
        )
    return Example(text, mark, before, frame, end, low, high)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Examples side by side in rows of one width. [rows, width] each; `before` and `frame` count in
    one table."""

    text: Ints
    mark: Ints
    before: Ints
    frame: Ints
    end: npt.NDArray[np.bool_]
    segments: Ints
    positions: Ints
    low: Ints  # column in the row
    high: Ints


def side_by_side(examples: Sequence[tuple[Example, int]], width: int) -> Batch:
    """Pack (example, number of its first frame in the table); longer ones than a row are left
    out."""
    bins: list[list[int]] = []
    room: list[int] = []
    open_bins: list[int] = []
    for i, (e, _) in enumerate(examples):
        size = len(e.text)
        if size > width:
            continue
        place = next((b for b in open_bins if room[b] >= size), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(width)
            open_bins.append(place)
        bins[place].append(i)
        room[place] -= size
        open_bins = [b for b in open_bins[-64:] if room[b] >= 40]
    count = len(bins)
    text, segments, positions = (np.zeros((count, width), np.int32) for _ in range(3))
    mark, before, frame, low, high = (np.full((count, width), NONE, np.int32) for _ in range(5))
    end = np.zeros((count, width), np.bool_)
    for r, members in enumerate(bins):
        used = 0
        for number, i in enumerate(members, start=1):
            e, first = examples[i]
            part = slice(used, used + len(e.text))
            text[r, part], mark[r, part], end[r, part] = e.text, e.mark, e.end
            before[r, part] = np.where(e.before >= 0, e.before + first, NONE)
            frame[r, part] = np.where(e.frame >= 0, e.frame + first, NONE)
            low[r, part] = np.where(e.low >= 0, e.low + used, NONE)
            high[r, part] = np.where(e.high >= 0, e.high + used, NONE)
            segments[r, part], positions[r, part] = number, range(len(e.text))
            used = part.stop
    return Batch(text, mark, before, frame, end, segments, positions, low, high)

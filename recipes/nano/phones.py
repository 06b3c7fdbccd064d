"""What is said in each frame of the teacher's speech: two phones and the number of the word.

The teacher knows when each phone ends, so nothing has to be aligned. Only training reads this
(`aids.py`): it tells the talker where in the text it is. Called by `corpus.py`; stored with the
codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recipes.nano.audio import HOP, frames
from recipes.nano.festival import NO_WORD, PAUSE, Uttered

Labels = npt.NDArray[
    np.uint8
]  # [frames, 3]: the phone at a quarter and at three quarters, the word in the middle
UNKNOWN = 255  # phone of a frame without labels


def labels(u: Uttered) -> Labels:
    """Of each frame of an utterance. After the last phone there is a pause."""
    count = frames(len(u.samples))
    phones, words = np.append(u.phones, PAUSE), np.append(u.words, NO_WORD)

    def at(part: float) -> npt.NDArray[np.intp]:
        return np.searchsorted(u.ends, (np.arange(count) + part) * HOP, side="right")

    return np.stack((phones[at(0.25)], phones[at(0.75)], words[at(0.5)]), axis=1).astype(np.uint8)


def unknown(count: int) -> Labels:
    """Labels of frames of which nothing is known."""
    return np.full((count, 3), UNKNOWN, np.uint8)

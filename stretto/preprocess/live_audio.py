"""Sound that is being spoken, as features: window by window while it comes, and as a clip when it
is over.

Mel values are clamped to eight decades below the clip's loudest cell, which is known only at the
end. So the unclamped values are kept, and windows are clamped by what was loudest so far; a louder
sound changes those windows that reach below its floor, and no others. When the sound is over, its
pieces are those of the whole clip to the last bit.

One for each utterance, on one thread at a time. Memory: 51 kB for each second, twice where windows
are complete."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stretto.preprocess.mel import RANGE, MelStream, normalise
from stretto.preprocess.prompt import Array, AudioClip, Piece


@dataclass(slots=True, eq=False)
class _Window:
    log_mel: Array  # [bins, frames], not clamped
    low: float  # its smallest value
    piece: Piece | None = None
    peak: float = float("-inf")  # the loudest cell that `piece` was made with

    def changes(self, peak: float) -> bool:
        """Whether a loudest cell that grew to `peak` alters any value."""
        return peak > self.peak and self.low < float(np.float32(peak) - np.float32(RANGE))


@dataclass(slots=True, eq=False)
class LiveAudio:
    num_bins: int
    window: int  # frames
    changed: int = 0  # windows that a louder sound changed after they had been given out
    _mel: MelStream = field(init=False)
    _windows: list[_Window] = field(init=False, default_factory=list)  # complete ones
    _tail: list[Array] = field(init=False, default_factory=list)  # frames of the open one
    _open: int = field(init=False, default=0)  # how many

    def __post_init__(self) -> None:
        self._mel = MelStream(self.num_bins)

    @property
    def num_samples(self) -> int:
        return self._mel.num_samples

    def push(self, samples: npt.ArrayLike) -> bool:
        """Mono samples at 16 kHz. True: a window was completed."""
        before = len(self._windows)
        self._take(self._mel.push(samples))
        return len(self._windows) > before

    def clip(self) -> AudioClip:
        """The complete windows, as they stand by now."""
        return AudioClip(tuple(self._piece(w) for w in self._windows))

    def fork(self) -> LiveAudio:
        """Another that goes on from here, for when this one is finished too early. Features are
        shared; what is counted begins anew."""
        other = copy(self)
        other.changed = 0
        other._mel, other._windows, other._tail = (
            copy(self._mel),
            [copy(w) for w in self._windows],
            self._tail.copy(),
        )
        return other

    def finish(self) -> AudioClip:
        """No more sound: all of it. Raises `MediaError` if there is too little."""
        self._take(self._mel.finish())
        if self._open:
            self._close()
        return self.clip()

    def _take(self, frames: Array) -> None:
        while frames.shape[1]:
            part = frames[:, : self.window - self._open]
            self._tail.append(part)
            self._open += part.shape[1]
            frames = frames[:, part.shape[1] :]
            if self._open == self.window:
                self._close()

    def _close(self) -> None:
        log_mel = np.concatenate(self._tail, 1)
        self._windows.append(_Window(log_mel, float(log_mel.min())))
        self._tail = []
        self._open = 0

    def _piece(self, w: _Window) -> Piece:
        peak = self._mel.maximum
        if w.piece is None or w.changes(peak):
            self.changed += w.piece is not None
            w.piece = Piece.of(normalise(w.log_mel, peak))
        w.peak = peak
        return w.piece

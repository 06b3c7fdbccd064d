"""The pieces of a prompt's media: which rows of the prompt each stands for. Pure; imports no torch.

Called by the thinker's and the talker's stage when they admit a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.errors import Invalid
from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens
from stretto.preprocess.prompt import Array, Piece, Prompt
from stretto.types import Span

Places = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class MediaPiece:
    """What is encoded at once: a window of a clip, a picture, a video."""

    digest: bytes
    values: Array | None  # None: to be asked for
    places: Places  # rising positions in the prompt; a video and its sound track take turns
    runs: list[Span]  # the same
    grid: tuple[int, int, int] | None = None  # of a picture or a video
    # to whole convolution chunks, as all windows are but that of a clip shorter than a chunk
    padded: bool = True

    @property
    def stop(self) -> int:
        """Behind its last row."""
        return self.runs[-1].stop


def media_pieces(prompt: Prompt, config: OmniConfig) -> list[MediaPiece]:
    """By the place where each begins."""
    tokens, ids = config.tokens, np.asarray(prompt.ids, dtype=np.int64)
    chunk, merge = config.thinker.audio.chunk_frames, config.thinker.vision.merge**2
    found = []
    pads = _Pads(np.flatnonzero(ids == tokens.audio_pad), "sound")
    for clip in prompt.audios:
        if any(len(p.shape) != 2 for p in clip.pieces):
            raise Invalid(
                f"the features of a clip have two dimensions, not {[p.shape for p in clip.pieces]}"
            )
        for i, p in enumerate(clip.pieces):
            piece = _piece(p, pads.take(audio_tokens(p.shape[1], chunk)))
            piece.padded = i > 0 or p.shape[1] >= chunk
            found.append(piece)
    pads.check()
    for pad, media in ((tokens.image_pad, prompt.images), (tokens.video_pad, prompt.videos)):
        pads = _Pads(np.flatnonzero(ids == pad), "pictures")
        for patches in media:
            piece = _piece(patches.piece, pads.take(int(np.prod(patches.grid)) // merge))
            piece.grid = patches.grid
            found.append(piece)
        pads.check()
    return sorted((p for p in found if p.runs), key=lambda p: p.runs[0].start)


def _piece(p: Piece, places: Places) -> MediaPiece:
    return MediaPiece(p.digest, p.values, places, runs_of(places))


@dataclass(slots=True, eq=False)
class _Pads:
    """The rows of one kind of media, given out in order."""

    places: Places
    what: str
    taken: int = 0

    def take(self, count: int) -> Places:
        self.taken += count
        return self.places[self.taken - count : self.taken]

    def check(self) -> None:
        if self.taken != len(self.places):
            raise Invalid(
                f"{len(self.places)} rows of {self.what} in the prompt, and features of "
                f"{self.taken}"
            )


def runs_of(places: Places | Sequence[int]) -> list[Span]:
    """Rising positions as runs."""
    flat = np.asarray(places, dtype=np.int64)
    if not len(flat):
        return []
    if flat[-1] - flat[0] + 1 == len(flat):  # as a window of sound
        return [Span(int(flat[0]), int(flat[-1]) + 1)]
    cuts = np.flatnonzero(np.diff(flat) != 1) + 1
    starts, lasts = flat[np.r_[0, cuts]].tolist(), flat[np.r_[cuts - 1, len(flat) - 1]].tolist()
    return [Span(a, b + 1) for a, b in zip(starts, lasts, strict=True)]


def missing_runs(pieces: Sequence[MediaPiece]) -> list[Span]:
    """The rows of these pieces, in order."""
    return sorted((run for p in pieces for run in p.runs), key=lambda run: run.start)

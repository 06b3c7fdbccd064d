"""Cuts sound into segments where speech pauses, for transcripts with times. Pure; called by the
prompt worker.

What is loud is found from the sound itself: a frame of 10 ms is loud over twice the level that a
tenth of the frames stay under, within bounds of the loud ones' level. Where nothing is loud for
0.3 s is a pause. A segment ends at the first pause of 0.6 s after it has lasted 3 s; if none comes
within 10 s at the longest pause there is, after 3 s if possible, and at the quietest place if there
is none. It holds up to a second of quiet on each side, for the model; its times are those of what
is loud."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pcm = npt.NDArray[np.int16]
FRAME_S, PAUSE_S, LONG_PAUSE_S = 0.01, 0.3, 0.6
SHORTEST_S, LONGEST_S = 3.0, 10.0
MARGIN_S = 1.0  # of quiet, on each side
_THRESHOLDS = 0.03, 0.3  # bounds of the threshold, as parts of the loud frames' level
_SILENCE = 10.0  # of 32,768: under this, nothing is loud


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """Samples: from where to where it is cut, and within that what is loud."""

    start: int
    stop: int
    loud_start: int
    loud_stop: int


Span = tuple[int, int]  # frames


def segments(samples: Pcm, rate: int) -> list[SpeechSegment]:
    """The segments of a sound, in order; none where nothing is loud. They do not overlap."""
    step = round(FRAME_S * rate)
    levels = _levels(samples, step)
    spans = list(_segments(_loud_spans(levels), levels))
    found = []
    margin = round(MARGIN_S / FRAME_S)
    for i, (start, stop) in enumerate(spans):
        before = spans[i - 1][1] if i else -start
        after = spans[i + 1][0] if i + 1 < len(spans) else 2 * len(levels) - stop
        first = max(start - margin, (before + start + 1) // 2)
        last = min(stop + margin, (stop + after + 1) // 2)
        edges = (min(frame * step, len(samples)) for frame in (first, last, start, stop))
        found.append(SpeechSegment(*edges))
    return found


def _levels(samples: Pcm, step: int) -> npt.NDArray[np.float32]:
    """The level of each frame; the last frame may be short."""
    whole = len(samples) // step * step
    frames = samples[:whole].reshape(-1, step).astype(np.float32)
    rest = samples[whole:].astype(np.float32)
    levels = np.sqrt(np.square(frames).mean(1))
    last = np.sqrt(np.square(rest).mean(keepdims=True)) if len(rest) else levels[:0]
    return np.concatenate([levels, last])


def _loud_spans(levels: npt.NDArray[np.float32]) -> list[Span]:
    """The spans between pauses."""
    if not len(levels):
        return []
    quiet, loud = np.percentile(levels, (10, 95))
    threshold = max(
        _SILENCE, float(np.clip(2 * quiet, _THRESHOLDS[0] * loud, _THRESHOLDS[1] * loud))
    )
    frames = np.flatnonzero(levels > threshold)
    if not len(frames):
        return []
    gaps = np.flatnonzero(np.diff(frames) > PAUSE_S / FRAME_S)
    starts = frames[np.concatenate([[0], gaps + 1])].tolist()
    stops = (frames[np.concatenate([gaps, [len(frames) - 1]])] + 1).tolist()
    return list(zip(starts, stops, strict=True))


def _segments(spans: list[Span], levels: npt.NDArray[np.float32]) -> Iterator[Span]:
    longest = round(LONGEST_S / FRAME_S)
    at = 0
    while at < len(spans):
        start, stop = spans[at]
        if stop - start > longest:
            tail = start + longest - longest // 5
            cut = tail + int(levels[tail : start + longest].argmin()) + 1
            yield start, cut
            spans[at] = cut, stop
            continue
        end = _last_of(spans, at)
        yield start, spans[end][1]
        at = end + 1


def _last_of(spans: list[Span], first: int) -> int:
    """The span that a segment ends with."""
    start = spans[first][0]
    pauses: list[tuple[bool, int, int]] = []  # and the spans before them
    for i in range(first, len(spans)):
        if i > first and spans[i][1] - start > LONGEST_S / FRAME_S:
            return max(pauses)[-1]
        pause = spans[i + 1][0] - spans[i][1] if i + 1 < len(spans) else 0
        lasts = spans[i][1] - start >= SHORTEST_S / FRAME_S
        if lasts and pause >= LONG_PAUSE_S / FRAME_S:
            return i
        pauses.append((lasts, pause, i))
    return len(spans) - 1

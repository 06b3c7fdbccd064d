"""Step times of one model on one kind of card, as `python -m bench plan` collects them from measurements. No torch.

A pipeline is, to the planner, a stage that writes text, a stage that makes frames of it and a vocoder, all on one card.
A table says what their steps take alone, by size, and how much slower they are beside each other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import msgspec

from stretto.errors import Invalid

BINS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows up to which steps are of a kind, where shares of speed are told."""
SMALL = 256
"""Rows up to which a step that holds prompts is a small one, where shares are told."""
Curve = list[tuple[float, float]]
"""Sizes and milliseconds, by size."""


class StageTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    decode: Curve  # rows of a step for requests' next tokens
    prompt: Curve  # rows up to which a pass over prompts is captured, those that decode among them
    tokens: int  # that its KV pool holds
    launch: Curve  # of the host's thread, by the rows of a decode step
    retire: Curve  # of the same, to pass on what came of it
    launch_prompts: Curve  # what more of both, where it holds prompts, by the requests that these are of
    retire_prompts: Curve


class Together(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast steps run beside others, of what they run alone: by the bin of their own rows, then by that of the other
    step's, and last beside one that holds prompts."""

    text: list[list[float]]  # beside frames
    small_prompt: list[float]  # a step of the text stage that holds prompts, up to SMALL rows, by the rows of frames
    large_prompt: list[float]
    frames: list[list[float]]  # beside text
    frames_prompt: float  # a step of the frames stage that holds prompts, beside any of text


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One that the vocoder's calls are captured in."""

    streams: int
    frames: int  # of each
    ms: float  # alone
    beside_ms: float  # beside steps of the others
    text_share: float  # how fast a step of text is meanwhile, of what it would be
    frames_share: float  # and one of frames


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured run, or several of one load, and the replay. By measure, as shares of what was measured."""

    load: str
    fitted: bool  # it is one of those that the table was fitted to
    answers: int
    error: dict[str, float]  # of the mean of several replays
    spread: dict[str, tuple[float, float]]  # of the replays alone: the lowest and the highest
    interval: dict[str, tuple[float, float]]  # 90 % sampling interval of what was measured


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str
    model: str
    memory_gib: float  # of the card
    weights_gib: float
    max_rows: int
    text: StageTimes
    frames: StageTimes
    vocoder: list[Shape]
    launch_vocoder: Curve  # of the host's thread, by streams
    retire_vocoder: Curve
    send: Curve  # the same to hand frames to the vocoder
    push: Curve  # and packets to the server
    varies: list[float]  # what the thread needs for something, of what it needs on average: equally likely ones
    varies_prompts: list[float]  # the same of launches with prompts
    together: Together
    frame_s: float
    opening_s: float  # of the first frame that is not sounded
    overhead_ms: float  # from a request's arrival to its announcement, beside what the server does itself
    jitter_ms: float  # standard deviation of that
    serial_ms: float  # of the server's thread, for a request that comes
    build_ms: float  # of the same, when it is announced
    admit_ms: float  # of the host's thread, for a request that is announced
    admit_next_ms: float  # and for one that follows another at once
    hop_us: float  # until the host's thread wakes up
    text_us: float  # of the server's thread, for a piece of text
    packet_us: float  # and for a packet
    packet_frame_us: float  # and for each frame in it
    back_ms: float  # from there to the listener
    opening_ms: float  # the same for the first piece of an answer
    end_ms: float  # of the server's thread, for the end of an answer
    end_frame_us: float  # and for each frame that it had
    made_by: str
    error: dict[str, float] = {}  # of the replay against the measured runs, as shares: the mean
    worst: dict[str, float] = {}  # and of the run that it is farthest from
    checks: list[Check] = []  # run by run
    pooled: list[Check] = []  # by load, of those with several runs that were not fitted, taken together
    between: dict[str, dict[str, float]] = {}  # by load: how far its measured runs were from each other


def read_table(path: Path) -> Table:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except (OSError, msgspec.MsgspecError) as e:
        raise Invalid(f"{path}: no table of step times ({e})", "table") from None


def find_table(gpu: str) -> Path:
    """Of the tables that come with the package (in a checkout: under bench/results)."""
    here = Path(__file__).parent
    folders = (here / "tables", here.parent.parent / "bench" / "results")
    known = {p.stem.removeprefix("plan_"): p for folder in folders for p in sorted(folder.glob("plan_*.json"))}
    if gpu not in known:
        raise Invalid(f"no step times of {gpu!r} are known, only of {', '.join(sorted(known)) or 'none'}", "gpu")
    return known[gpu]


def bin_of(rows: int) -> int:
    """Of these rows, or the last."""
    return min(bisect_left(BINS, rows), len(BINS) - 1)


def pass_of(passes: Sequence[tuple[float, float]], tokens: int) -> float:
    """What the captured pass takes that so many tokens are padded to, or the largest."""
    return next((ms for rows, ms in passes if rows >= tokens), passes[-1][1])


def at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The curve at a size: straight between its points, and beyond the last as between the last two. That of one point
    is the same everywhere."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    i = min(bisect_left(curve, size, key=itemgetter(0)), len(curve) - 1)
    (a, low), (b, high) = curve[i - 1], curve[i]
    return low + (high - low) * (size - a) / (b - a)

"""Step times of one model on one kind of card, as `python -m bench plan` collects them from measurements. No torch.

A pipeline is, to the planner, a stage that writes text, a stage that makes frames of it and a vocoder, all on one card.
A table says what their steps take alone, by size, and how much slower they are beside each other."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stretto.errors import Invalid

Curve = list[tuple[float, float]]
"""Sizes and milliseconds, by size."""


class StageTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    one: float  # a step for one request's next token, which has kernels of its own
    decode: Curve  # experts that are read: a step for the next token of several
    experts: float  # of a layer, and how many of them a row picks
    picks: float
    spread: float  # power of rows by which the experts that are read grow; 1: no two rows pick the same
    prompt: Curve  # rows of a step that holds prompts
    mixed: float  # of a step with both: what the quicker part adds to the slower one
    tokens: int  # that its KV pool holds
    launch: float  # of the host's thread, for a decode step
    launch_prompt: float  # and for one that holds prompts
    retire: float  # of the same, to pass on what came of a step
    retire_row: float  # and for each of its rows more


class Together(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast steps run beside others, of what they run alone."""

    text: Curve  # of the text stage beside the frames stage, by rows
    prompt: Curve  # of a step of it that holds prompts, by rows, beside a step of frames for `beside` rows
    beside: float
    power: float  # of rows of frames by which what such a step loses grows
    frames: Curve  # of the frames stage beside the text stage, by its rows
    frames_prompt: Curve  # of the same beside a step that holds prompts, by the rows of that
    vocoder: float  # beside any of them
    beside_vocoder: float  # of any of them


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured run and its replay. All numbers are shares of what was measured, by measure."""

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
    vocoder: list[tuple[float, float, float]]  # streams, frames of each, milliseconds
    launch_vocoder: float
    retire_vocoder: float
    retire_packet: float
    together: Together
    frame_s: float
    opening_s: float  # of the first frame that is not sounded
    overhead_ms: float  # from a request's arrival to its announcement, beside what the server does itself
    jitter_ms: float  # standard deviation of that
    serial_ms: float  # of the server's thread, for a request that comes
    admit_ms: float  # of the host's thread, for a request that is announced
    hop_us: float  # until the host's thread wakes up
    server_us: float  # of the server's thread, for each packet and each piece of text
    end_ms: float  # of the server's thread, for the end of an answer
    end_frame_us: float  # and for each frame that it had
    made_by: str
    error: dict[str, float] = {}  # of the replay against the measured runs, as shares: the mean
    worst: dict[str, float] = {}  # and of the run that it is farthest from
    checks: list[Check] = []  # run by run
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


def at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The curve at a size: straight between its points, and beyond the last as between the last two."""
    sizes = [s for s, _ in curve]
    if size <= sizes[0]:
        return curve[0][1]
    i = min(bisect_left(sizes, size), len(curve) - 1)
    (a, low), (b, high) = curve[i - 1], curve[i]
    return low + (high - low) * (size - a) / (b - a)


def share_at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The same for shares, by how often the size doubles; beyond the last point they stay as they are."""
    return at([(math.log(s), share) for s, share in curve], math.log(min(size, curve[-1][0])))


def vocoder_ms(table: Table, streams: int, frames: int) -> float:
    """Of one call, between its measured neighbours in frames."""
    widths = sorted({w for _, w, _ in table.vocoder})
    curve = [(w, at([(n, ms) for n, x, ms in table.vocoder if x == w], streams)) for w in widths]
    return at(curve, frames)

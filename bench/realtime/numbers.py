"""Summaries of samples, as they are printed and written. Imports no torch."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.results import quantile
from bench.realtime.turns import PHASES

Found = dict[str, Any]
COUNTERS = ("stretto_stage_device_seconds_sum", "stretto_stage_rows_total",
    "stretto_stage_encoded_total",
            "stretto_stage_steps_total", "stretto_host_busy_seconds_total",
            "stretto_host_idle_seconds_total",
            "stretto_stage_launch_seconds_sum")  # fmt: skip


class Gate:
    """A barrier: tasks wait here until all have come and the waiter lets them through."""

    def __init__(self, count: int) -> None:
        self._left, self._there, self._open = count, asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if not self._left:
            self._there.set()
        await self._open.wait()

    async def all_there(self) -> None:
        await self._there.wait()

    def open(self) -> None:
        self._open.set()


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def spread(values: Sequence[float]) -> Found:
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: quantile(values, q) for name, q in named.items()}
    return {"count": len(values), **found, "max": max(values)}


def by_length(samples: Sequence[Found]) -> dict[str, Found]:
    """First audio and its parts, for each length of turn."""
    found: dict[str, Found] = {}
    for seconds in sorted({s["seconds"] for s in samples}):
        good = [s for s in samples if s["seconds"] == seconds and s["error"] is None]
        errors = [s["error"] for s in samples if s["seconds"] == seconds and s["error"] is not None]
        one: Found = {"errors": errors}
        if good:
            split = [s["phases"] for s in good if s.get("phases")]
            rtf = [s["rtf"] for s in good if s.get("rtf") is not None]
            one |= {
                "first_audio_s": spread([s["first_audio"] for s in good]),
                "rtf": spread(rtf) if rtf else None,
                "phases_s": {
                    n: statistics.median(p[i] for p in split) for i, n in enumerate(PHASES)
                }
                if split
                else {},
                "new_tokens": max(
                    (s["new_tokens"] for s in good if "new_tokens" in s), default=None
                ),
                "encoded": max((s["encoded"] for s in good if "encoded" in s), default=None),
            }
        found[f"{seconds:g}"] = one
    return found


def show(found: Found) -> None:
    print(f"  {found['kind']}, {found['sessions']} at once: commit -> first audio", flush=True)
    for seconds, one in found["by_length"].items():
        if "first_audio_s" in one:
            f = one["first_audio_s"]
            parts = ", ".join(
                f"{name} {1000 * value:.1f}" for name, value in one["phases_s"].items()
            )
            print(
                f"    {seconds:>5} s x {f['count']}: p50 {ms(f['p50'])}, p90 {ms(f['p90'])}, max "
                f"{ms(f['max'])}; {factor(one['rtf'])}"
                f"{one['new_tokens']} tokens, {one['encoded']} windows; {parts}",
                flush=True,
            )
        if one["errors"]:
            print(
                f"    {seconds:>5} s: {len(one['errors'])} failed: {one['errors'][0][:300]}",
                flush=True,
            )
    whole = [
        one["first_audio_s"]["p50"] for one in found["by_length"].values() if "first_audio_s" in one
    ]
    if len(whole) > 1:
        print(
            f"    from the shortest to the longest: {100 * (whole[-1] / whole[0] - 1):+.1f} %",
            flush=True,
        )


def factor(rtf: Found | None) -> str:
    return "" if rtf is None else f"RTF p50 {rtf['p50']:.3f}, p99 {rtf['p99']:.3f}; "


def listened(samples: Sequence[Found]) -> Found:
    """Underruns of listeners who play each packet as it comes."""
    heard = [s for s in samples if "underruns" in s]
    told = {
        "answers": len(samples),
        "failed": sum(s["error"] is not None for s in samples),
        "stuttered": sum(s["underruns"] > 0 for s in heard),
        "underruns": sum(s["underruns"] for s in heard),
        "waited_s": sum(s["wait"] for s in heard),
        "longest_wait_s": max((s["wait"] for s in heard), default=0.0),
    }
    print(
        f"    {told['answers']} answers, {told['failed']} failed; {told['underruns']} underruns in "
        f"{told['stuttered']} "
        f"of them, {told['waited_s']:.3f} s in all, {told['longest_wait_s']:.3f} s at most",
        flush=True,
    )
    return told


def fitting(lengths: Sequence[float], count: int, most: float) -> list[float]:
    """Of the lengths, shortest first, as many as so many sessions can mix without more than `most`
    seconds in all."""
    chosen = sorted(lengths)
    while len(chosen) > 1 and sum(chosen) * count / len(chosen) > most:
        chosen.pop()
    return chosen


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters of stages and hosts did."""
    names = [n for n in after if n.startswith(COUNTERS)]
    return {n: after[n] - before.get(n, 0.0) for n in names if after[n] != before.get(n, 0.0)}

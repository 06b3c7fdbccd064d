"""The table of bench/notes/serving.md that compares what was measured with the targets. It stands
in tables.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.harness.markdown import NOT_YET, Line, both, count_of, many, markdown
from bench.report.measured import Results, found_in, level


def verdict(values: Sequence[float], target: float, least: bool = False) -> str:
    good = all(v >= target if least else v <= target for v in values)
    return "met" if good else "**missed**"


def goal(
    what: str, unit: str, limit: float, values: Sequence[float], digits: int, sign: str = "≤"
) -> Line:
    target = f"{sign} {limit:g} {unit}".strip()
    if not values:
        return what, target, NOT_YET, ""
    return (
        what,
        target,
        f"{both(values, digits)} {unit}".strip(),
        verdict(values, limit, least=sign == "≥"),
    )


def step_goals(results: Results) -> list[Line]:
    lines = []
    for what, label, limits in (
        ("thinker step", "thinker decode step, 1k context", (2.2, 4.5, 8.0)),
        ("talker frame", "talker frame with 15 predictor steps and sampling", (2.5, 3.5, 6.0)),
    ):
        for batch, limit in zip((1, 8, 32), limits, strict=True):
            step = results.step(what, batch)
            lines.append(
                goal(f"{label}, batch {batch}", "ms", limit, step["p50_ms"] if step else [], 2)
            )
    runs = (results.file("code2wav_h200") or {}).get("runs", [])
    for slots, frames, limit in ((1, 1, 1.5), (32, 4, 10.0)):
        times = [
            r["median_ms"]
            for r in runs
            if (r["slots"], r["frames"], r["graph"]) == (slots, frames, True)
        ]
        lines.append(
            goal(f"code2wav, {slots} x {frames} frame{'s' * (frames > 1)}", "ms", limit, times, 2)
        )
    prompts = results.prompts()
    for rows, limit in ((100, 25.0), (2500, 60.0)):
        us = prompts.get(f"thinker pass graph rows={rows}") or prompts.get(
            f"thinker pass eager rows={rows}"
        )
        lines.append(
            goal(f"thinker prefill, {rows} tokens", "ms", limit, [us / 1e3] if us else [], 1)
        )
    return lines


def p50s(
    results: Results, part: str, workload: str, streams: int, measure: str, at: str = "p50"
) -> list[float]:
    found = (level(s, part, workload, streams) for s in results.serving())
    return [f["summary"][measure][at] for f in found if f is not None and measure in f["summary"]]


def counted(results: Results, line: Line, part: str, workload: str, streams: int) -> Line:
    """With the number of answers behind it: fewer than 100 give a first impression only."""
    found = [level(s, part, workload, streams) for s in results.serving()]
    counts = [str(f["answers"]) for f in found if f is not None]
    what, target, measured, judged = line
    return (what, target, f"{measured} ({' / '.join(counts)} answers)", judged) if counts else line


def serving_goals(results: Results) -> list[Line]:
    lines = []
    for streams, limit in ((1, 50.0), (4, 60.0), (8, 80.0), (16, 100.0), (32, 130.0)):
        times = [1e3 * v for v in p50s(results, "latency", "text-100", streams, "first_audio_s")]
        line = goal(f"first audio p50, {many(streams)}", "ms", limit, times, 1)
        lines.append(counted(results, line, "latency", "text-100", streams))
    for streams, limit in ((1, 0.04), (8, 0.06), (16, 0.08), (32, 0.12)):
        values = p50s(results, "latency", "text-100", streams, "rtf")
        line = goal(f"RTF p50, {many(streams)}", "", limit, values, 3)
        lines.append(counted(results, line, "latency", "text-100", streams))
    for workload, label, limit in (
        ("text-2000", "first audio, prompt of 2,000 tokens, 1 stream", 90.0),
        ("audio-10s", "first audio, prompt of 10 s of sound, 1 stream", 70.0),
    ):
        times = [1e3 * v for v in p50s(results, "prompts", workload, 1, "first_audio_s")]
        lines.append(counted(results, goal(label, "ms", limit, times, 1), "prompts", workload, 1))
    waits = [
        max(
            (
                f["summary"]["wait_0ms_s"]["max"]
                for f in found_in(s, "latency")
                if "wait_0ms_s" in f["summary"] and f["streams"] <= 32
            ),
            default=0,
        )
        for s in results.serving()
        if found_in(s, "latency")
    ]
    lines.append(
        goal("player from the first packet: longest wait, 1 to 32 streams", "s", 0.0, waits, 3)
    )
    starts = [s["ready_s"] for s in results.starts()]
    lines.append(
        goal(
            f"start-up, random weights to ready, {count_of(len(starts), 'start')}",
            "s",
            90.0,
            starts,
            0,
        )
    )
    lines.append(listeners_goal([f for s in results.serving() for f in found_in(s, "realtime")]))
    runs = [
        r for s in results.serving() for h in found_in(s, "host") for r in h["runs"] if r["device"]
    ]
    idle = [100 * max(r["device"]["idle_share"] for r in runs)] if runs else []
    counts = " and ".join(str(n) for n in sorted({r["streams"] for r in runs}))
    lines.append(
        goal(f"GPU idle in steady decode, worst of {counts or 'all'} streams", "%", 5.0, idle, 1)
    )
    return lines


def listeners_goal(found: Sequence[Any]) -> Line:
    """The most listeners of whom none waited; where some did in every run, how many and for how
    long, since fewer may carry."""
    clean = [f["streams"] for f in found if f["answers"] == f["streams"] and not f["stuttered"]]
    what, limit = "streams of 60 s within two seconds, simulated players, no underrun", 64
    line = goal(what, "", limit, [max(clean)] if clean else [], 0, "≥")
    if clean or not found:
        return line
    least = min(found, key=lambda f: int(f["streams"]))
    waited = f"{least['stuttered']} of {least['streams']} waited, {1e3 * least['waited_s']:.1f} ms in all; fewer not run"  # noqa: E501
    return *line[:2], waited, "**missed**" if least["streams"] <= limit else "**not shown**"


def targets(results: Results) -> str:
    lines = [*step_goals(results), *serving_goals(results)]
    if all(line[2] == NOT_YET for line in lines):
        return ""
    return markdown(("", "target", "measured", ""), lines)

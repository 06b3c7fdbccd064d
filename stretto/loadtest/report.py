"""What a benchmark found: a table for people, JSON with every sample for machines. No I/O but
asking the machine what it is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from stretto import __version__
from stretto.loadtest.player import gaps, play
from stretto.loadtest.runner import Closed, Goal, Level, Sample
from stretto.loadtest.stats import Summary, summarize

USUAL = Goal()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a name, its summary, and the unit it is shown in."""

    name: str
    summary: Summary | None
    unit: str  # "s" (shown as ms or s), "x" (a plain number)


def rows(level: Level, prebuffers: Sequence[float]) -> dict[str, Row]:
    """Every measure over the whole answers of a level, by a short key."""
    good = level.good
    table = {
        "first_text_s": Row("first text", summarize(s.first_text for s in good), "s"),
        "first_audio_s": Row("first audio", summarize(s.first_audio for s in good), "s"),
        "token_s": Row("per text token", summarize(s.token_seconds for s in good), "s"),
        "gap_s": Row("between packets", summarize(g for s in good for g in gaps(s.packets)), "s"),
        "end_to_end_s": Row("end to end", summarize(s.end for s in good), "s"),
        "rtf": Row("RTF", summarize(s.rtf for s in good), "x"),
        "audio_s": Row("speech", summarize(s.audio_seconds for s in good if s.packets), "s"),
    }
    for lead in prebuffers:
        playbacks = [playback for s in good if (playback := play(s.packets, lead)) is not None]
        name = "player" if lead == 0 else f"player +{1000 * lead:.0f} ms"
        key = f"{1000 * lead:.0f}ms"
        table[f"underruns_{key}"] = Row(
            f"{name}: underruns", summarize(p.underruns for p in playbacks), "x"
        )
        table[f"wait_{key}_s"] = Row(f"{name}: waits", summarize(p.wait for p in playbacks), "s")
    return table


def rates(level: Level, goal: Goal = USUAL) -> dict[str, float]:
    """What the server did in a second of this level, and how much of it was good: those that failed
    count too."""
    time = level.seconds or float("inf")
    met = sum(goal.met(s) for s in level.samples)
    return {
        "good_share": met / len(level.samples) if level.samples else 0.0,
        "good_requests_per_s": met / time,
        "requests_per_s": len(level.good) / time,
        "audio_s_per_s": sum(s.audio_seconds for s in level.good) / time,
        "text_tokens_per_s": sum(s.text_tokens or len(s.words) for s in level.good) / time,
    }


def errors(level: Level) -> dict[str, int]:
    return dict(Counter(s.error for s in level.samples if s.error is not None).most_common())


def show(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.3g}" if 0 < value < 10 else f"{value:.0f}"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def table(level: Level, prebuffers: Sequence[float], goal: Goal = USUAL) -> str:
    """A level for people."""
    speed = rates(level, goal)
    bad = len(level.samples) - len(level.good)
    head = f"{level.load}: {len(level.good)} answers in {level.seconds:.1f} s"
    head += (
        f", {speed['requests_per_s']:.2f} requests/s, {speed['audio_s_per_s']:.2f} s of speech per "
        f"second"
    )
    head += f", {speed['text_tokens_per_s']:.1f} text tokens/s"
    lines = [head + (" (interrupted)" if level.interrupted else "")]
    lines.append(
        f"  goodput: {100 * speed['good_share']:.0f} % of {len(level.samples)} requests, "
        f"{speed['good_requests_per_s']:.2f} a second (first sound within {show(goal.first, 's')}, "
        f"waits of at most "
        f"{show(goal.wait, 's')})"
    )
    lines.append(f"  {'':27}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}")
    for row in rows(level, prebuffers).values():
        if row.summary is not None:
            values = (row.summary.p50, row.summary.p90, row.summary.p99, row.summary.max)
            lines.append(f"  {row.name:27}" + "".join(f"{show(v, row.unit):>11}" for v in values))
    if bad:
        lines.append(
            f"  {bad} failed: " + ", ".join(f"{n} {kind}" for kind, n in errors(level).items())
        )
        lines.append(
            f"  the first said: {next(s.message for s in level.samples if s.error is not None)}"
        )
    return "\n".join(lines)


def overview(levels: Sequence[Level], goal: Goal = USUAL) -> str:
    """All levels side by side, a line each."""
    names = (
        "load",
        "first text",
        "first audio",
        "p99",
        "RTF",
        "speech s/s",
        "tokens/s",
        "stutter",
        "good",
        "failed",
    )
    lines = ["".join(f"{n:>18}" if i == 0 else f"{n:>13}" for i, n in enumerate(names))]
    for level in levels:
        found, speed = rows(level, (0.0,)), rates(level, goal)
        first = found["first_audio_s"].summary
        stuttering = [s for s in level.good if (p := play(s.packets)) is not None and p.underruns]
        share = f"{100 * len(stuttering) / len(level.good):.0f} %" if level.good else "-"
        cells = (
            _p50(found["first_text_s"]), _p50(found["first_audio_s"]), show(first.p99,
            "s") if first else "-",
            _p50(found["rtf"]), f"{speed['audio_s_per_s']:.1f}",
            f"{speed['text_tokens_per_s']:.1f}", share,
            f"{100 * speed['good_share']:.0f} %", str(len(level.samples) - len(level.good)),
        )  # fmt: skip
        lines.append(f"{level.load!s:>18}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def _p50(row: Row) -> str:
    return show(row.summary.p50, row.unit) if row.summary else "-"


def record(
    levels: Sequence[Level],
    prebuffers: Sequence[float],
    arguments: Mapping[str, Any],
    server: Mapping[str, Any],
    started: str,
    goal: Goal = USUAL,
) -> dict[str, Any]:
    """The whole run as JSON: what was asked of whom from where, summaries, and every sample."""
    return {
        "kind": "stretto bench",
        "started": started,
        "arguments": dict(arguments),
        "server": dict(server),
        "client": client(),
        "levels": [
            {
                "load": {
                    "kind": "closed" if isinstance(level.load, Closed) else "open",
                    **asdict(level.load),
                },
                "seconds": level.seconds,
                "interrupted": level.interrupted,
                "goal": asdict(goal),
                "rates": rates(level, goal),
                "errors": errors(level),
                "summary": {
                    k: asdict(r.summary)
                    for k, r in rows(level, prebuffers).items()
                    if r.summary is not None
                },
                "samples": [_sample(s) for s in level.samples],
                "warmup": [_sample(s) for s in level.warmup],
            }
            for level in levels
        ],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    record = asdict(sample)
    record["packets"] = [[p.at, p.seconds] for p in sample.packets]
    return record


def client() -> dict[str, Any]:
    """The machine this runs on, which for a local server is the server's too."""
    return {
        "stretto": __version__,
        "httpx": version("httpx"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpus": _gpus(),
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")),
                "",
            )
    except OSError:
        return platform.processor()


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    ask = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()

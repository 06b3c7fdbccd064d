"""Tables of bench/notes about processes that share a card or send to each other: what the copies of
links cost decode steps, what a hop takes, what it costs to split a pipeline on one card, and to
have other servers on it. They stand in tables.py."""

from __future__ import annotations

from typing import Any

from bench.harness.markdown import markdown
from bench.report.measured import Results, found_in


def copies(results: Results) -> str:
    """Decode steps beside the copies of a link, each overlap switched off in turn."""
    lines = []
    for s in (results.file("copies_h200") or {}).get("steps", []):
        lines.append(
            (
                s["way"], str(s["rows"]), f"{s['times']:.3f}", f"{s['step_ms_p50']:.2f} ms",
                f"{s['gap_us_p50']:.0f} / {s['gap_us_p99']:.0f} µs", f"{100 * s['idle_share']:.1f} "
                                                                     f"%",
                f"{s['loop_us_p50'] / 1e3:.2f} ms",
            )
        )  # fmt: skip
    head = (
        "link", "rows sent with each step", "time of a run", "step p50", "gap p50 / p99",
        "GPU idle",
        "loop thread, a step",
    )  # fmt: skip
    return markdown(head, lines)


def hops(results: Results) -> str:
    """Chunks between two processes, one by one and back to back."""
    lines = []
    for p in (results.file("copies_h200") or {}).get("path", []):
        lines.append(
            (
                p["way"], str(p["rows"]), f"{p['bytes'] / 1024:.0f} KiB",
                f"{p['hop_us_p50'] / 1e3:.2f} / {p['hop_us_p99'] / 1e3:.2f} ms",
                f"{p['gb_s']:.2f} GB/s",
                f"{p['of_pinned']:.2f}",
            )
        )  # fmt: skip
    head = (
        "between",
        "rows",
        "chunk",
        "a hop and its answer, p50 / p99",
        "back to back",
        "of a pinned copy",
    )
    return markdown(head, lines)


def split(results: Results) -> str:
    """One process for all stages beside two on the same card."""
    runs = (results.file("split_h200") or {}).get("runs", [])
    lines = []
    for levels in zip(*(run["levels"] for run in runs), strict=True):
        answers = [len(found["samples"]) for found in levels]
        first = [f"{1e3 * found['summary']['first_audio_s']['p50']:.1f} ms" for found in levels]
        rtf = [f"{found['summary']['rtf']['p50']:.4f}" for found in levels]
        lines.append(
            (str(min(levels[0]["load"]["streams"], *answers)), str(min(answers)), *first, *rtf)
        )
    head = (
        "streams",
        "answers",
        "first audio p50: one process",
        "two",
        "RTF p50: one process",
        "two",
    )
    return markdown(head, lines)


def beside(results: Results) -> str:
    """A server whose card others use too: its own listeners, then those of each other server, all
    rounds of it."""
    found = results.file("beside_h200") or {"parts": {}, "beside": []}
    others: dict[int, list[Any]] = {}
    for level in found["beside"]:
        others.setdefault(level["server"], []).append(level)
    lines = []
    for level in found_in(found, "latency"):
        s = level["summary"]
        lines.append(("the full model", str(level["streams"]), str(level["answers"]), *_heard([s])))
    for number, levels in others.items():
        answers = sum(level["answers"] for level in levels)
        heard = _heard([level["summary"] for level in levels])
        lines.append((f"tiny server {number + 1}", str(levels[0]["streams"]), str(answers), *heard))
    return markdown(
        ("listeners of", "streams", "answers", "first audio p50", "RTF p50", "longest wait"), lines
    )


def _heard(summaries: list[Any]) -> tuple[str, str, str]:
    """First audio, RTF and the longest wait; of several rounds from the best to the worst."""
    first, rtf = (sorted(s[name]["p50"] for s in summaries) for name in ("first_audio_s", "rtf"))
    longest = max(s["wait_0ms_s"]["max"] for s in summaries)
    ends = (0, -1) if len(summaries) > 1 else (0,)
    return (
        " to ".join(f"{1e3 * first[i]:.0f}" for i in ends) + " ms",
        " to ".join(f"{rtf[i]:.3f}" for i in ends),
        f"{1e3 * longest:.0f} ms",
    )  # fmt: skip

"""Tables of docs/performance.md about single parts of the engine, each from files of its own: the vocoder and
pictures. Used by bench/tables.py."""

from __future__ import annotations

from typing import Any

from bench.markdown import markdown
from bench.measured import Results


def vocoder(results: Results) -> str:
    """Steps as captured graphs, in plain PyTorch and with kernels."""
    lines = []
    plain, ours = (steps(results.file(name)) for name in ("code2wav_h200_plain", "code2wav_h200"))
    for (slots, frames), ms in ours.items():
        before = plain.get((slots, frames))
        speech = f"{slots * frames * 80 / ms:.0f} s"
        lines.append((str(slots), str(frames), "" if before is None else f"{before:.2f} ms", f"{ms:.2f} ms", speech))
    return markdown(("streams", "frames each", "plain PyTorch", "with kernels", "speech per second"), lines)


def steps(found: Any) -> dict[tuple[int, int], float]:
    runs = (found or {}).get("runs", [])
    return {(r["slots"], r["frames"]): r["median_ms"] for r in runs if r["graph"]}


def pictures(results: Results) -> str:
    lines = []
    for case in (results.file("vision_h200") or {}).get("cases", []):
        plain, graph = case["plain"], case.get("graph")
        cells = [f"{way['host_ms']:.1f} / {way['both_ms']:.1f} ms" if way else "" for way in (plain, graph)]
        lines.append((case["images"], str(case["patches"]), *cells))
    head = ("picture", "patches", "plain: host's time / until it is done", "as a graph: the same")
    return markdown(head, lines)

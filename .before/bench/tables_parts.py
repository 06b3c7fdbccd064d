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
    for shape, run in ours.items():
        before = f"{plain[shape]['median_ms']:.2f} ms" if shape in plain else ""
        lines.append((*map(str, shape), before, f"{run['median_ms']:.2f} ms", f"{run['audio_s_per_s']:.0f} s"))
    return markdown(("streams", "frames each", "plain PyTorch", "with kernels", "speech per second"), lines)


def steps(found: Any) -> dict[tuple[int, int], Any]:
    return {(r["slots"], r["frames"]): r for r in (found or {}).get("runs", []) if r["graph"]}


def pictures(results: Results) -> str:
    lines = []
    for case in (results.file("vision_h200") or {}).get("cases", []):
        plain, graph = case["plain"], case.get("graph")
        cells = [f"{way['host_ms']:.1f} / {way['both_ms']:.1f} ms" if way else "" for way in (plain, graph)]
        lines.append((case["images"], str(case["patches"]), *cells))
    head = ("picture", "patches", "plain: host's time / until it is done", "as a graph: the same")
    return markdown(head, lines)

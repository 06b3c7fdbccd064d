"""Tables of docs/performance.md about single parts of the engine, each from a file of its own: the vocoder, pictures,
and the whole in service with experts in 8 bits. Used by bench/tables.py."""

from __future__ import annotations

from typing import Any

from bench.markdown import markdown
from bench.measured import Results, level


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


def served8(results: Results) -> str:
    """Listeners of a server whose experts are in 8 bits, beside those of the usual one."""
    wide, narrow = results.file("h200"), results.file("h200_float8")
    if wide is None or narrow is None:
        return ""
    lines = []
    for streams in (1, 4, 8, 16, 32):
        both = [level(s, "latency", "text-100", streams) for s in (wide, narrow)]
        if None not in both:
            first = [f"{1e3 * f['summary']['first_audio_s']['p50']:.1f} ms" for f in both]
            rtf = [f"{f['summary']['rtf']['p50']:.3f}" for f in both]
            lines.append((str(streams), first[0], rtf[0], first[1], rtf[1]))
    head = ("streams", "bfloat16: first audio p50", "RTF p50", "float8: first audio p50", "RTF p50")
    return markdown(head, lines)

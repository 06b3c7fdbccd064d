"""The pictures of bench/notes, from the files in bench/results: roofline.svg (steps and kernels
against what memory and arithmetic allow), overlap.svg (one answer, stage by stage over time) and
layers.svg (the kernels of a thinker's layer over time). One whose file is missing is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bench.report.measured import (
    PEAK_FLOPS,
    THINKER,
    Results,
    distinct,
    found_in,
    layer_bytes,
    layers,
    one_step,
    step_flops,
)
from bench.report.svg import COLOURS, Picture, Scale

BLUE, ORANGE, GREEN, PINK, GREY, RED, *_ = COLOURS


# ---- roofline


def points(results: Results) -> list[tuple[str, str, float, float, float]]:
    """(label, kind, FLOP per byte, FLOP per second, bytes per second)."""
    found = []

    def add(label: str, kind: str, flops: float, nbytes: float, seconds: float) -> None:
        found.append((label, kind, flops / nbytes, flops / seconds, nbytes / seconds))

    for what, kind in (("thinker step", "thinker"), ("talker frame", "talker")):
        for batch in (1, 8, 32):
            if (step := results.step(what, batch)) is not None:
                seconds = step["p50_ms"][0] / 1e3
                add(f"{kind} x{batch}", kind, step_flops(what, batch), step["bytes"], seconds)
    tuned, hidden, size = results.tuned(), THINKER.hidden, THINKER.expert
    for rows, tile in ((1, 0), (8, 16), (32, 32)):
        reads = layer_bytes(
            THINKER, rows, float(THINKER.top_k) if rows == 1 else distinct(THINKER, rows)
        )
        kind = "matrix" if rows > 1 else "vector"
        head: tuple[int, ...] = (THINKER.vocab, hidden)
        shapes: dict[str, tuple[str, tuple[int, ...], float]] = {
            "qkv": (kind, (THINKER.qkv, hidden), THINKER.qkv * hidden),
            "up": (f"up_{kind}", (size, hidden), 2 * THINKER.top_k * size * hidden),
            "down": (f"down_{kind}", (hidden, size), THINKER.top_k * size * hidden),
            "head": ("wide" if rows > 1 else kind, head, THINKER.vocab * hidden),
        }
        for name, (kernel, key, weights) in shapes.items():
            us = tuned.get((kernel, (tile, *key) if rows > 1 else key))
            if us is not None:
                nbytes = reads.get(name, 2.0 * THINKER.vocab * hidden)
                add(f"{name} x{rows}", "kernel", 2.0 * rows * weights, nbytes, us / 1e6)
    for name, us in results.prompts().items():
        if (m := re.fullmatch(r"(gate_up|down) rows=(\d+)", name)) and int(m[2]) in (512, 2500):
            rows, wide = int(m[2]), 2 if m[1] == "gate_up" else 1
            weights = wide * size * hidden
            nbytes = 2.0 * (
                min(THINKER.experts, distinct(THINKER, rows)) * weights + 9 * rows * hidden
            )
            add(
                f"prompt {m[1]} x{rows}",
                "prompt",
                2.0 * rows * THINKER.top_k * weights,
                nbytes,
                us / 1e6,
            )
    return found


def roofline(results: Results) -> Picture | None:
    found = points(results)
    if not found:
        return None
    bandwidth = results.bandwidth()
    p = Picture(760, 470)
    x, y = Scale(0.5, 1000.0, 62, 735, log=True), Scale(1e12, 1.2e15, 420, 44, log=True)
    p.text(62, 22, "Steps and kernels against the roofline (bf16)", style="title")
    for tick in x.ticks():
        p.line(x(tick), 44, x(tick), 420, "grid")
        p.text(x(tick), 437, f"{tick:g}", "middle", "small dim")
    for tick in y.ticks():
        p.line(62, y(tick), 735, y(tick), "grid")
        p.text(56, y(tick) + 4, f"{tick / 1e12:g}", "end", "small dim")
    p.text(398, 458, "arithmetic for each byte that must be read, FLOP/B", "middle", "dim")
    p.text(12, 36, "TFLOP/s", style="small dim")
    ridge = PEAK_FLOPS / bandwidth
    p.line(x(0.5), y(max(1e12, 0.5 * bandwidth)), x(ridge), y(PEAK_FLOPS), width=1.6)
    p.line(x(ridge), y(PEAK_FLOPS), x(1000), y(PEAK_FLOPS), width=1.6)
    p.text(x(ridge) - 8, y(PEAK_FLOPS) - 8, f"{PEAK_FLOPS / 1e12:.0f} TFLOP/s", "end", "small")
    p.text(x(7), y(9 * bandwidth), f"{bandwidth / 1e12:.2f} TB/s", "end", "small")
    colours = {"thinker": BLUE, "talker": ORANGE, "kernel": GREY, "prompt": GREEN}
    for label, kind, intensity, flops, rate in sorted(
        found, key=lambda f: f[1] in ("thinker", "talker")
    ):
        step = kind in ("thinker", "talker")
        about = f"{label}: {rate / 1e12:.2f} TB/s, {flops / 1e12:.1f} TFLOP/s"
        p.dot(x(intensity), y(flops), colours[kind], 5.5 if step else 3.2, about, hollow=not step)
        share = flops / min(PEAK_FLOPS, intensity * bandwidth)
        if step:
            p.text(x(intensity) + 9, y(flops) + 13, f"{label}: {100 * share:.0f} %", style="small")
        elif kind == "prompt" and "gate_up" in label:
            p.text(
                x(intensity) + 8,
                y(flops) + 11,
                f"{label.rpartition('x')[2]} rows",
                style="small dim",
            )
    legend = {"thinker": "thinker step", "talker": "talker frame", "kernel": "kernel by itself, 1 "
                                                                             "/ 8 / 32 rows",
              "prompt": "expert products of a prompt"}  # fmt: skip
    for i, (kind, words) in enumerate(
        (k, w) for k, w in legend.items() if any(f[1] == k for f in found)
    ):
        p.dot(510, 340 + 18 * i, colours[kind], 4.5, hollow=kind in ("kernel", "prompt"))
        p.text(520, 344 + 18 * i, words, style="small")
    return p


# ---- one answer over time


LANES = ("thinker", "talker", "code2wav", "packets")
SPANS = {"prompt": GREY, "token": BLUE, "frame": ORANGE, "first frame": GREY, "packet": GREEN}


def overlap(results: Results) -> Picture | None:
    """The first part of one answer at one stream, and at eight where that was recorded."""
    reports = []
    for serving in results.serving()[:1]:
        for found in found_in(serving, "timeline"):
            if found.get("one_report"):
                reports.append((found["streams"], found["one_report"]))
    if not reports:
        return None
    p = Picture(860, 46 + 190 * len(reports))
    p.text(14, 22, "One answer: what each stage has put out, over time", style="title")
    for i, (streams, report) in enumerate(reports):
        draw_answer(p, 40 + 190 * i, streams, report)
    return p


def draw_answer(p: Picture, top: float, streams: int, report: dict[str, Any]) -> None:
    spans, first = report["timeline"], report["first_audio_s"]
    until = min(report["total_s"], max(0.1, 4 * first))
    x = Scale(0.0, 1e3 * until, 84, 845)
    others = "alone" if streams == 1 else f"beside {streams - 1} others"
    p.text(84, top + 12, f"{others}: first text {1e3 * report['first_text_s']:.1f} ms, first sound "
           f"{1e3 * first:.1f} ms, all {report['audio_s']:.1f} s of speech made after "
           f"{1e3 * report['total_s']:.0f} ms", style="small dim")  # fmt: skip
    for tick in x.ticks(10):
        p.line(x(tick), top + 20, x(tick), top + 142, "grid")
        p.text(x(tick), top + 156, f"{tick:g}", "middle", "small dim")
    p.text(845, top + 170, "ms", "end", "small dim")
    for n, lane in enumerate(LANES):
        y = top + 26 + 30 * n
        p.text(76, y + 14, "vocoder" if lane == "code2wav" else lane, "end", "small")
        for s in sorted((s for s in spans if s["lane"] == lane), key=lambda s: s["start"]):
            if s["start"] > until:
                continue
            left, right = x(1e3 * s["start"]), x(1e3 * min(s["stop"], until))
            if lane == "packets":
                p.line(left, y, left, y + 20, width=1.6)
            else:
                about = f"{s['name']}: {1e3 * s['start']:.1f} to {1e3 * s['stop']:.1f} ms"
                p.bar(left, y, right - left - 0.8, 20, SPANS.get(s["name"], GREY), about)
    p.line(x(1e3 * first), top + 20, x(1e3 * first), top + 142, width=1.0, dash="4 3")


# ---- the kernels of a layer


def layer_picture(results: Results, count: int = 2) -> Picture | None:
    """Layers in the middle of a thinker's step at each batch, kernel by kernel."""
    steps = []
    for batch in (1, 8, 32):
        found = results.step("thinker step", batch)
        every = list(layers(one_step(found["timeline"]))) if found and found.get("timeline") else []
        if len(every) > 20 + count:
            steps.append((batch, [item for layer in every[20 : 20 + count] for item in layer]))
    if not steps:
        return None
    names = list(dict.fromkeys(name for _, ran in steps for name, _ in ran))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    rows = 4  # kernels that overlap lie one below the other
    p = Picture(860, 62 + 128 * len(steps))
    p.text(14, 22, f"{count} layers of a thinker step, kernel by kernel", style="title")
    for i, name in enumerate(names):
        p.bar(14 + 104 * i, 34, 10, 10, colours[name])
        p.text(28 + 104 * i, 43, name, style="small")
    for n, (batch, ran) in enumerate(steps):
        top, zero = 62 + 128 * n, ran[0][1].start
        x = Scale(0.0, max(r.stop for _, r in ran) - zero, 84, 845)
        p.text(76, top + 42, f"{batch} row{'s' if batch > 1 else ''}", "end", "small")
        for tick in x.ticks(10):
            p.line(x(tick), top, x(tick), top + 20 * rows + 4, "grid")
            p.text(x(tick), top + 20 * rows + 18, f"{tick:g}", "middle", "small dim")
        p.text(845, top + 20 * rows + 32, "µs", "end", "small dim")
        for i, (name, r) in enumerate(ran):
            left, right = x(r.start - zero), x(r.stop - zero)
            about = f"{name}: runs {r.took:.1f} µs, adds {r.adds:.1f} µs"
            p.bar(left, top + 2 + 20 * (i % rows), right - left, 17, colours[name], about)
    return p


PICTURES: dict[str, Callable[[Results], Picture | None]] = {
    "roofline": roofline,
    "overlap": overlap,
    "layers": layer_picture,
}

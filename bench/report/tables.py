"""The tables of the documents as Markdown, from the files in bench/results.

A table without any file behind it is empty; a line without one says "not measured"."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.markdown import NOT_YET, both, many, markdown
from bench.report import faults, proofs
from bench.report.links import beside, copies, hops, split
from bench.report.measured import (
    PREDICTOR_PASSES,
    TALKER,
    THINKER,
    Ran,
    Results,
    layer_bytes,
    layers,
    one_step,
)
from bench.report.path import path
from bench.report.serving import (
    before_after,
    host,
    latency,
    memory,
    open_loop,
    phases,
    prefill_priority,
    realtime,
    sources,
    start,
)
from bench.report.targets import p50s, targets


def runs(results: Results) -> str:
    """What two numbers in one cell are, as a sentence."""
    if not results.serving():
        return ""
    over_http = (
        "two passes over one server, the second with its levels in reverse"
        if results.same_server()
        else "two runs, each with a server of its own"
        if len(results.serving()) == 2
        else "one run"
    )
    return textwrap.fill(
        f"Two numbers in a cell: for steps, two passes in one process; over HTTP, {over_http}.", 120
    )


def side_by_side(results: Results) -> str:
    """For the README: vLLM-Omni and Stretto, one after the other on one machine, by one client."""
    theirs = results.file("side_by_side/vllm_omni_0.26_h200_side")
    ours = results.file("side_by_side/stretto_974223c_h200_side")
    if theirs is None or ours is None:
        return ""
    found = {(level["concurrency"], level["prompt_words"] > 500): level for level in ours["levels"]}
    lines = []
    for level in theirs["levels"]:
        long = level["prompt_words"] > 500
        both_sides = level, found[level["concurrency"], long]
        row = [f"{level['concurrency']}{', prompt of 2,000 tokens' if long else ''}"]
        for of in both_sides:
            made = of["audio_s_per_s"]
            row += [
                f"{1e3 * of['ttfa']['p50']:,.0f} ms",
                f"{of['rtf']['p50']:.3f}",
                f"{made:.1f}" if made < 20 else f"{made:.0f}",
                f"{1e3 * of['underrun']['max']:,.0f} ms" if of["underrun"]["max"] else "0",
            ]
        lines.append(tuple(row))
    names = "first audio, p50", "RTF, p50", "speech made, s/s", "underrun, max"
    head = "streams", *(f"vLLM-Omni: {names[0]}", *names[1:]), *(f"Stretto: {names[0]}", *names[1:])
    return markdown(head, lines)


def summary(results: Results) -> str:
    """What a listener notices."""
    lines = []
    for streams in (1, 4, 8, 16, 32, 64, 128):
        first = [1e3 * v for v in p50s(results, "latency", "text-100", streams, "first_audio_s")]
        rtf = p50s(results, "latency", "text-100", streams, "rtf")
        wait = p50s(results, "latency", "text-100", streams, "wait_0ms_s", "max")
        if first:
            lines.append((str(streams), f"{both(first, 0)} ms", both(rtf, 3), f"{both(wait, 3)} s"))
    return markdown(("streams", "first audio, p50", "RTF, p50", "longest wait of a player"), lines)


# ---- where a step's time goes


def steps(results: Results) -> str:
    lines = []
    for what in ("thinker step", "thinker step (sampled)", "talker frame"):
        for batch in (1, 8, 32):
            if (s := results.step(what, batch)) is not None:
                p50 = s["p50_ms"]
                lines.append(
                    (
                        f"{what}, batch {batch}", f"{s['bytes'] / 1e9:.2f} GB",
                        f"{s['distinct_experts']:.0f}",
                        f"{s['floor_ms']:.2f} ms", f"{both(p50, 2)} ms", f"{both(s['p99_ms'], 2)} "
                                                                         f"ms",
                        f"{s['bytes'] / p50[0] / 1e9:.2f} TB/s",
                        f"{100 * s['floor_ms'] / p50[0]:.0f} %",
                    )
                )  # fmt: skip
    return markdown(
        (
            "",
            "must be read",
            "experts per layer",
            "floor",
            "p50, two passes",
            "p99",
            "rate",
            "of the bandwidth",
        ),
        lines,
    )


# part of a thinker's layer -> kernels and key in tune_h200.json, for one row and for several
ALONE = {
    "qkv": ("vector", ("matrix", "split"), (5120, 2048)),
    "o": ("vector", ("matrix", "split"), (2048, 4096)),
    "router": ("vector", ("route",), (128, 2048)),
    "up": ("up_vector", ("up_matrix",), (768, 2048)),
    "down": ("down_vector", ("down_matrix",), (2048, 768)),
}


def alone(results: Results, part: str, batch: int) -> float | None:
    tuned = results.tuned()
    if part == "attention":
        return tuned.get(("decode", (batch, THINKER.heads, THINKER.kv_heads)))
    if part not in ALONE:
        return None
    one, several, key = ALONE[part]
    if batch == 1:
        return tuned.get((one, key))
    return min(
        (us for k in several if (us := tuned.get((k, (max(16, batch), *key)))) is not None),
        default=None,
    )


def middle_layer(step: Any) -> dict[str, float]:
    """Median over the layers of what each kernel adds, µs."""
    found: dict[str, list[float]] = {}
    for layer in layers(one_step(step["timeline"])):
        for name, ran in layer:
            found.setdefault(name, []).append(ran.adds)
    return {name: statistics.median(values) for name, values in found.items()}


def layer_table(results: Results) -> str:
    lines = []
    for batch in (1, 8, 32):
        step = results.step("thinker step", batch)
        if step is None or not step.get("timeline"):
            continue
        adds = middle_layer(step)
        floors = {
            name: 1e6 * nbytes / results.bandwidth()
            for name, nbytes in layer_bytes(THINKER, batch, step["distinct_experts"]).items()
        }
        for name, us in adds.items():
            by_itself = alone(results, name, batch)
            lines.append(
                (
                    f"{batch}", name, f"{floors[name]:.1f}" if name in floors else "0",
                    f"{by_itself:.1f}" if by_itself is not None else "", f"{us:.1f}",
                )
            )  # fmt: skip
        whole = one_step(step["timeline"])
        rest = sum(r.adds for r in whole) - THINKER.layers * sum(adds.values())
        lines.append(
            (
                f"{batch}",
                "**a layer**",
                f"**{sum(floors.values()):.1f}**",
                "",
                f"**{sum(adds.values()):.1f}**",
            )
        )
        lines.append(
            (f"{batch}", "head, choice, begin, per step", head_floor(results), "", f"{rest:.0f}")
        )
    return markdown(
        ("rows", "kernel", "floor, µs", "by itself, µs", "adds in the chain, µs"), lines
    )


def head_floor(results: Results) -> str:
    return f"{1e6 * 2.0 * THINKER.vocab * THINKER.hidden / results.bandwidth():.0f}"


def frame_table(results: Results) -> str:
    """A talker's frame in three parts."""
    lines = []
    for batch in (1, 8, 32):
        step = results.step("talker frame", batch)
        if step is None or not step.get("timeline"):
            continue
        ran = one_step(step["timeline"])
        last = max((i for i, r in enumerate(ran) if r.name == "_decode"), default=-1)
        heads = [i for i, r in enumerate(ran) if r.name == "_pick_code"]
        if last < 0 or len(heads) <= 1:
            continue

        def adds(part: Sequence[Ran]) -> float:
            return sum(r.adds for r in part)

        first, picks = adds(ran[: heads[0] + 1]), adds([ran[i] for i in heads[1:]])
        rest = adds(ran[heads[0] + 1 :]) - picks
        lines.append(
            (
                str(batch), f"{first:.0f}", f"{first / TALKER.layers:.1f}", f"{rest:.0f}",
                f"{rest / PREDICTOR_PASSES:.1f}", f"{picks:.0f}", f"{1e3 * step['p50_ms'][0]:.0f}",
            )
        )  # fmt: skip
    head = (
        "rows",
        "talker and code 0, µs",
        "per layer",
        "predictor, µs",
        "per pass",
        "its 15 picks, µs",
        "frame, µs",
    )
    return markdown(head, lines)


def prompt_table(results: Results) -> str:
    prompts, lines = results.prompts(), []
    for rows in (16, 100, 128, 512, 1024, 2048, 2500):
        cells = [
            prompts.get(f"{m} pass {how} rows={rows}")
            for m in ("thinker", "talker")
            for how in ("graph", "eager")
        ]
        if any(cells):
            lines.append((str(rows), *(f"{c / 1e3:.1f} ms" if c else "" for c in cells)))
    return markdown(("rows", "thinker, graph", "launched", "talker, graph", "launched"), lines)


# ---- vocoder, pictures


def vocoder(results: Results) -> str:
    """Steps as captured graphs, in plain PyTorch and with kernels."""
    lines = []
    plain, ours = (
        captured(results.file(name)) for name in ("code2wav_h200_plain", "code2wav_h200")
    )
    for shape, run in ours.items():
        before = f"{plain[shape]['median_ms']:.2f} ms" if shape in plain else ""
        lines.append(
            (
                *map(str, shape),
                before,
                f"{run['median_ms']:.2f} ms",
                f"{run['audio_s_per_s']:.0f} s",
            )
        )
    return markdown(
        ("streams", "frames each", "plain PyTorch", "with kernels", "speech per second"), lines
    )


def captured(found: Any) -> dict[tuple[int, int], Any]:
    return {(r["slots"], r["frames"]): r for r in (found or {}).get("runs", []) if r["graph"]}


def pictures(results: Results) -> str:
    lines = []
    for case in (results.file("vision_h200") or {}).get("cases", []):
        plain, graph = case["plain"], case.get("graph")
        cells = [
            f"{way['host_ms']:.1f} / {way['both_ms']:.1f} ms" if way else ""
            for way in (plain, graph)
        ]
        lines.append((case["images"], str(case["patches"]), *cells))
    head = ("picture", "patches", "plain: host's time / until it is done", "as a graph: the same")
    return markdown(head, lines)


# ---- serving


RTF_TARGETS = {1: 0.04, 8: 0.06, 32: 0.12}
STEP_TARGETS = {1: 2.2, 8: 4.5, 32: 8.0}  # thinker, ms


TEXT, FRAMES, SPEECH_S = 64, 125, 10.0
"""An answer of the workload text-100."""


def float8(results: Results) -> str:
    """The thinker's step with experts in 8 bits, beside the one without."""
    lines = []
    for batch in (1, 8, 32):
        wide, narrow = (
            results.step("thinker step", batch, f) for f in ("steps_h200", "steps_h200_float8")
        )
        if wide is not None and narrow is not None:
            lines.append(
                (
                    str(batch), f"{wide['floor_ms']:.2f} ms", f"{both(wide['p50_ms'], 2)} ms",
                    f"{narrow['floor_ms']:.2f} ms", f"{both(narrow['p50_ms'], 2)} ms",
                    f"{STEP_TARGETS[batch]} ms",
                )
            )  # fmt: skip
    return markdown(
        (
            "rows",
            "bfloat16: floor",
            "p50, two passes",
            "float8: floor",
            "p50, two passes",
            "target",
        ),
        lines,
    )


def together(results: Results) -> str:
    """One answer's steps of both models, one after the other and at the same time."""
    found = results.file("together_h200")
    lines = []
    for r in (found or {}).get("runs", []):
        lines.append(
            (
                r["how"], str(r["batch"]), f"{r['thinker_alone_ms']:.0f}",
                f"{r['talker_alone_ms']:.0f}",
                f"{r['thinker_alone_ms'] + r['talker_alone_ms']:.0f}", f"{r['together_ms']:.0f}",
                f"{r['thinker_together_ms']:.0f} / {r['talker_together_ms']:.0f}",
            )
        )  # fmt: skip
    head = (
        "streams of the GPU",
        "rows",
        "64 thinker steps, ms",
        "125 frames, ms",
        "sum of these two",
        "at once",
    )
    return markdown((*head, "each ends after"), lines)


def rtf(results: Results) -> str:
    """What the steps of an answer add up to if the GPU does one after the other, per second of
    speech."""
    lines = []
    for streams, target in RTF_TARGETS.items():
        thinker, talker = (
            results.step("thinker step (sampled)", streams),
            results.step("talker frame", streams),
        )
        if thinker is None or talker is None:
            continue
        parts = [TEXT * thinker["p50_ms"][0] / 1e3, FRAMES * talker["p50_ms"][0] / 1e3]
        floor = (TEXT * thinker["floor_ms"] + FRAMES * talker["floor_ms"]) / 1e3
        measured = p50s(results, "latency", "text-100", streams, "rtf")
        lines.append(
            (
                str(streams), f"{parts[0] / SPEECH_S:.3f}", f"{parts[1] / SPEECH_S:.3f}",
                f"{sum(parts) / SPEECH_S:.3f}", both(measured, 3) or NOT_YET,
                f"{floor / SPEECH_S:.3f}", f"{target}",
            )
        )  # fmt: skip
    head = (
        "streams",
        "64 thinker steps",
        "125 talker frames",
        "sum of the two",
        "RTF measured",
        "floor of both",
    )
    return markdown((*head, "target"), lines)


def ablation(results: Results) -> str:
    found = results.file("ablation_h200")
    if found is None:
        return ""
    runs = [r for r in found["runs"] if "streams" in r]
    counts = sorted({r["streams"] for r in runs})
    lines = []
    for name in dict.fromkeys(r["variant"] for r in runs):
        mine = {r["streams"]: r for r in runs if r["variant"] == name}
        cells = []
        for n in counts:
            if n not in mine:
                cells += ["", "", ""]
                continue
            r = mine[n]
            same = r["variant"] == r["base"]
            first, ratio = 1e3 * r["seconds"]["first_audio"], r["ratios"]["first_audio"]
            cells.append(str(len(r["raw"]["first_audio"])))
            cells.append(f"{first:.1f} ms" + ("" if same else f" (x {ratio:.2f})"))
            cells.append(f"{r['rtf']:.3f}" + ("" if same else f" (x {r['ratios']['total']:.2f})"))
        base = next(iter(mine.values()))["base"]
        lines.append((name, base if name != base else "", *cells))
    heads = [h for n in counts for h in (f"{many(n)}: answers", "first audio", "RTF")]
    return markdown(("", "compared with", *heads), lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "runs": runs,
    "sources": sources,
    "open": open_loop,
    "before_after": before_after,
    "prefill_priority": prefill_priority,
    "side_by_side": side_by_side,
    "summary": summary,
    "steps": steps,
    "layer": layer_table,
    "frame": frame_table,
    "prompts": prompt_table,
    "latency": latency,
    "rtf": rtf,
    "float8": float8,
    "vocoder": vocoder,
    "pictures": pictures,
    "together": together,
    "realtime": realtime,
    "phases": phases,
    "start": start,
    "memory": memory,
    "host": host,
    "copies": copies,
    "hops": hops,
    "split": split,
    "beside": beside,
    "ablation": ablation,
    "gaps": proofs.gaps,
    "retired": proofs.retired,
    "trees": proofs.trees,
    "ladder": proofs.ladder,
    "long_prompts": proofs.long_prompts,
    "conversations": proofs.conversations,
    "gpu_suite": proofs.gpu_suite,
    "promises": proofs.promises,
    "kills": faults.kills,
    "soak": faults.soak,
    "fuzz": faults.fuzz,
    "attacks": faults.attacks,
    "path": path,
}

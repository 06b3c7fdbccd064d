"""The table's numbers, read off what was measured on a card.

`collect` makes plan_inputs_GPU.json of the results of other programs: what the trace of a served load says (trace.py),
what passes over prompts and the vocoder's calls take by themselves. `table_of` makes a table of that and of the run
that was traced."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness.results import RESULTS, read, write
from bench.plan.runs import FRAME_S, OPENING_S, label, runs_of
from bench.plan.trace import PROMPT, PROMPT_TOKENS, STAGES, announced_ms, filled, reduced
from stretto.planner.table import BINS, Curve, Shape, StageTimes, Table, Together, at, pass_of
from stretto.stage.runner.prefill_graphs import SIZES

MODEL = "Qwen3-Omni-30B-A3B"
PASSES = sorted({*SIZES, PROMPT_TOKENS})
"""Over prompts: rows that are captured, and those of a lone prompt of the load, which chooses fewer experts than one
beside rows that decode."""
GIB = 1 << 30
WEIGHTS_GIB = 66.0  # of all stages, as the plan of a host says
KV_BYTES = {"text": 2 * 48 * 4 * 128 * 2, "frames": 2 * 20 * 2 * 128 * 2}
"""Of one token in each pool, at the released size."""


def collect(gpu: str, traced: Path) -> None:
    """From the raw result of a traced run: the inputs, and the same result without its steps, both under results."""
    raw, passes = read(traced), read(RESULTS / f"prefill_{gpu}.json")
    calls, before = read(RESULTS / f"plan_vocoder_{gpu}.json"), read(RESULTS / f"{gpu}.json")
    vocoder = sorted((r["slots"], r["frames"], r["median_ms"]) for r in calls["runs"])
    prompts = {lane: captured(pass_ms(passes["times_us"], STAGES[lane])) for lane in ("text", "frames")}
    host = before["parts"]["host"]  # parts of a result may be of several commits
    memory = host["found"][0]["memory"]
    commits = {"traced": raw["env"], "prompts": passes["env"], "vocoder": calls["env"], "memory": host["env"]}
    shapes = [(streams, frames) for streams, frames, _ in vocoder]
    write(
        RESULTS / f"plan_inputs_{gpu}.json",
        {
            "about": "What `python -m bench plan` reads of steps: made by its --collect",
            "commits": {name: env["commit"] for name, env in commits.items()},
            "served": reduced(raw, shapes, PASSES, lambda tokens: pass_of(prompts["frames"], tokens)),
            "announced_ms": {label(run): announced_ms(run, raw["loop"]) for run in runs_of(raw)},
            "passes": prompts,
            "vocoder": vocoder,
            "memory": {lane: memory[STAGES[lane]] for lane in ("text", "frames")},
        },
    )
    kept = {k: v for k, v in raw.items() if k not in ("steps", "loop", "server_log")}
    write(RESULTS / f"plan_traced_{gpu}.json", kept)


def pass_ms(passes: Mapping[str, float], name: str) -> Curve:
    """What passes over prompts take, in milliseconds, by rows: those that were measured."""
    prefix = f"{name} pass graph rows="
    return sorted((float(k.removeprefix(prefix)), us / 1e3) for k, us in passes.items() if k.startswith(prefix))


def captured(passes: Curve) -> Curve:
    """The same by the rows of those that are captured."""
    return [(float(rows), round(at(passes, rows), 4)) for rows in PASSES]


def prompt_curve(passes: Curve, served: Mapping[str, float]) -> Curve:
    """Passes by themselves are of an earlier commit. Where served ones are known these count; the others are as much
    quicker as those beside them."""
    known = {int(rows): ms for rows, ms in served.items()}
    ratios = [(math.log(rows), ms / pass_of(passes, rows)) for rows, ms in sorted(known.items())]
    low, high = ratios[0][0], ratios[-1][0]
    return [
        (rows, known.get(int(rows), round(ms * at(ratios, min(max(math.log(rows), low), high)), 4)))
        for rows, ms in passes
    ]


def together_of(served: Mapping[str, Any]) -> Together:
    """The shares by bins; where none was seen, that of the nearest size."""
    shares = {lane: filled([(a, b, s, w) for a, b, s, w in served["shares"][lane]]) for lane in ("text", "frames")}
    sizes = (*range(len(BINS)), PROMPT)

    def prompt(name: str) -> list[float]:
        known = {int(k): v for k, v in served["prompt_shares"][name].items()}
        return [known[min(known, key=lambda k, b=b: (abs(k - b), k))] for b in sizes]

    return Together(
        text=[[shares["text"](a, b) for b in sizes] for a in range(len(BINS))],
        small_prompt=prompt("small"),
        large_prompt=prompt("large"),
        frames=[[shares["frames"](a, b) for b in sizes] for a in range(len(BINS))],
        frames_prompt=served["frames_prompt"],
    )


def shapes_of(vocoder: Sequence[tuple[int, int, float]], served: Mapping[str, Any]) -> list[Shape]:
    """The vocoder's shapes, with what was seen of them in service; where nothing was, that of the nearest."""
    beside = {int(k): v for k, v in served["vocoder_beside"].items()}
    left = {lane: {int(k): v for k, v in served["beside_vocoder"][lane].items()} for lane in ("text", "frames")}
    slower = {i: ms / vocoder[i][2] for i, ms in beside.items()}

    def near(known: Mapping[int, float], i: int) -> float:
        streams, frames, _ = vocoder[i]
        work = streams * frames
        return known[min(known, key=lambda k: (abs(math.log(vocoder[k][0] * vocoder[k][1] / work)), abs(k - i)))]

    return [
        Shape(
            streams, frames, ms, beside_ms=round(max(ms, ms * near(slower, i)), 4), text_share=near(left["text"], i),
            frames_share=near(left["frames"], i),
        )
        for i, (streams, frames, ms) in enumerate(vocoder)
    ]  # fmt: skip


def text_us(runs: Sequence[Mapping[str, Any]]) -> float:
    """Of the server, for a piece of text: how soon after each other the first ones came that were made together."""
    firsts = [[s["sent"] + s["first_text"] for s in run["samples"]] for run in runs]
    return 1e6 * statistics.median(gap for times in firsts for gap in gaps(times, 0.0025))


def end_ms(parts: Mapping[str, Any]) -> tuple[float, float]:
    """Of the server, for the end of an answer, and microseconds for each of its frames: the time from the last packet
    to the end, of listeners who are alone, with short answers and with long ones."""
    alone = [r for name in ("latency", "prompts") for r in parts[name]["found"] if r["streams"] == 1]
    points = []
    for run in alone:
        frames = round((run["samples"][0]["audio_s"] + OPENING_S) / FRAME_S)
        points.append((frames, 1e3 * statistics.median(s["end"] - s["packets"][-1][0] for s in run["samples"])))
    line = statistics.linear_regression(*zip(*points, strict=True))
    return line.intercept, 1e3 * line.slope


def curves(given: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Curve]:
    """As a file has them."""
    return {name: [(float(size), ms) for size, ms in points] for name, points in given.items()}


def gaps(times: Sequence[float], most: float) -> list[float]:
    """Between neighbours that are no farther apart than that."""
    return [b - a for a, b in pairwise(sorted(times)) if b - a <= most]


def table_of(gpu: str, given: Mapping[str, Any], k: Mapping[str, float], runs: Mapping[str, Any]) -> Table:
    """`given`: the inputs; `k`: what is fitted; `runs`: the result of the run that was traced."""
    served = given["served"]
    pools = max(0.0, sum(given["memory"].values()) / GIB - WEIGHTS_GIB)
    tokens = int(pools * GIB / (KV_BYTES["text"] + KV_BYTES["frames"]))
    end, end_frame_us = end_ms(runs["parts"])
    text_prompts = prompt_curve([(rows, ms) for rows, ms in given["passes"]["text"]], served["prompt"])
    prompts: dict[str, Curve] = {"text": text_prompts, "frames": [(rows, ms) for rows, ms in given["passes"]["frames"]]}

    def stage(name: str) -> StageTimes:
        decode = [(float(rows), ms) for rows, ms, _ in served["alone"][name]]
        return StageTimes(decode=decode, prompt=prompts[name], tokens=tokens, **curves(served["host"][name]))

    vocoder, between = curves(served["host"]["vocoder"]), curves(served["between"])
    piece_us, first, then = text_us(runs_of(runs)), *served["admit_ms"]
    back_ms, packet_ms, frame_ms = served["delivery_ms"]
    return Table(
        gpu=gpu, model=MODEL, memory_gib=runs["env"]["gpu"]["memory_gib"], weights_gib=WEIGHTS_GIB,
        max_rows=int(runs["arguments"]["max_rows"]), text=stage("text"), frames=stage("frames"),
        vocoder=shapes_of([(a, b, ms) for a, b, ms in given["vocoder"]], served),
        launch_vocoder=vocoder["launch"], retire_vocoder=vocoder["retire"], **between,
        varies=served["varies"], varies_prompts=served["varies_prompts"],
        together=together_of(served), frame_s=FRAME_S, opening_s=OPENING_S, overhead_ms=k["overhead_ms"],
        jitter_ms=statistics.pstdev(given["announced_ms"]["1 streams"]), serial_ms=k["serial_ms"],
        build_ms=k["build_ms"], admit_ms=first, admit_next_ms=then, hop_us=served["hop_us"], text_us=piece_us,
        packet_us=1e3 * packet_ms, packet_frame_us=1e3 * frame_ms, back_ms=back_ms,
        opening_ms=served["opening_ms"] - piece_us / 1e3,
        end_ms=end, end_frame_us=end_frame_us, made_by=f"python -m bench plan --gpu {gpu}",
    )  # fmt: skip

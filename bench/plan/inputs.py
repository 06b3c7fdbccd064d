"""The table's numbers, read off what was measured on a card.

`collect` makes plan_inputs_GPU.json of the results of other programs: what the trace of a served load says of steps
(trace.py), what passes over prompts and the vocoder's calls take by themselves. `table_of` makes a table of that and of
the run that was traced."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness.results import RESULTS, read, write
from bench.plan.runs import ASKED, FRAME_S, OPENING_S, PARTS
from bench.plan.trace import CHUNK, LANES, OPENING, PROMPT, PROMPT_TOKENS, filled, reduced
from stretto.planner.table import BINS, Curve, StageTimes, Table, Together, at

MODEL = "Qwen3-Omni-30B-A3B"
STAGES = {lane: stage for stage, lane in LANES.items()}
DECODE = ["decode"]
GIB = 1 << 30
WEIGHTS_GIB = 66.0  # of all stages, as the plan of a host says
KV_BYTES = {"text": 2 * 48 * 4 * 128 * 2, "frames": 2 * 20 * 2 * 128 * 2}
"""Of one token in each pool, at the released size."""


def collect(gpu: str, traced: Path) -> None:
    """From the raw result of a traced run: the inputs, and the same result without its steps, both under results."""
    raw, passes = read(traced), read(RESULTS / f"prefill_{gpu}.json")
    calls, before = read(RESULTS / f"plan_vocoder_{gpu}.json"), read(RESULTS / f"{gpu}.json")
    vocoder = [(r["slots"], r["frames"], r["median_ms"]) for r in calls["runs"]]
    shapes: dict[int, list[float]] = {}
    for streams, _, ms in vocoder:
        shapes.setdefault(streams, []).append(ms)
    prompts = {lane: pass_ms(passes["times_us"], STAGES[lane]) for lane in ("text", "frames")}
    host = before["parts"]["host"]  # parts of a result may be of several commits
    memory = host["found"][0]["memory"]
    commits = {"traced": raw["env"], "prompts": passes["env"], "vocoder": calls["env"], "memory": host["env"]}
    write(
        RESULTS / f"plan_inputs_{gpu}.json",
        {
            "about": "What `python -m bench plan` reads of steps: made by its --collect",
            "commits": {name: env["commit"] for name, env in commits.items()},
            "served": reduced(raw, shapes, at(prompts["frames"], PROMPT_TOKENS + OPENING)),
            "passes": prompts,
            "vocoder": vocoder,
            "memory": {lane: memory[STAGES[lane]] for lane in ("text", "frames")},
        },
    )
    write(RESULTS / f"plan_traced_{gpu}.json", {k: v for k, v in raw.items() if k not in ("steps", "server_log")})


def pass_ms(passes: Mapping[str, float], name: str) -> list[tuple[int, float]]:
    """What captured passes over prompts take, in milliseconds, by rows."""
    prefix = f"{name} pass graph rows="
    return sorted((int(k.removeprefix(prefix)), us / 1e3) for k, us in passes.items() if k.startswith(prefix))


def prompt_curve(passes: Sequence[tuple[int, float]], served: Sequence[tuple[int, float]]) -> Curve:
    """Passes by themselves are of an earlier commit. Where served ones are known these count. Between them, passes of
    up to CHUNK rows are as much quicker as the largest known one of these; larger passes are made in another way (the
    one of CHUNK rows takes longer than the next), and lie between those that are known."""
    ratios = [(math.log(n), ms / at(passes, n)) for n, ms in served if n < CHUNK]
    small = [(float(n), ms * at(ratios, min(math.log(n), ratios[-1][0]))) for n, ms in passes if n <= CHUNK]
    known = [(float(n + (n == CHUNK)), ms) for n, ms in served]
    curve = dict(small) | dict(known)
    return [(n, round(ms, 4)) for n, ms in sorted(curve.items())]


def together_of(served: Mapping[str, Any]) -> Together:
    """The shares by bins; where none was seen, that of the nearest size."""
    shares = {lane: filled([(a, b, s, w) for a, b, s, w in served["shares"][lane]]) for lane in ("text", "frames")}
    prompt = {int(k): v for k, v in served["prompt_shares"].items()}
    calls = {lane: {int(k): v for k, v in by.items()} for lane, by in served["beside_vocoder"].items()}
    own = {int(k): v for k, v in served["vocoder"].items()}
    sizes = range(len(BINS))
    return Together(
        text=[[shares["text"](a, b) for b in (*sizes, PROMPT)] for a in sizes],
        prompt=[*(prompt[max(k for k in prompt if k <= b)] for b in sizes), prompt[PROMPT]],
        frames=[[shares["frames"](a, b) for b in (*sizes, PROMPT)] for a in sizes],
        frames_prompt=served["frames_prompt"],
        text_vocoder=[calls["text"][b] for b in sizes],
        frames_vocoder=[calls["frames"][b] for b in sizes],
        vocoder=[own[next(n for n in sorted(own) if n >= rows)] for rows in BINS],
        vocoder_first=own[min(own)],
    )


def launch_ms(runs: Sequence[Mapping[str, Any]], stage: str, kinds: Sequence[str]) -> tuple[float, float]:
    """Of the host, for a step of these kinds, and for each of its rows (or prompts) more: a line through what the
    stage's counters say, run by run."""
    points = []
    for run in runs:
        host, asked = run["host"], ASKED[run["workload"]]
        tokens = host.get(f'stretto_stage_tokens_total{{stage="{stage}"}}', 0.0)
        each = {"thinker": asked.text, "talker": asked.frames + 1}.get(stage, 1)
        names = [f'stretto_stage_launch_seconds_%s{{stage="{stage}",kind="{kind}"}}' for kind in kinds]
        spent, steps = (sum(host.get(name % what, 0.0) for name in names) for what in ("sum", "count"))
        if steps:
            points.append(((tokens if kinds == DECODE else tokens / each) / steps, 1e3 * spent / steps))
    if stage == STAGES["vocoder"]:
        return statistics.mean(ms for _, ms in points), 0.0
    line = statistics.linear_regression(*zip(*points, strict=True))
    return line.intercept, line.slope


def retire_ms(runs: Sequence[Mapping[str, Any]], stage: str) -> tuple[float, float]:
    """Of the host, to pass on what came of a step, and for each row of it more: a line through what the stage's
    counters say, run by run."""

    def point(run: Mapping[str, Any]) -> tuple[float, float]:
        host = run["host"]
        steps = sum(v for n, v in host.items() if n.startswith("stretto_stage_steps_total{") and f'"{stage}"' in n)
        rows = host.get(f'stretto_stage_tokens_total{{stage="{stage}"}}')
        if rows is None:  # a vocoder's are packets, of the requests that do not count too
            samples, frames = run["samples"], ASKED[run["workload"]].frames
            made = host[f'stretto_stage_frames_total{{stage="{stage}"}}']
            rows = sum(len(s["packets"]) for s in samples) * made / (frames * len(samples))
        return rows / steps, 1e3 * host[f'stretto_stage_retire_seconds_total{{stage="{stage}"}}'] / steps

    line = statistics.linear_regression(*zip(*map(point, runs), strict=True))
    return line.intercept, line.slope


def admit_ms(part: Mapping[str, Any]) -> float:
    """Of the host, for a request: how soon after each other the stages heard of those that came together."""
    told = []
    for run in part["found"]:
        samples = sorted(run["samples"], key=lambda s: s["sent"])
        pairs = zip(samples, run["phases_raw"], strict=True)
        told.append(sorted(s["sent"] + p["server and socket"] + p["admission"] for s, p in pairs))
    return 1e3 * statistics.median(gap for times in told for gap in gaps(times, 0.0015))


def server_us(runs: Sequence[Mapping[str, Any]]) -> float:
    """Of the server, for a packet or a piece of text: how soon after each other the first ones came that were made
    together."""
    firsts = [[s["sent"] + s[what] for s in run["samples"]] for run in runs for what in ("first_text", "first_audio")]
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


def jitter_ms(parts: Mapping[str, Any]) -> float:
    """How much the way of a request varies: the standard deviation of the first text, of a listener who is alone."""
    [run] = [r for r in parts["latency"]["found"] if r["streams"] == 1]
    return 1e3 * statistics.pstdev(s["first_text"] for s in run["samples"])


def gaps(times: Sequence[float], most: float) -> list[float]:
    """Between neighbours that are no farther apart than that."""
    return [b - a for a, b in pairwise(sorted(times)) if b - a <= most]


def table_of(gpu: str, given: Mapping[str, Any], k: Mapping[str, float], runs: Mapping[str, Any]) -> Table:
    """`given`: the inputs; `k`: what is fitted; `runs`: the result of the run that was traced."""
    served = given["served"]
    pools = max(0.0, sum(given["memory"].values()) / GIB - WEIGHTS_GIB)
    tokens = int(pools * GIB / (KV_BYTES["text"] + KV_BYTES["frames"]))
    loads = [run for part in PARTS if part in runs["parts"] for run in runs["parts"][part]["found"]]
    retire, retire_packet = retire_ms(loads, "code2wav")
    end, end_frame_us = end_ms(runs["parts"])
    prompts: dict[str, Curve] = {
        "text": prompt_curve(given["passes"]["text"], served["prompt"]),
        "frames": [(float(n), ms) for n, ms in given["passes"]["frames"]],
    }

    def stage(name: str) -> StageTimes:
        launch, launch_row = launch_ms(loads, STAGES[name], DECODE)
        prompt, each = launch_ms(loads, STAGES[name], ["prefill", "mixed"])
        retire, retire_row = retire_ms(loads, STAGES[name])
        return StageTimes(
            decode=[(float(rows), ms) for rows, ms, _ in served["alone"][name]], prompt=prompts[name], tokens=tokens,
            launch=launch, launch_row=launch_row, launch_prompts=prompt, launch_prompt=each, retire=retire,
            retire_row=retire_row,
        )  # fmt: skip

    return Table(
        gpu=gpu, model=MODEL, memory_gib=runs["env"]["gpu"]["memory_gib"], weights_gib=WEIGHTS_GIB,
        max_rows=int(runs["arguments"]["max_rows"]), text=stage("text"), frames=stage("frames"),
        vocoder=[(int(streams), int(frames), ms) for streams, frames, ms in given["vocoder"]],
        launch_vocoder=launch_ms(loads, "code2wav", DECODE)[0], retire_vocoder=retire, retire_packet=retire_packet,
        together=together_of(served), frame_s=FRAME_S, opening_s=OPENING_S, overhead_ms=k["overhead_ms"],
        jitter_ms=jitter_ms(runs["parts"]), serial_ms=k["serial_ms"], build_ms=k["build_ms"],
        admit_ms=admit_ms(runs["parts"]["timeline"]),
        hop_us=k["hop_us"], server_us=server_us(loads), end_ms=end, end_frame_us=end_frame_us,
        made_by=f"python -m bench plan --gpu {gpu}",
    )  # fmt: skip

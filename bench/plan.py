"""Step times for `stretto plan`, from what was measured on a card, and how far its replay is from the measured runs.

    python -m bench plan --gpu h200 --out bench/results/plan_h200.json     # the table
    python -m bench plan --gpu h200 --fit 300 --out ...                    # fit what is not measured alone anew

Reads bench/results/{steps,together,prefill,code2wav}_GPU.json and GPU.json, the results of the programs `steps`,
`kernels` and `serve` on that card. Measured are what steps and passes over prompts take alone, by the experts or the
rows that they read, how much slower text and frames are beside each other, and what the host needs for a launch.
FITTED are eleven numbers, the same for all loads, from the runs of GPU.json (closed loops of 1 to 32 listeners,
requests at random moments, 128 listeners who come within two seconds). The replay is then checked against runs that it
has not seen: GPU_again.json, and the open loops of open_before_after.json. Closed loops are replayed as loops, the
others with the moments at which their requests were sent.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.results import RESULTS, parser, read
from stretto.planner.heard import Asked, Heard
from stretto.planner.plan import quantile
from stretto.planner.replay import Card, replay
from stretto.planner.table import StageTimes, Table, Together

MODEL = "Qwen3-Omni-30B-A3B"
STAGES = {"text": ("thinker step", "thinker"), "frames": ("talker frame", "talker")}
ASKED = {"text-100": Asked(108, 64, 125), "long-60s": Asked(108, 300, 750)}
FRAME_S, OPENING_S = 0.08, 0.08 - 1365 / 24000
GIB = 1 << 30

FITTED: dict[str, dict[str, float]] = {
    "h200": {
        "frames_all_ms": 9.15,
        "text_spread": 0.5585,
        "frames_spread": 0.775,
        "mixed": 0.505,
        "beside_vocoder": 0.587,
        "vocoder_beside": 0.637,
        "overhead_ms": 2.72,
        "serial_ms": 0.855,
        "hop_us": 150.0,
        "host_us": 25.0,
        "server_us": 74.5,
    }
}
EXPERTS, PICKS = 128, {"text": 8, "frames": 6}  # of a layer, and of those that a row picks
SEEDS = 3
SHARES = ("text_spread", "frames_spread", "mixed", "beside_vocoder", "vocoder_beside")
"""Those that are at most 1; the others are times."""
WEIGHTS = {"first_audio_p50": 1.0, "first_audio_p99": 0.3, "rtf_p50": 1.5}  # chance moves the p99 most
MEASURES = ("first_audio_p50", "first_audio_p99", "rtf_p50")


def measured(gpu: str) -> dict[str, Any]:
    """The curves of steps alone."""
    steps = read(RESULTS / f"steps_{gpu}.json")["steps"]
    both = read(RESULTS / f"together_{gpu}.json")
    beside = [r for r in both["runs"] if r["how"] == "service priorities"]
    passes = read(RESULTS / f"prefill_{gpu}.json")["times_us"]
    vocoder = read(RESULTS / f"code2wav_{gpu}.json")["runs"]
    found: dict[str, Any] = {"vocoder": [(r["slots"], r["frames"], r["median_ms"]) for r in vocoder if r["graph"]]}
    # Newer ones of the same, where the steps alone are as in `steps`.
    newer = {int(k.split()[-1]): r for k, r in both["partitions"].items() if k.startswith("service priorities ")}
    found["beside"] = {**{r["batch"]: shares(r) for r in beside}, **{n: shares(r) for n, r in newer.items()}}
    found["beside"][2] = found["beside"][8]  # steps of one row have kernels of their own; those of more are of a kind
    alone = dict(found_rows(passes, "thinker"))
    prompts = [(p["prompt_rows"], p) for p in both["prompts"]]
    found["prompt_beside"] = [(n, alone[n] / p["pass_beside_ms"]) for n, p in prompts]
    found["beside_prompt"] = [(n, p["frame_alone_ms"]["p50"] / p["frame_beside_ms"]["p50"]) for n, p in prompts]
    for stage, (what, name) in STAGES.items():
        times = {s["distinct_experts"]: sum(s["p50_ms"]) / len(s["p50_ms"]) for s in steps if s["what"] == what}
        (_, one), *more = sorted(times.items())
        found[stage] = {"one": one, "decode": more, "prompt": found_rows(passes, name)}
    return found


def line(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Straight through the last two points."""
    (a, low), (b, high) = curve[-2:]
    return low + (high - low) * (size - a) / (b - a)


def launch_ms(runs: Mapping[str, Any], stage: str) -> tuple[float, float]:
    """Of the host, for a step that only decodes and for one that holds prompts, on average over all runs."""

    def total(what: str, kinds: Sequence[str]) -> float:
        names = [f'stretto_stage_launch_seconds_{what}{{stage="{stage}",kind="{kind}"}}' for kind in kinds]
        return float(sum(runs["metrics_at_end"].get(n, 0.0) - runs["metrics_at_start"].get(n, 0.0) for n in names))

    alone, prompts = ((1e3 * total("sum", k), total("count", k)) for k in (["decode"], ["prefill", "mixed"]))
    return alone[0] / alone[1], prompts[0] / max(1.0, prompts[1])


def found_rows(passes: Mapping[str, float], name: str) -> list[tuple[int, float]]:
    """What captured passes over prompts take, in milliseconds, by rows."""
    prefix = f"{name} pass graph rows="
    return sorted((int(k.removeprefix(prefix)), us / 1e3) for k, us in passes.items() if k.startswith(prefix))


def shares(run: Mapping[str, Any]) -> tuple[float, float]:
    """How fast steps of the text and of the frames stage went while both ran: both ran until the faster one ended, and
    how long the rest of the slower one takes alone is known."""
    (_, text), (_, frames) = STAGES.values()
    both = min(run[f"{text}_together_ms"], run[f"{frames}_together_ms"])
    done = {n: run[f"{n}_alone_ms"] - (run[f"{n}_together_ms"] - both) for n in (text, frames)}
    return done[text] / both, done[frames] / both


def table_of(gpu: str, found: Mapping[str, Any], k: Mapping[str, float], runs: Mapping[str, Any]) -> Table:
    """`k`: what is fitted."""
    host = runs["parts"]["host"]["found"][0]
    memory = runs["env"]["gpu"]["memory_gib"]
    kept = {name: host["memory"][stage] for name, (_, stage) in STAGES.items()}
    weights = 66.0  # of all stages, as the plan of a host says
    pools = max(0.0, sum(kept.values()) / GIB - weights)
    tokens = int(pools * GIB / (KV_BYTES["text"] + KV_BYTES["frames"]))
    ends = {"text": line(found["text"]["decode"], EXPERTS), "frames": k["frames_all_ms"]}

    def stage(name: str, mixed: float) -> StageTimes:
        """Steps of two rows and more: in a line with those measured, down to the experts of one row."""
        few, own = PICKS[name], found[name]
        launch, launch_prompt = launch_ms(runs, STAGES[name][1])
        return StageTimes(
            one=own["one"], decode=[(few, line(own["decode"], few)), *own["decode"], (EXPERTS, ends[name])],
            experts=EXPERTS, picks=few, spread=k[f"{name}_spread"], prompt=own["prompt"], mixed=mixed, tokens=tokens,
            launch=launch, launch_prompt=launch_prompt,
        )  # fmt: skip

    return Table(
        gpu=gpu, model=MODEL, memory_gib=memory, weights_gib=weights, max_rows=int(runs["arguments"]["max_rows"]),
        text=stage("text", k["mixed"]), frames=stage("frames", 0.0),
        vocoder=found["vocoder"], launch_vocoder=launch_ms(runs, "code2wav")[0],
        together=Together(
            text=[(n, text) for n, (text, _) in sorted(found["beside"].items())], prompt=found["prompt_beside"],
            frames=[(n, frames) for n, (_, frames) in sorted(found["beside"].items())],
            frames_prompt=found["beside_prompt"], vocoder=k["beside_vocoder"], beside_vocoder=k["vocoder_beside"],
        ),
        frame_s=FRAME_S, opening_s=OPENING_S, overhead_ms=k["overhead_ms"], serial_ms=k["serial_ms"],
        hop_us=k["hop_us"], host_us=k["host_us"], server_us=k["server_us"], made_by=f"python -m bench plan --gpu {gpu}",
    )  # fmt: skip


KV_BYTES = {"text": 2 * 48 * 4 * 128 * 2, "frames": 2 * 20 * 2 * 128 * 2}
"""Of one token in each pool, at the released size."""


def replays(table: Table, run: Mapping[str, Any], seeds: int = SEEDS) -> list[list[Heard]]:
    """Several, since it is chance which requests share a step."""
    asked, found = ASKED[run["workload"]], []
    for seed in range(seeds):
        card = Card(table, seed=seed)
        if run["workload"] == "text-100" and run["rate"] is None:
            found.append(replay_closed(card, asked, run["streams"], run["answers"]))
        else:
            found.append(replay(card, iter(sorted((s["sent"], asked) for s in run["samples"])), math.inf))
    return found


def fitted_runs(gpu: str) -> list[Any]:
    parts = read(RESULTS / f"{gpu}.json")["parts"]
    return [run for part in ("latency", "open", "realtime") for run in parts[part]["found"]]


def other_runs(gpu: str) -> list[Any]:
    """Of the same commit, and not fitted."""
    if gpu != "h200":
        return []
    again: list[Any] = read(RESULTS / f"{gpu}_again.json")["parts"]["latency"]["found"]
    opened = [r for r in read(RESULTS / "open_before_after.json")["runs"] if r["which"] == "after"]
    return again + [run for r in opened for run in r["found"]]


def told(run: Mapping[str, Any]) -> dict[str, float]:
    s = run["summary"]
    return {
        "first_audio_p50": s["first_audio_s"]["p50"],
        "first_audio_p99": s["first_audio_s"]["p99"],
        "rtf_p50": s["rtf"]["p50"],
    }


def seen(heard: Sequence[Heard]) -> dict[str, float]:
    first = [h.first_audio for h in heard if h.first_audio is not None]
    values = quantile(first, 0.5), quantile(first, 0.99), quantile([h.rtf for h in heard], 0.5)
    return dict(zip(MEASURES, values, strict=True))


def error(table: Table, run: Mapping[str, Any], seeds: int = SEEDS) -> dict[str, float]:
    """How far the replay is from what was measured, as shares of that."""
    found, measured = [seen(heard) for heard in replays(table, run, seeds)], told(run)
    return {name: sum(f[name] for f in found) / len(found) / measured[name] - 1 for name in MEASURES}


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(sum(abs(e[name]) for e in found) / len(found), 3) for name in MEASURES}


def worst(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(max(abs(e[name]) for e in found), 3) for name in MEASURES}


def label(run: Mapping[str, Any]) -> str:
    return f"{run['rate']:g} a second" if run["streams"] is None else f"{run['streams']} streams"


def between(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """How far the runs of one load are from each other: the largest from the smallest."""
    loads: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        loads.setdefault(label(run), []).append(told(run))
    return {
        load: {name: max(m[name] for m in all) / min(m[name] for m in all) - 1 for name in MEASURES}
        for load, all in loads.items()
        if len(all) > 1
    }


def fit(gpu: str, found: Mapping[str, Any], runs: Mapping[str, Any], seconds: float, seed: int) -> dict[str, float]:
    """Change a few numbers at a time, and keep what is better."""
    best = dict(FITTED[gpu])

    def loss(k: Mapping[str, float], least: float) -> float:
        """Of all runs, or so much of it that it is no better."""
        total, table = 0.0, table_of(gpu, found, k, runs)
        for run in fitted_runs(gpu):
            e = error(table, run, 2)
            total += sum(WEIGHTS[name] * abs(e[name]) ** 1.5 for name in MEASURES)
            if total >= least:
                break
        return total

    least, rng, end = loss(best, math.inf), random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        k = dict(best)
        for name in rng.sample(sorted(k), rng.choice((1, 2, 3))):
            k[name] *= math.exp(rng.gauss(0, 0.07))
            if name in SHARES:
                k[name] = min(k[name], 1.0)
        if (new := loss(k, least)) < least:
            least, best = new, k
            print(f"{least:.4f}", json.dumps({n: round(v, 4) for n, v in best.items()}), flush=True)
    return best


def main(given: Sequence[str]) -> int:
    p = parser("plan", __doc__)
    p.add_argument("--gpu", default="h200")
    p.add_argument("--fit", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(given)
    found, runs = measured(args.gpu), read(RESULTS / f"{args.gpu}.json")
    k = fit(args.gpu, found, runs, args.fit, args.seed) if args.fit else FITTED[args.gpu]
    table = table_of(args.gpu, found, k, runs)
    fitted, others = fitted_runs(args.gpu), other_runs(args.gpu)
    errors = {which: [error(table, run) for run in group] for which, group in (("fitted", fitted), ("other", others))}
    for which, group in (("fitted", fitted), ("other", others)):
        for run, e in zip(group, errors[which], strict=True):
            print(f"{which:8}{label(run):14}" + "  ".join(f"{n} {shown(e[n])}" for n in MEASURES), flush=True)
        if group:
            print(f"{which}: mean {means(errors[which])}, worst {worst(errors[which])}")
    apart = between(fitted + others)
    for load, e in apart.items():
        print(f"measured {load:14}apart by " + "  ".join(f"{n} {shown(e[n])}" for n in MEASURES))
    every = errors["fitted"] + errors["other"]
    table = msgspec.structs.replace(
        table, error=means(every), worst=worst(every), between=worst(list(apart.values())) if apart else {}
    )
    print("all: mean", table.error, "worst", table.worst, "measured runs apart by", table.between)
    if args.out is not None:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return 0


def shown(share: float) -> str:
    return f"{100 * share:+.0f} %"


def replay_closed(card: Card, asked: Asked, streams: int, requests: int) -> list[Heard]:
    """A fixed number of clients, each of which sends its next request when it has its answer. The first request of each
    is left out of the result."""
    left = requests

    def again(heard: Heard) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            card.arrive(asked)

    card.ended = again
    for _ in range(streams):
        card.arrive(asked)
    while card.running:
        card.advance(card.now + 1.0)
    return sorted(card.heard.values(), key=lambda h: h.arrived)[streams:]

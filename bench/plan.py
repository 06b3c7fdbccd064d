"""Step times for `stretto plan`, from what was measured on a card, and how far its replay is from the measured runs.

    python -m bench plan --gpu h200 --out bench/results/plan_h200.json     # the table
    python -m bench plan --gpu h200 --fit 300 --out ...                    # fit what is not measured alone anew

Reads bench/results/{steps,together,prefill,code2wav}_GPU.json and GPU.json, the results of the programs `steps`,
`kernels` and `serve` on that card. What a step of up to 32 rows takes alone is measured, and how much slower decode
steps of text and frames are beside each other. FITTED are thirteen numbers, the same for all runs of `serve` (closed
loops of 1 to 32 listeners, and 64 to 128 listeners who come within two seconds): steps of 128 rows, how much less they
take where rows choose experts alike, prompts and vocoder beside others, and the time of server and host. The replay's
error is its difference from those same runs.
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
from stretto.planner.plan import quantile
from stretto.planner.replay import Asked, Card, Heard, replay
from stretto.planner.table import StageTimes, Table, Together

MODEL = "Qwen3-Omni-30B-A3B"
STAGES = {"text": ("thinker step", "thinker"), "frames": ("talker frame", "talker")}
ASKED = {"text-100": Asked(108, 64, 125), "long-60s": Asked(108, 300, 750)}
FRAME_S, OPENING_S = 0.08, 0.08 - 1365 / 24000
GIB = 1 << 30

FITTED: dict[str, dict[str, float]] = {
    "h200": {
        "frames_all_ms": 8.0,
        "text_spread": 0.55,
        "frames_spread": 0.8,
        "mixed": 0.42,
        "beside_vocoder": 0.5,
        "vocoder_beside": 0.85,
        "overhead_ms": 3.5619,
        "serial_ms": 1.3,
        "hop_us": 300.0,
        "host_us": 56.7636,
        "server_us": 252.9014,
    }
}
EXPERTS, PICKS = 128, {"text": 8, "frames": 6}  # of a layer, and of those that a row picks
SEEDS = 3
MILLISECONDS = ("text_128_ms", "frames_all_ms", "overhead_ms", "serial_ms", "host_us", "server_us")
"""Those that are times; the others are shares, and at most 1."""


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
    found["prompt_beside"] = [(p["prompt_rows"], alone[p["prompt_rows"]] / p["pass_beside_ms"]) for p in both["prompts"]]
    found["beside_prompt"] = [
        (p["prompt_rows"], p["frame_alone_ms"]["p50"] / p["frame_beside_ms"]["p50"]) for p in both["prompts"]
    ]
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
        return sum(runs["metrics_at_end"].get(n, 0.0) - runs["metrics_at_start"].get(n, 0.0) for n in names)

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
    text, frames = ([(picks, line(found[name]["decode"], picks)), *found[name]["decode"]] for name, picks in PICKS.items())
    kept = {name: host["memory"][stage] for name, (_, stage) in STAGES.items()}
    weights = 66.0  # of all stages, as the plan of a host says
    pools = max(0.0, sum(kept.values()) / GIB - weights)
    tokens = int(pools * GIB / (KV_BYTES["text"] + KV_BYTES["frames"]))
    return Table(
        gpu=gpu, model=MODEL, memory_gib=memory, weights_gib=weights, max_rows=int(runs["arguments"]["max_rows"]),
        text=StageTimes(found["text"]["one"], [*text, (EXPERTS, line(text, EXPERTS))], EXPERTS, PICKS["text"], k["text_spread"], found["text"]["prompt"], k["mixed"], tokens, *launch_ms(runs, "thinker")),
        frames=StageTimes(found["frames"]["one"], [*frames, (EXPERTS, k["frames_all_ms"])], EXPERTS, PICKS["frames"], k["frames_spread"], found["frames"]["prompt"], 0.0, tokens, *launch_ms(runs, "talker")),
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


def replayed(table: Table, run: Mapping[str, Any]) -> list[Heard]:
    """Closed loops several times, since it is chance which requests share a step, and it repeats."""
    asked = ASKED[run["workload"]]
    if run["workload"] == "text-100":
        cards = [Card(table, seed=seed) for seed in range(SEEDS)]
        return [h for card in cards for h in replay_closed(card, asked, run["streams"], run["answers"])]
    return replay(Card(table), iter(sorted((s["sent"], asked) for s in run["samples"])), math.inf)


def all_runs(runs: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = runs["parts"]["latency"]["found"] + runs["parts"]["realtime"]["found"]
    return found


def error(table: Table, run: Mapping[str, Any]) -> dict[str, float]:
    """How far the replay is from what was measured, as shares of that."""
    heard, told = replayed(table, run), run["summary"]
    first = [h.first_audio for h in heard if h.first_audio is not None]
    return {
        "streams": run["streams"],
        "first_audio_p50": quantile(first, 0.5) / told["first_audio_s"]["p50"] - 1,
        "first_audio_p99": quantile(first, 0.99) / told["first_audio_s"]["p99"] - 1,
        "rtf_p50": quantile([h.rtf for h in heard], 0.5) / told["rtf"]["p50"] - 1,
    }


def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = [name for name in found[0] if name != "streams"]
    return {name: round(sum(abs(e[name]) for e in found) / len(found), 3) for name in names}


def worst(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(max(abs(e[name]) for e in found), 3) for name in found[0] if name != "streams"}


def fit(gpu: str, found: Mapping[str, Any], runs: Mapping[str, Any], seconds: float, seed: int) -> dict[str, float]:
    """Change a few numbers at a time, and keep what is better."""
    best = dict(FITTED[gpu])

    def loss(k: Mapping[str, float], least: float) -> float:
        """Of all runs, or so much of it that it is no better."""
        total, table = 0.0, table_of(gpu, found, k, runs)
        for run in all_runs(runs):
            total += sum(abs(v) ** 1.5 for n, v in error(table, run).items() if n != "streams")
            if total >= least:
                break
        return total

    least, rng, end = loss(best, math.inf), random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        k = dict(best)
        for name in rng.sample(sorted(k), rng.choice((1, 2, 3))):
            k[name] *= math.exp(rng.gauss(0, 0.07))
            if name not in MILLISECONDS:
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
    by_run = [error(table, run) for run in all_runs(runs)]
    for e in by_run:
        print(
            f"{e['streams']:4.0f} streams  "
            + "  ".join(f"{n} {100 * v:+.0f} %" for n, v in e.items() if n != "streams")
        )
    table = msgspec.structs.replace(table, error=means(by_run), worst=worst(by_run))
    print("mean", table.error, "worst", table.worst)
    if args.out is not None:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return 0


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

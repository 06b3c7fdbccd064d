"""Step times for `stretto plan`, from what was measured on a card, and how far its replay is from the measured runs.

    python -m bench plan --gpu h200 --out bench/results/plan_h200.json     # the table
    python -m bench plan --gpu h200 --fit 300 --out ...                    # fit what is not measured alone anew

Reads bench/results/plan_inputs_GPU.json, which holds results of the programs `steps` and `kernels` on that card, and
GPU.json, the result of `serve`. Measured are what steps and passes over prompts take alone, by the experts or the
rows that they read, how much slower text and frames are beside each other, what the host needs to admit, to launch and
to pass on what came of a step, what the server needs for a packet and for the end of an answer, and how much the way
of a request varies. FITTED are ten numbers, the same for all loads, from the runs of GPU.json (closed loops of 1 to 32
listeners, requests at random moments, 128 listeners who come within two seconds). The replay is then checked against
runs that it has not seen: GPU_again.json, and the open loops of open_before_after.json. Closed loops are replayed as
loops, with the clients in processes as the program `serve` has them; the others with the moments at which their
requests were sent. Beside each error stands the 90 % sampling interval of what was measured, and how far runs of a load
differ.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.results import RESULTS, parser, read
from stretto.planner.error import error_lines
from stretto.planner.heard import Asked, Heard
from stretto.planner.plan import quantile
from stretto.planner.replay import Card, replay
from stretto.planner.table import Check, StageTimes, Table, Together

MODEL = "Qwen3-Omni-30B-A3B"
STAGES = {"text": ("thinker step", "thinker"), "frames": ("talker frame", "talker")}
ASKED = {"text-100": Asked(108, 64, 125), "long-60s": Asked(108, 300, 750)}
FRAME_S, OPENING_S = 0.08, 0.08 - 1365 / 24000
GIB = 1 << 30
PARTS = ("latency", "open", "realtime")
"""Of a result, whose runs are replayed."""

FITTED: dict[str, dict[str, float]] = {
    "h200": {
        "frames_all_ms": 9.15,
        "text_spread": 0.52,
        "frames_spread": 0.716,
        "mixed": 0.37,
        "beside_power": 0.3,
        "beside_vocoder": 0.46,
        "vocoder_beside": 0.6156,
        "overhead_ms": 2.0,
        "serial_ms": 1.4,
        "hop_us": 113.0,
    }
}
EXPERTS, PICKS = 128, {"text": 8, "frames": 6}  # of a layer, and of those that a row picks
SEEDS, FIT_SEEDS = 10, 5
"""Replays of a run. The least change lets other requests share a step, so one of them says little."""
SHARES = ("text_spread", "frames_spread", "mixed", "beside_vocoder", "vocoder_beside")
"""Those that are at most 1; the others are times."""
TEXT, AUDIO = (0.5, 0.9), (0.1, 0.5, 0.9, 0.99)
"""Quantiles of first text and first audio that are fitted, beside the median of the real-time factor."""
WEIGHTS = (0.7, 0.7, 0.3, 1.0, 1.0, 0.4, 1.5)
BURST_S = 0.012  # requests that were sent no farther apart came together
MEASURES = ("first_audio_p50", "first_audio_p99", "rtf_p50")


def measured(gpu: str) -> dict[str, Any]:
    """The curves of steps alone."""
    given = read(RESULTS / f"plan_inputs_{gpu}.json")
    steps, both = given["steps"], given["together"]
    beside = [r for r in both["runs"] if r["how"] == "service priorities"]
    passes, vocoder = given["prefill"], given["code2wav"]
    found: dict[str, Any] = {"vocoder": [(r["slots"], r["frames"], r["median_ms"]) for r in vocoder if r["graph"]]}
    # Newer ones of the same, where the steps alone are as in `steps`.
    newer = {int(k.split()[-1]): r for k, r in both["partitions"].items() if k.startswith("service priorities ")}
    found["beside"] = {**{r["batch"]: shares(r) for r in beside}, **{n: shares(r) for n, r in newer.items()}}
    found["beside"][2] = found["beside"][8]  # steps of one row have kernels of their own; those of more are of a kind
    alone = dict(found_rows(passes, "thinker"))
    prompts = [(p["prompt_rows"], p) for p in both["prompts"]]
    found["prompt_beside"] = [(n, prompt_share(p, alone[n])) for n, p in prompts]
    [found["prompt_frames"]] = {p["batch"] for _, p in prompts}
    found["beside_prompt"] = [(n, p["frame_alone_ms"]["p50"] / p["frame_beside_ms"]["p50"]) for n, p in prompts]
    for stage, (what, name) in STAGES.items():
        times = {s["distinct_experts"]: sum(s["p50_ms"]) / len(s["p50_ms"]) for s in steps if s["what"] == what}
        (_, one), *more = sorted(times.items())
        found[stage] = {"one": one, "decode": more, "prompt": found_rows(passes, name)}
    return found


def prompt_share(run: Mapping[str, Any], alone_ms: float) -> float:
    """How fast passes over prompts went beside frames. The frames of a round may have ended before its passes: how long
    the rest of those take alone is known."""
    passes, rounds = max(1, 4096 // run["prompt_rows"]), 3
    reading, frames = passes * run["pass_beside_ms"], sum(run["raw_ms"]["beside"]) / rounds
    both = min(reading, frames)
    return (passes * alone_ms - (reading - both)) / both


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
    loads = [run for part in PARTS for run in runs["parts"][part]["found"]]
    retire, retire_packet = retire_ms(loads, "code2wav")
    end, end_frame_us = end_ms(runs["parts"])
    ends = {"text": line(found["text"]["decode"], EXPERTS), "frames": k["frames_all_ms"]}

    def stage(name: str, mixed: float) -> StageTimes:
        """Steps of two rows and more: in a line with those measured, down to the experts of one row."""
        few, own = PICKS[name], found[name]
        launch, launch_prompt = launch_ms(runs, STAGES[name][1])
        retire, retire_row = retire_ms(loads, STAGES[name][1])
        return StageTimes(
            one=own["one"], decode=[(few, line(own["decode"], few)), *own["decode"], (EXPERTS, ends[name])],
            experts=EXPERTS, picks=few, spread=k[f"{name}_spread"], prompt=own["prompt"], mixed=mixed, tokens=tokens,
            launch=launch, launch_prompt=launch_prompt, retire=retire, retire_row=retire_row,
        )  # fmt: skip

    return Table(
        gpu=gpu, model=MODEL, memory_gib=memory, weights_gib=weights, max_rows=int(runs["arguments"]["max_rows"]),
        text=stage("text", k["mixed"]), frames=stage("frames", 0.0),
        vocoder=found["vocoder"], launch_vocoder=launch_ms(runs, "code2wav")[0], retire_vocoder=retire,
        retire_packet=retire_packet,
        together=Together(
            text=[(n, text) for n, (text, _) in sorted(found["beside"].items())], prompt=found["prompt_beside"],
            beside=found["prompt_frames"], power=k["beside_power"],
            frames=[(n, frames) for n, (_, frames) in sorted(found["beside"].items())],
            frames_prompt=found["beside_prompt"], vocoder=k["beside_vocoder"], beside_vocoder=k["vocoder_beside"],
        ),
        frame_s=FRAME_S, opening_s=OPENING_S, overhead_ms=k["overhead_ms"], jitter_ms=jitter_ms(runs["parts"]),
        serial_ms=k["serial_ms"], admit_ms=admit_ms(runs["parts"]["timeline"]), hop_us=k["hop_us"],
        server_us=server_us(loads), end_ms=end, end_frame_us=end_frame_us, made_by=f"python -m bench plan --gpu {gpu}",
    )  # fmt: skip


KV_BYTES = {"text": 2 * 48 * 4 * 128 * 2, "frames": 2 * 20 * 2 * 128 * 2}
"""Of one token in each pool, at the released size."""


def replays(table: Table, run: Mapping[str, Any], seeds: int = SEEDS) -> list[list[Heard]]:
    """Several, since it is chance which requests share a step."""
    asked, found = ASKED[run["workload"]], []
    for seed in range(seeds):
        card = Card(table, seed=seed)
        if run["workload"] == "text-100" and run["rate"] is None:
            found.append(replay_closed(card, asked, Loop.of(run["streams"], run["arguments"])))
        else:
            found.append(replay(card, iter(sorted((s["sent"], asked) for s in run["samples"])), math.inf))
    return found


def fitted_runs(gpu: str) -> list[Any]:
    return runs_of(read(RESULTS / f"{gpu}.json"), PARTS)


def other_runs(gpu: str) -> list[Any]:
    """Of the same commit, and not fitted."""
    if gpu != "h200":
        return []
    again = runs_of(read(RESULTS / f"{gpu}_again.json"), ("latency",))
    opened = [r for r in read(RESULTS / "open_before_after.json")["runs"] if r["which"] == "after"]
    return again + [run for r in opened for run in r["found"]]


def runs_of(result: Mapping[str, Any], parts: Sequence[str]) -> list[Any]:
    arguments = result["arguments"]
    return [{**run, "arguments": arguments} for part in parts for run in result["parts"][part]["found"]]


def told(run: Mapping[str, Any]) -> dict[str, float]:
    s = run["summary"]
    return {
        "first_audio_p50": s["first_audio_s"]["p50"],
        "first_audio_p99": s["first_audio_s"]["p99"],
        "rtf_p50": s["rtf"]["p50"],
    }


def seen(heard: Sequence[Heard]) -> dict[str, float]:
    return marked([h.first_audio for h in heard if h.first_audio is not None], [h.rtf for h in heard])


def marked(first: Sequence[float], rtf: Sequence[float]) -> dict[str, float]:
    return dict(zip(MEASURES, (quantile(first, 0.5), quantile(first, 0.99), quantile(rtf, 0.5)), strict=True))


def check(table: Table, run: Mapping[str, Any], fitted: bool, seeds: int = SEEDS) -> Check:
    """The replay of a run beside what was measured."""
    found, there = [seen(heard) for heard in replays(table, run, seeds)], told(run)
    off = {m: [f[m] / there[m] - 1 for f in found] for m in MEASURES}
    return Check(
        label(run), fitted, run["answers"],
        error={m: round(statistics.mean(off[m]), 4) for m in MEASURES},
        spread={m: (round(min(off[m]), 4), round(max(off[m]), 4)) for m in MEASURES}, interval=interval(run),
    )  # fmt: skip


def interval(run: Mapping[str, Any], draws: int = 2000) -> dict[str, tuple[float, float]]:
    """The 90 % sampling interval of what was measured, as shares of it: samples are drawn from the measured ones, those
    that were sent together as one, since they share their steps. (So no p99 is larger than the largest sample: of a
    hundred, there is no saying how much larger it might have been.)"""
    bursts: list[list[tuple[float, float, float]]] = []
    last = -math.inf
    for sent, first, rtf in sorted((s["sent"], s["first_audio"], s["rtf"]) for s in run["samples"]):
        if sent - last > BURST_S:
            bursts.append([])
        bursts[-1].append((sent, first, rtf))
        last = sent
    rng, there = random.Random(0), told(run)
    drawn: dict[str, list[float]] = {m: [] for m in MEASURES}
    for _ in range(draws):
        _, first, rtf = zip(*(s for burst in rng.choices(bursts, k=len(bursts)) for s in burst), strict=True)
        for m, value in marked(first, rtf).items():
            drawn[m].append(value / there[m] - 1)
    return {m: (round(quantile(drawn[m], 0.05), 4), round(quantile(drawn[m], 0.95), 4)) for m in MEASURES}


def means(checks: Sequence[Check]) -> dict[str, float]:
    return {name: round(statistics.mean(abs(c.error[name]) for c in checks), 4) for name in MEASURES}


def worst(checks: Sequence[Check]) -> dict[str, float]:
    return {name: round(max(abs(c.error[name]) for c in checks), 4) for name in MEASURES}


def label(run: Mapping[str, Any]) -> str:
    return f"{run['rate']:g} a second" if run["streams"] is None else f"{run['streams']} streams"


def between(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """How far the runs of one load are from each other: the largest from the smallest."""
    loads: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        loads.setdefault(label(run), []).append(told(run))
    return {
        load: {name: round(max(m[name] for m in all) / min(m[name] for m in all) - 1, 4) for name in MEASURES}
        for load, all in loads.items()
        if len(all) > 1
    }


def marks(first_text: Sequence[float], first_audio: Sequence[float], rtf: Sequence[float]) -> list[float]:
    """What the fit compares: more of the distributions than what is reported, since the p99 of so few samples says
    little."""
    text, audio = ([quantile(values, p) for p in parts] for values, parts in ((first_text, TEXT), (first_audio, AUDIO)))
    return [*text, *audio, quantile(rtf, 0.5)]


def loss(table: Table, runs: Sequence[Mapping[str, Any]], least: float = math.inf) -> float:
    """Of all runs, or so much of it that it is no better than `least`."""
    total = 0.0
    for run in runs:
        there = marks(*([s[what] for s in run["samples"]] for what in ("first_text", "first_audio", "rtf")))
        found = [
            marks([h.first_text or 0.0 for h in heard], [h.first_audio or 0.0 for h in heard], [h.rtf for h in heard])
            for heard in replays(table, run, 2 if run["streams"] == 128 else FIT_SEEDS)
        ]
        off = [statistics.mean(each) / m - 1 for each, m in zip(zip(*found, strict=True), there, strict=True)]
        total += sum(w * abs(e) ** 1.5 for w, e in zip(WEIGHTS, off, strict=True))
        if total >= least:
            break
    return total


def fit(gpu: str, found: Mapping[str, Any], runs: Mapping[str, Any], seconds: float, seed: int) -> dict[str, float]:
    """Change a few numbers at a time, and keep what is better."""
    best, loads = dict(FITTED[gpu]), sorted(fitted_runs(gpu), key=lambda run: run["streams"] == 128)
    least, rng = loss(table_of(gpu, found, best, runs), loads), random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        k = dict(best)
        for name in rng.sample(sorted(k), rng.choice((1, 2, 3))):
            k[name] = float(f"{k[name] * math.exp(rng.gauss(0, 0.07)):.4g}")
            if name in SHARES:
                k[name] = min(k[name], 1.0)
        if (new := loss(table_of(gpu, found, k, runs), loads, least)) < least:
            least, best = new, k
            print(f"{least:.4f}", json.dumps(best), flush=True)
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
    checks = [check(table, run, group is fitted) for group in (fitted, others) for run in group]
    for which, group in (("fitted", [c for c in checks if c.fitted]), ("other", [c for c in checks if not c.fitted])):
        for c in group:
            shares = [f"{m} {shown(c.error[m])} (replays {', '.join(map(shown, c.spread[m]))})" for m in MEASURES]
            print(f"{which:8}{c.load:14}{'  '.join(shares)}")
        if group:
            print(f"{which}: mean {means(group)}, worst {worst(group)}")
    table = msgspec.structs.replace(
        table, error=means(checks), worst=worst(checks), checks=checks, between=between(fitted + others)
    )
    print("\n".join(error_lines(table)))
    if args.out is not None:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return 0


def shown(share: float) -> str:
    return f"{100 * share:+.0f} %"


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop, as the program `serve` has it: listeners in processes, each of which has its own requests."""

    streams: int
    requests: int  # that count
    processes: int
    seconds: float  # no request begins after so long

    @classmethod
    def of(cls, streams: int, arguments: Mapping[str, Any]) -> Loop:
        """From the arguments of `serve`."""
        return cls(streams, max(arguments["requests"], 3 * streams), arguments["processes"], arguments["seconds"])


def replay_closed(card: Card, asked: Asked, loop: Loop) -> list[Heard]:
    """Each client sends its next request when it has its answer, if its process has one left. As many as there are
    clients are left out of the result, the first of each process."""
    many, total = min(loop.processes, loop.streams), loop.streams + loop.requests
    left = [iter(range(len(range(i, total, many)))) for i in range(many)]
    clients = [loop.streams // many + (i < loop.streams % many) for i in range(many)]
    of: dict[int, int] = {}  # which process a request is of
    counted: list[Heard] = []

    def ask(process: int) -> None:
        number = next(left[process], None)
        if number is not None and card.now <= loop.seconds:
            heard = card.arrive(asked)
            of[id(heard)] = process
            if number >= clients[process]:
                counted.append(heard)

    card.ended = lambda heard: ask(of[id(heard)])
    for process, streams in enumerate(clients):
        for _ in range(streams):
            ask(process)
    while card.running:
        card.advance(card.now + 1.0)
    return sorted(counted, key=lambda h: h.arrived)

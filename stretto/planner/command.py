"""`stretto plan`: how many cards a number of conversations needs, and what they cost."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from stretto.errors import Invalid

TOKENS_PER_FRAME = 64 / 125
"""Of text, for each frame of speech, in the measured load: about five words in two seconds."""


def add_plan_parser(jobs: Any) -> None:
    plan = jobs.add_parser(
        "plan",
        help="how many cards a load needs, by replaying it with measured step times",
        description="Replays conversations through the scheduler, with step times that were measured on a card, and "
        "says how many such cards carry them. The times are of one model; the replay's error is printed.",
    )
    plan.add_argument("--sessions", type=int, required=True, metavar="N", help="conversations at a time")
    plan.add_argument("--gpu", default="h200", metavar="NAME", help="kind of card (default: h200)")
    plan.add_argument("--model", metavar="NAME", help="refuse a table of another model than this")
    plan.add_argument(
        "--table", type=Path, metavar="FILE", help="step times of your own, made by `python -m bench plan`"
    )
    plan.add_argument("--first-audio-p99", default="200ms", metavar="TIME", help="as 200ms or 0.5s (default: 200ms)")
    plan.add_argument("--stutters", type=float, default=0.01, metavar="PART", help="of answers (default: 0.01)")
    plan.add_argument("--prompt-tokens", type=int, default=108, metavar="N", help="of each request (default: 108)")
    plan.add_argument("--speech", default="10s", metavar="TIME", help="length of an answer (default: 10s)")
    plan.add_argument("--pause", default="10s", metavar="TIME", help="between an answer and the next request")
    plan.add_argument("--price", type=float, default=3.5, metavar="MONEY", help="of a card for an hour (default: 3.5)")
    plan.add_argument("--json", action="store_true", help="as JSON")
    plan.set_defaults(job=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    from stretto.planner.error import error_lines
    from stretto.planner.heard import Asked
    from stretto.planner.plan import Goal, Load, make_plan
    from stretto.planner.table import find_table, read_table

    table = read_table(args.table or find_table(args.gpu))
    if args.model is not None and not is_of(args.model, table.model):
        raise Invalid(f"the step times are of {table.model}, not of {args.model}", "model")
    frames = round(_between(seconds(args.speech, "speech"), table.frame_s, 86400, "speech") / table.frame_s)
    asked = Asked(_at_least(args.prompt_tokens, "prompt_tokens"), max(1, round(TOKENS_PER_FRAME * frames)), frames)
    load = Load(_at_least(args.sessions, "sessions"), asked, seconds(args.pause, "pause"))
    goal = Goal(seconds(args.first_audio_p99, "first_audio_p99"), _between(args.stutters, 0, 1, "stutters"))
    price = _between(args.price, 0, 1_000_000, "price")
    plan = make_plan(table, load, goal)
    cost = plan.cost(price)
    if args.json:
        told = {**asdict(plan), "cost_per_speech_hour": cost, "error": table.error, "worst": table.worst}
        told |= {"checks": to_builtins(table.checks), "between": table.between}
        sys.stdout.write(json.dumps(told) + "\n")
        return 0
    s = plan.seen
    first, *more = error_lines(table)
    errors = "".join(f"{'':15}{line}\n" for line in more)
    sys.stdout.write(
        f"{plan.cards} x {table.gpu} for {load.sessions} sessions of {table.model}: {s.sessions} on each, which would "
        f"carry {plan.most}{' or more' if plan.or_more else ''}\n"
        f"  first audio  p50 {1e3 * s.first_audio_p50_s:.0f} ms, p99 {1e3 * s.first_audio_p99_s:.0f} ms\n"
        f"  speech       p99 made in {100 * s.rtf_p99:.0f} % of its length; {100 * s.stutters:.1f} % of answers ever "
        "wait\n"
        f"  on a card    {s.streams:.1f} answers at a time\n"
        f"  memory       weights {table.weights_gib:.0f} of {table.memory_gib:.0f} GiB; the KV caches hold "
        f"{min(table.text.tokens, table.frames.tokens):,} tokens each, at most {100 * s.cache:.0f} % of them in use\n"
        f"  cost         {cost:.3g} for an hour of speech, at {args.price:g} an hour for a card\n"
        f"  error        {first}\n{errors}"
    )
    return 0


def is_of(name: str, model: str) -> bool:
    """Whether this name or path is of the model: `org/Model-Instruct` is one of `Model`."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    return last == model.lower() or last.startswith(f"{model.lower()}-")


def seconds(text: str, name: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min)", text.strip())
    if match is None or (value := float(match[1]) * {"ms": 1e-3, "s": 1.0, "min": 60.0}[match[2]]) > 86400:
        raise Invalid(f"{name} must be a time such as 200ms or 1.5s, got {text!r}", name)
    return value


def _at_least(value: int, name: str) -> int:
    if not 1 <= value <= 1_000_000:
        raise Invalid(f"{name} must be from 1 to a million, got {value}", name)
    return value


def _between(value: float, low: float, high: float, name: str) -> float:
    if not low <= value <= high:
        raise Invalid(f"{name} must be from {low:g} to {high:g}, got {value}", name)
    return value

"""What an answer by a grammar costs: its own steps, and those of answers beside it, at 1, 8 and 32
rows.

    python -m bench engine --parts guided  # the tiny model, on any machine
    python -m bench engine --parts guided --model released --out bench/results/guided_h200.json

In each round N text answers of a fixed length run together, twice: once all of them free, once with
one of them guided by a schema that never ends it. Both take turns, so that other load on the
machine hits both. Shown are medians over the rounds of the time per token: of the free answers in
both kinds of round, and of the guided one."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.engine.load import add_engine_arguments, engine_config
from bench.harness.checkpoint import checkpoint
from bench.harness.env import describe
from bench.harness.results import arguments, parser, write
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import TextDelta
from stretto.params import Params

ENDLESS = (
    'start: %json {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": '
    "100000}\n"
)
ASK = [{"role": "user", "content": "Hello, what is the weather like in the city?"}]


async def answer(engine: PipelineEngine, params: Params) -> float:
    """Seconds per token, from the first to the last."""
    first = last = 0.0
    tokens = 0
    async for event in engine.generate(ASK, modalities=["text"], params=params):
        if isinstance(event, TextDelta) and event.ids:
            last = time.perf_counter()
            if not tokens:
                first, skipped = last, len(event.ids)
            tokens += len(event.ids)
    return (last - first) / (tokens - skipped)


async def measure(engine: PipelineEngine, rows: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Medians of the rounds' medians, and every answer's own value, round by round."""
    free = Params(max_text_tokens=tokens, ignore_eos=True)
    guided = replace(free, ignore_eos=False, grammar=ENDLESS)
    plain: list[list[float]] = []
    beside: list[list[float]] = []
    own: list[list[float]] = []
    for turn in range(rounds + 1):  # the first is for warmth
        alone = await asyncio.gather(*(answer(engine, free) for _ in range(rows)))
        first, *others = await asyncio.gather(
            answer(engine, guided), *(answer(engine, free) for _ in range(rows - 1))
        )
        if turn:
            plain.append(alone)
            own.append([first])
            beside += [others] if others else []
    samples = {"free_s": plain, "guided_s": own} | ({"beside_s": beside} if beside else {})
    found = {
        name: statistics.median(map(statistics.median, values)) for name, values in samples.items()
    }
    return found | {"samples": samples}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with checkpoint(args.model) as directory:
        async with PipelineEngine.open(directory, engine_config(args)) as engine:
            for rows in args.rows:
                found[str(rows)] = one = await measure(engine, rows, args.rounds, args.tokens)
                shown = [
                    f"{name[:-2]} {1000 * value:.3f} ms"
                    for name, value in one.items()
                    if name != "samples"
                ]
                print(f"{rows} rows: {', '.join(shown)}", flush=True)
    return {"env": describe(), "arguments": arguments(args), "rows": found}


def main(given: Sequence[str]) -> int:
    p = parser("engine --parts guided", __doc__)
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    p.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of each kind (default: %(default)s)"
    )
    p.add_argument(
        "--tokens", type=int, default=120, metavar="N", help="of each answer (default: %(default)s)"
    )
    add_engine_arguments(p)
    args = p.parse_args(given)
    write(args.out, asyncio.run(run(args)))
    return 0

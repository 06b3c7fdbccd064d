"""Damaged and nonsensical input for everything that crosses a process: chunks, inboxes, control
messages.

    python -m tests.slow fuzz --parts wire --inputs 1000000 --out bench/results/fuzz_wire.json

**Chunks**, 40 % of the inputs, go to the wire decoder (chunks.py). **Inboxes**, 20 %, get chunks in
no order (inboxes.py). **Control messages**, 40 %, go to a whole host and to an engine (control.py).
One process, one seed, one count per outcome. The run stops at the first broken rule and prints the
input in hexadecimal. It also stops after ten minutes without progress, and it fails if its memory
grows (in a part of at least 20,000 inputs: before that, caches fill)."""

from __future__ import annotations

import faulthandler
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from bench.harness.env import describe
from bench.harness.results import judged, parser
from tests.slow.fuzz.chunks import fuzz as fuzz_chunks
from tests.slow.fuzz.control import fuzz_control
from tests.slow.fuzz.inboxes import fuzz_inboxes
from tests.slow.harness.leaks import Memory, trend

PARTS = {"chunks": 0.4, "inboxes": 0.2, "control messages": 0.4}
PATIENCE_S = 600
MOST_BYTES = 4 << 30  # of memory: what asks for more fails, and does not take the machine with it
SAMPLES = 200
FLAT = 0.02  # KiB per input
LEAST = 20_000  # inputs of a part, before growth says anything: caches fill until then
UNREAD = ("corrupt", "version", "frame")


def run(inputs: int, seed: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "env": describe(),
        "inputs": inputs,
        "seed": seed,
        "parts": {},
        "problems": [],
        "raw": {},
    }
    fuzz_chunks(1000, seed)  # warm up
    for part, share in PARTS.items():
        told, samples, problems = run_part(part, round(inputs * share), seed)
        result["parts"][part], result["raw"][part] = told, samples
        result["problems"] += problems
    return result


def run_part(part: str, inputs: int, seed: int) -> tuple[dict[str, Any], list[Any], list[str]]:
    done, every = 0, max(1, inputs // SAMPLES)
    memory = Memory.of([part], 2 + inputs // every)
    start, longest = time.perf_counter(), 0.0
    with tqdm(total=inputs, desc=part, mininterval=1.0) as bar:

        def step() -> None:
            nonlocal done
            done += 1
            if done % every == 0:
                bar.update(every)
                memory.sample(done, [None])
                faulthandler.dump_traceback_later(PATIENCE_S, exit=True)

        match part:
            case "chunks":
                outcomes, longest = fuzz_chunks(inputs, seed, step)
            case "inboxes":
                outcomes = fuzz_inboxes(inputs, seed, step)
            case _:
                outcomes = fuzz_control(inputs, seed, step)
    faulthandler.cancel_dump_traceback_later()
    grown = trend(memory.taken[:, 0], memory.taken[:, 1])
    told = {
        "inputs": inputs,
        "seconds": round(time.perf_counter() - start, 1),
        "longest_cpu_ms": round(longest * 1e3, 2) if longest else None,
        "read": sum(
            n
            for what, n in outcomes.items()
            if not what.startswith(UNREAD) and "refused" not in what
        ),
        "memory_mib": asdict(grown) | {"flat": grown.flat(FLAT)},
        "outcomes": dict(outcomes.most_common()),
    }
    flat = grown.flat(FLAT) or inputs < LEAST
    problems = [] if flat else [f"memory grows with {part}: {grown}"]
    problems += [] if done == inputs else [f"{done} of {inputs} {part}"]
    return told, memory.taken.tolist(), problems


def main(given: Sequence[str]) -> int:
    p = parser("fuzz --parts wire", __doc__, package="tests.slow")
    p.add_argument("--inputs", type=int, default=1_000_000)
    p.add_argument("--seed", type=int, default=20260101)
    args = p.parse_args(given)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    return judged(args.out, run(args.inputs, args.seed))

"""Step times for `stretto plan`, from what was measured on a card, and how far its replay is from the measured runs.

    python -m bench plan --gpu h200 --out bench/results/plan_h200.json     # the table
    python -m bench plan --gpu h200 --collect RAW                          # the inputs first, of a traced run's result
    python -m bench plan --gpu h200 --fit 300 --out ...                    # fit what is not measured anew

Reads bench/results/plan_inputs_GPU.json: what the trace of a served load says of its steps, of the host's thread and
of the way to host and listener (trace.py), what the vocoder's calls and passes over prompts take by themselves. Of
the served runs themselves, in plan_traced_GPU.json, it takes what the server needs for a piece of text and for the
end of an answer. FITTED are three numbers, the same for all loads, to when requests of the traced runs reached the
host: what the server's thread needs for a request before and behind the rest of its way, and how long that is. The
replay is then checked against runs of two other servers, of which nothing was fitted: GPU.json and GPU_again.json.
Closed loops are replayed as loops, with the clients in processes as the program `serve` has them; the others with the
moments at which their requests were sent. Beside each error stands the 90 % sampling interval of what was measured,
and how far runs of a load differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.harness.results import RESULTS, parser, read
from bench.plan.checks import between, by_load, check, means, worst
from bench.plan.fit import FITTED, fit
from bench.plan.inputs import collect, table_of
from bench.plan.runs import fitted_runs, other_runs, replays
from stretto.planner.error import error_lines
from stretto.planner.table import Table


def main(given: Sequence[str]) -> int:
    p = parser("plan", __doc__)
    p.add_argument("--gpu", default="h200")
    p.add_argument("--collect", type=Path, metavar="RAW", help="make the inputs of the raw result of `serve --trace`")
    p.add_argument("--fit", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(given)
    if args.collect is not None:
        collect(args.gpu, args.collect)
    inputs, runs = read(RESULTS / f"plan_inputs_{args.gpu}.json"), read(RESULTS / f"plan_traced_{args.gpu}.json")
    k = fit(args.gpu, inputs, runs, args.fit, args.seed) if args.fit else FITTED[args.gpu]
    table = checked(table_of(args.gpu, inputs, k, runs))
    print("\n".join(error_lines(table)))
    if args.out is not None:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return 0


def checked(table: Table) -> Table:
    """With how far it is from each run, and from all of a load's that were not fitted together."""
    fitted, others = fitted_runs(table.gpu), other_runs(table.gpu)
    runs = [*fitted, *others]
    replayed = [replays(table, run) for run in runs]
    checks = [check([run], [heard], i < len(fitted)) for i, (run, heard) in enumerate(zip(runs, replayed, strict=True))]
    heard_of = {id(run): heard for run, heard in zip(runs, replayed, strict=True)}
    loads = [all for all in by_load(others).values() if len(all) > 1]
    return msgspec.structs.replace(
        table, error=means(checks), worst=worst(checks), checks=checks, between=between(runs),
        pooled=[check(all, [heard_of[id(run)] for run in all], False) for all in loads],
    )  # fmt: skip

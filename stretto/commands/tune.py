"""`stretto tune`: measures launch parameters of the decode kernels on this machine's card, and
keeps those that are faster where every later `stretto serve` finds them
(`kernels/triton/tuning.py`). The search is `models/tune_search.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto._imports import load
from stretto.config.engine import MAX_GRAPH_ROWS
from stretto.errors import Invalid, StrettoError
from stretto.hub import MODEL_HELP, find_model


def add_tune_parser(jobs: Any) -> None:
    tune = jobs.add_parser(
        "tune",
        help="measure the kernels' launch parameters on this card, and keep the best",
        usage="stretto tune MODEL [FLAGS]",
        description="Time decode steps of random weights in the model's sizes and formats, with "
        "other launch parameters for one kernel after the other. What is faster is kept in the "
        "cache folder, for this card, Triton and driver; stretto serve loads it. Nothing else "
        "should run on the card meanwhile.",
    )
    tune.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    tune.add_argument("--stages", nargs="+", metavar="STAGE", help="default: all with kernels")
    tune.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32, MAX_GRAPH_ROWS], metavar="N",
        help="of a step (default: %(default)s)",
    )  # fmt: skip
    tune.add_argument("--context", type=int, default=1024, metavar="TOKENS")
    tune.add_argument(
        "--layers", type=int, default=6, metavar="N",
        help="of the model, as many as fit beside nothing else; few read from the card's cache "
             "what a whole model does not (default: %(default)s)",
    )  # fmt: skip
    tune.add_argument(
        "--limit", type=float, default=900.0, metavar="S",
        help="seconds in all, shared by steps (default: %(default)s)",
    )  # fmt: skip
    tune.add_argument(
        "--kernels", nargs="+", default=[""], metavar="NAME", help="whose names begin so alone"
    )
    tune.add_argument("--device", default="cuda")
    tune.add_argument("--out", type=Path, metavar="FILE", help="instead of the cache folder's")
    tune.set_defaults(job=run_tune)


def run_tune(args: argparse.Namespace) -> int:
    check(args)
    import torch

    if not args.device.startswith("cuda") or not torch.cuda.is_available():
        raise StrettoError(
            "there is no CUDA device here; launch parameters are measured on the card that serves"
        )
    torch.cuda.set_device(torch.device(args.device))
    search_for(args, find_model(args.model, print), None, print).run()
    return 0


def check(args: argparse.Namespace) -> None:
    if not all(1 <= n <= MAX_GRAPH_ROWS for n in args.rows):
        raise Invalid(f"--rows must be from 1 to {MAX_GRAPH_ROWS}, got {args.rows}", "rows")
    for name in ("context", "layers", "limit"):
        if not getattr(args, name) >= 1:
            raise Invalid(f"--{name} must be 1 or more, got {getattr(args, name)}", name)


def search_for(
    args: argparse.Namespace, model: Path, timer: Any, say: Callable[[str], None]
) -> Any:
    """The search that the flags select; `timer` replaces the device's own."""
    from stretto.registry import open_model

    ahead = load(open_model(model).pipeline.build).compile_ahead
    if ahead is None:
        raise Invalid(f"{model}: its family has no kernels to tune", "model")
    stages = args.stages or list(ahead.stages)
    if unknown := set(stages) - set(ahead.stages):
        raise Invalid(
            f"--stages: {', '.join(sorted(unknown))} have no such kernels; there are "
            f"{', '.join(ahead.stages)}",
            "stages",
        )
    steps = [(stage, rows) for stage in stages for rows in sorted(set(args.rows))]
    return load("stretto.models.tune_search:TuneSearch")(
        ahead, str(model), steps, args.context, args.layers, args.limit, args.device,
        tuple(args.kernels), args.out, timer, say,
    )  # fmt: skip

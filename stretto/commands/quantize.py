"""`stretto quantize`: write a checkpoint with weights of few bits, which smaller cards can serve.
`cli.py` wires it in."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.hub import find_model
from stretto.registry import PACKABLE_TOO, Quantising, card_rooms, open_model, quantise

SCHEMES = ("int4", "fp8-block", "fp8-row")
GIB = 1 << 30


def add_quantize_parser(jobs: Any) -> None:
    quantize = jobs.add_parser(
        "quantize",
        help="write a checkpoint with weights of 4 or 8 bits",
        usage="stretto quantize MODEL OUT [FLAGS]",
        description="Round a checkpoint's weights to 4 or 8 bits, for smaller cards and faster "
        "steps: attention and routed experts, in the layout of compressed-tensors. All else is "
        "copied. A run that was stopped goes on with the same command.",
    )
    quantize.add_argument(
        "model", metavar="MODEL", help="checkpoint directory, or a name on the Hugging Face hub"
    )
    quantize.add_argument("out", metavar="OUT", type=Path, help="a new or an empty directory")
    what = quantize.add_argument_group("to what")
    what.add_argument(
        "--format", choices=SCHEMES, default="int4",
        help="4-bit integers with a scale for each group of inputs; float8 with a scale for each "
             "block of 128 x 128, or for each row (default: %(default)s)",
    )  # fmt: skip
    for part, says in PACKABLE_TOO.items():
        what.add_argument(
            f"--{part}", dest="parts", action="append_const", const=part, default=[], help=says
        )
    what.add_argument(
        "--group-size", type=int, default=32, metavar="N",
        help="inputs that share a scale, of int4 (default: %(default)s)",
    )  # fmt: skip
    zeros = what.add_mutually_exclusive_group()
    zeros.add_argument(
        "--symmetric", action="store_true", help="int4 without zero points (default)"
    )
    zeros.add_argument(
        "--asymmetric", dest="symmetric", action="store_false", help="int4 with zero points"
    )
    how = quantize.add_argument_group("how")
    how.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda if there is one)")
    how.add_argument("--quiet", action="store_true", help="no progress bar")
    quantize.set_defaults(job=run_quantize, symmetric=True)


def run_quantize(args: argparse.Namespace) -> int:
    source = find_model(args.model, say)
    job = quantise(
        source,
        args.out,
        args.parts,
        args.format,
        group=args.group_size,
        symmetric=args.symmetric,
        device=args.device,
    )
    try:
        show(job, args.quiet)
    except KeyboardInterrupt:
        say("stretto: stopped; the same command goes on")
        return 130
    info = open_model(args.out).info
    print_line(f"wrote {args.out}: {info.weights}")
    print_line(f"weights      {job.written / GIB:.2f} GiB, of {job.total / GIB:.2f} GiB")
    try:
        for card, room in card_rooms(args.out).items():
            print_line(f"{card:<12} {room}")
    except StrettoError as e:
        say(f"stretto: {e}")
    return 0


def show(job: Quantising, quiet: bool) -> None:
    """Run it, under a bar."""
    from tqdm import tqdm

    with tqdm(
        total=job.total, desc="weights", unit="B", unit_scale=True, disable=quiet or None
    ) as bar:
        job.run(bar.update)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")

"""Kernels and parts of models by themselves, on a GPU: launch parameters, prompts, pictures, the vocoder.

python -m bench kernels PART [arguments]     (PART --help explains one)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from bench.harness.results import first_line, parser

PARTS = ("alone", "in_step", "prompts", "pictures", "vocoder", "rounding")


def main(given: Sequence[str]) -> int:
    lines = [f"  {part:10}{first_line(Path(__file__).with_name(f'{part}.py'))}" for part in PARTS]
    p = parser("kernels", "\n".join([__doc__ or "", *lines]), out=False)
    p.add_argument("part", choices=PARTS, metavar="PART")
    args = p.parse_args(given[:1])
    status: int = importlib.import_module(f"bench.kernels.{args.part}").main(given[1:])
    return status

"""What one listener of N feels: first text, first audio, gaps between packets, RTF, underruns, end to end.

Closed loop: each of N listeners asks again as soon as the answer is there. Runs the whole pipeline in its processes,
without HTTP (`stretto bench` measures a server).

python bench/latency.py [--model DIR|tiny|released] [--workload text-100 audio-2s] [-c 1 4 16] [--out FILE.json]"""

from __future__ import annotations

import argparse
import sys

from bench.pipeline import add_engine_arguments, main_levels
from bench.workload import read
from stretto.client.bench import Closed, Limits, Load


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workload", nargs="+", default=["text-100"], help="names in bench/workloads, or files")
    p.add_argument("-c", "--concurrency", type=int, nargs="+", default=[1, 4], metavar="N")
    p.add_argument("-n", "--requests", type=int, metavar="N", help="per level (default: 4 per listener, at least 16)")
    p.add_argument("--warmup", type=int, metavar="N", help="before each level (default: one per listener)")
    add_engine_arguments(p)
    args = p.parse_args()
    levels: list[tuple[Load, Limits]] = []
    for n in args.concurrency:
        warmup = n if args.warmup is None else args.warmup
        levels.append((Closed(n), Limits(requests=args.requests or max(16, 4 * n), warmup=warmup)))
    return main_levels(args, [read(name) for name in args.workload], levels)


if __name__ == "__main__":
    sys.exit(main())

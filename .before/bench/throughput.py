"""What a service can carry: requests that come by chance (Poisson, seeded), R a second, whether or not it keeps up.

The same numbers as bench/latency.py, and how many requests were refused, and seconds of speech made per second.

python bench/throughput.py [--model DIR|tiny|released] [--workload text-100] [-r 1 4 16] [-d 30] [--out FILE.json]"""

from __future__ import annotations

import argparse
import sys

from bench.pipeline import add_engine_arguments, main_levels
from bench.workload import read
from stretto.client.bench import Limits, Load, Open


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workload", nargs="+", default=["text-100"], help="names in bench/workloads, or files")
    p.add_argument("-r", "--rate", type=float, nargs="+", default=[1.0, 4.0], metavar="R", help="requests a second")
    p.add_argument("-n", "--requests", type=int, metavar="N", help="per level (default: what comes in --duration)")
    p.add_argument("-d", "--duration", type=float, default=20.0, metavar="S", help="of arrivals (default: 20)")
    p.add_argument("--warmup", type=int, default=4, metavar="N", help="before each level")
    add_engine_arguments(p)
    args = p.parse_args()
    levels: list[tuple[Load, Limits]] = []
    for rate in args.rate:
        requests = args.requests or max(1, round(rate * args.duration))
        levels.append((Open(rate, args.seed), Limits(requests=requests, warmup=args.warmup)))
    return main_levels(args, [read(name) for name in args.workload], levels)


if __name__ == "__main__":
    sys.exit(main())

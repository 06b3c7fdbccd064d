"""The subcommands `bench` and `talk`, called as the command line calls them."""

from __future__ import annotations

import argparse

from stretto.commands.bench import add_bench_parser
from stretto.commands.talk import add_talk_parser


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    jobs = parser.add_subparsers(required=True)
    add_bench_parser(jobs)
    add_talk_parser(jobs)
    return parser.parse_args(argv)


def run(*argv: str) -> int:
    args = parse(*argv)
    code: int = args.job(args)
    return code

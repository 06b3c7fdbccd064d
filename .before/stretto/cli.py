"""The command line: one subcommand per job. Heavy imports happen inside the job that needs them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stretto import __version__
from stretto.client.command import add_bench_parser, add_talk_parser
from stretto.errors import Invalid, StrettoError
from stretto.generate import add_generate_parser
from stretto.server.command import add_env_parser, add_serve_parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        code: int = args.job(args)
        return code
    except StrettoError as e:
        print(f"stretto: {e}", file=sys.stderr)
        return 2 if isinstance(e, Invalid) else 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="stretto", description="A serving engine for omni-modal models.")
    top.add_argument("--version", action="version", version=f"stretto {__version__}")
    jobs = top.add_subparsers(required=True, metavar="JOB")
    add_serve_parser(jobs)
    add_generate_parser(jobs)
    add_talk_parser(jobs)
    add_bench_parser(jobs)
    tiny = jobs.add_parser("tiny", help="write a small random checkpoint in the released format")
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(job=run_tiny)
    add_env_parser(jobs)
    return top


def run_tiny(args: argparse.Namespace) -> int:
    from stretto.models.qwen3_omni.tiny import write_tiny

    write_tiny(args.directory, args.seed)
    print(f"wrote a tiny checkpoint to {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

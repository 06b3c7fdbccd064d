"""The command line: one subcommand per job. Heavy imports happen inside the job that needs them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from stretto import __version__
from stretto.commands.bench import add_bench_parser
from stretto.commands.completion import add_completion_parser
from stretto.commands.generate import add_generate_parser
from stretto.commands.parsers import check_command, commands, unrecognized
from stretto.commands.quantize import add_quantize_parser
from stretto.commands.serve import add_env_parser, add_serve_parser
from stretto.commands.speak import add_speak_parser
from stretto.commands.talk import add_talk_parser
from stretto.commands.tune import add_tune_parser
from stretto.errors import Invalid, StrettoError
from stretto.ray.serve import run_on_ray


def main(argv: list[str] | None = None) -> int:
    top = parser()
    words = sys.argv[1:] if argv is None else argv
    check_command(top, words)
    args, unknown = top.parse_known_args(words)
    if unknown:
        args.parser.error(unrecognized(unknown, args.parser, commands(top)))
    try:
        code: int = args.job(args)
        return code
    except StrettoError as e:
        print(f"stretto: {e}", file=sys.stderr)
        return 2 if isinstance(e, Invalid) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read what it wanted
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python's last flush would complain
        return 128 + signal.SIGPIPE


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="stretto",
        usage="stretto COMMAND [FLAGS]   (stretto COMMAND --help shows them)",
        description="A serving engine for omni-modal models: `stretto serve` serves the embedded "
        "one.",
    )
    top.add_argument("--version", action="version", version=f"stretto {__version__}")
    jobs = top.add_subparsers(required=True, metavar="COMMAND", title="commands", prog="stretto")
    add_serve_parser(jobs, {"ray": run_on_ray})
    add_generate_parser(jobs)
    add_speak_parser(jobs)
    add_talk_parser(jobs)
    add_bench_parser(jobs)
    add_tune_parser(jobs)
    tiny = jobs.add_parser(
        "tiny",
        help="write a small random checkpoint in the released format",
        usage="stretto tiny DIRECTORY [FLAGS]",
    )
    tiny.add_argument("directory", metavar="DIRECTORY", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--family", metavar="NAME", help="of which model (a wrong name lists them)")
    tiny.set_defaults(job=run_tiny)
    add_quantize_parser(jobs)
    add_env_parser(jobs)
    add_completion_parser(jobs, parser)
    for job in jobs.choices.values():
        job.set_defaults(parser=job)
    return top


def run_tiny(args: argparse.Namespace) -> int:
    from stretto.registry import write_tiny

    try:
        if args.directory.exists() and (
            not args.directory.is_dir() or any(args.directory.iterdir())
        ):
            raise Invalid(
                f"{args.directory} is there already: name a new or an empty directory", "directory"
            )
        write_tiny(args.directory, args.seed, args.family)
    except OSError as e:
        raise Invalid(
            f"{args.directory}: cannot be written ({e.strerror or e})", "directory"
        ) from None
    print(f"wrote a tiny checkpoint to {args.directory}")
    return 0

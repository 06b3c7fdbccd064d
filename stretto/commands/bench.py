"""`stretto bench URL`: its flags, and the parts of `loadtest` that they select. `cli.py` calls
it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import Invalid
from stretto.loadtest.dialect import DIALECTS, Lengths, length_fields

if TYPE_CHECKING:  # `stretto --help` should not wait for an HTTP client to be imported
    import httpx

    from stretto.loadtest.find import Bounds, Limit, Probe, Search
    from stretto.loadtest.hops import Series
    from stretto.loadtest.http import ListedModel
    from stretto.loadtest.runner import Bench, Level, Load, Sample, Targets
    from stretto.loadtest.sse import Piece
    from stretto.loadtest.workload import Workload


def add_bench_parser(jobs: Any) -> None:
    bench = jobs.add_parser(
        "bench",
        help="measure any OpenAI-compatible server that speaks",
        usage="stretto bench URL [FLAGS]",
        description="Measure a server as its listeners feel it: first text, first audio, gaps, "
        "RTF, underruns.",
    )
    bench.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    bench.add_argument("--model", help="default: the first the server lists")
    bench.add_argument("--api-key", "--key", help="API key", metavar="KEY")
    ask = bench.add_argument_group("what is asked")
    what = ask.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="the same text each time")
    what.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a prompt a line; .jsonl: strings or messages"
    )
    what.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="random words, about N tokens, never the same twice",
    )
    ask.add_argument(
        "--audio", type=Path, metavar="FILE", help="a sound file that goes with each prompt"
    )
    ask.add_argument("--system", help="system prompt")
    ask.add_argument("--voice")
    ask.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="of text (default: %(default)s)"
    )
    ask.add_argument("--temperature", type=float)
    ask.add_argument("--text-only", action="store_true", help="do not ask for speech")
    ask.add_argument(
        "--audio-format", metavar="FORMAT", help="default: pcm16; some servers want wav"
    )
    ask.add_argument("--extra", metavar="JSON", help="an object whose fields go into each request")
    ask.add_argument(
        "--dialect", choices=DIALECTS, default="openai",
        help="fields of the request that are not OpenAI's (default: %(default)s); sound is "
             "understood in each",
    )  # fmt: skip
    ask.add_argument(
        "--stretto-extras",
        dest="dialect",
        action="store_const",
        const="stretto",
        help="short for --dialect stretto",
    )
    fixed = bench.add_argument_group(
        "fixed lengths, whatever the weights (--dialect stretto or vllm-omni)"
    )
    fixed.add_argument("--exact-tokens", action="store_true", help="write exactly --max-tokens")
    fixed.add_argument(
        "--frames",
        type=int,
        metavar="N",
        help="speak exactly N frames of 80 ms (vLLM-Omni: one less comes)",
    )
    load = bench.add_argument_group("at what load")
    load.add_argument(
        "-c",
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="listeners who ask again at once",
    )
    load.add_argument(
        "-r",
        "--rate",
        type=float,
        nargs="+",
        metavar="R",
        help="requests a second, coming by chance",
    )
    load.add_argument(
        "-n",
        "--requests",
        type=int,
        metavar="N",
        help="per level (default: 4 per listener, at least 16)",
    )
    load.add_argument(
        "-d",
        "--duration",
        type=float,
        metavar="S",
        help="per level: begin no request after S seconds",
    )
    load.add_argument(
        "--warmup", type=int, metavar="N",
        help="requests before each level (default: one per listener; --find with a rate: a fifth "
             "of those that count)",
    )  # fmt: skip
    load.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="of silence (default: %(default)s)",
    )
    load.add_argument("--seed", type=int, default=0, help="of the arrivals")
    add_find_arguments(bench)
    out = bench.add_argument_group("what is made of it")
    out.add_argument(
        "--prebuffer", type=float, nargs="+", default=[0.0, 0.2], metavar="S",
        help="seconds in hand before a simulated player starts (default: 0 0.2)",
    )  # fmt: skip
    out.add_argument(
        "--good-first", type=float, default=1.0, metavar="S",
        help="an answer is good if its first sound (or text) comes within S seconds (default: "
             "%(default)s) ...",
    )  # fmt: skip
    out.add_argument(
        "--good-wait", type=float, default=0.1, metavar="S",
        help="... and a player that starts with it waits no longer than this in all (default: "
             "%(default)s)",
    )  # fmt: skip
    out.add_argument("--json", type=Path, metavar="FILE", help="everything, every sample included")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    bench.set_defaults(job=run_bench)


def add_find_arguments(bench: argparse.ArgumentParser) -> None:
    find = bench.add_argument_group("how much the server carries")
    find.add_argument(
        "--find", action="store_true", help="search for the most listeners without an underrun, "
                                            "and for the highest "
        "rate with first audio in time; with -c N or -r R only for that one, from N or R on",
    )  # fmt: skip
    find.add_argument(
        "--underrun-ms", type=float, default=0.0, metavar="MS",
        help="a player that starts with the first packet may wait this long in all (default: 0)",
    )  # fmt: skip
    find.add_argument(
        "--first-audio-ms", type=float, default=300.0, metavar="MS",
        help="first audio (text, if answers are not spoken) comes within this time (default: 300) "
             "...",
    )  # fmt: skip
    find.add_argument(
        "--percentile",
        type=float,
        default=99.0,
        metavar="P",
        help="... for P percent of answers (default: 99)",
    )


def run_bench(args: argparse.Namespace) -> int:
    from stretto.loadtest.hops import hop_line, to_json
    from stretto.loadtest.report import overview, record, table
    from stretto.loadtest.runner import Goal

    goal = Goal(args.good_first, args.good_wait)
    check(
        goal.first > 0 and goal.wait >= 0, "--good-first must be above 0, --good-wait not negative"
    )
    workload, loads = read_workload(args), read_loads(args)
    if args.find:
        return run_find(args, workload)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    levels, server = asyncio.run(
        bench(args, workload, loads, lambda level: say(table(level, args.prebuffer, goal)))
    )
    if len(levels) > 1:
        say("all levels, p50 where nothing else is said:\n" + overview(levels, goal))
    if links := server.pop("hops", None):
        say("between the server's processes:\n" + "\n".join(hop_line(hop) for hop in links))
        server["links"] = [to_json(hop) for hop in links]
    if args.json:
        write_json(args, record(levels, args.prebuffer, arguments(args), server, started, goal))
    if any(level.interrupted for level in levels):
        return 130
    return 0 if all(level.good for level in levels) else 1


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    left_out = ("job", "parser", "api_key")
    return {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in left_out
    }


def write_json(args: argparse.Namespace, record: dict[str, Any]) -> None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    say(f"wrote {args.json}")


async def bench(
    args: argparse.Namespace,
    workload: Workload,
    loads: list[Load],
    on_level: Callable[[Level], None],
) -> tuple[list[Level], dict[str, Any]]:
    """All levels, one after another; stops after one that was interrupted. What the server says of
    itself has its hops between processes, if it has any."""
    levels: list[Level] = []
    async with connected(args, workload) as (runner, server):
        progress = Progress(args.quiet)
        for load in loads:
            limits = read_limits(args, load)
            progress.begin(load, limits.requests)
            level = await runner.run(load, limits, progress.tick)
            progress.end()
            levels.append(level)
            on_level(level)
            if level.interrupted:
                break
    return levels, server


@asynccontextmanager
async def connected(
    args: argparse.Namespace, workload: Workload
) -> AsyncIterator[tuple[Bench, dict[str, Any]]]:
    """A `Bench` that sends the workload to the server, and what the server reports about itself: at
    the end also `hops`, what it sent between its processes meanwhile."""
    import httpx

    from stretto.loadtest.hops import hops
    from stretto.loadtest.http import answers, api_root, headers, timeouts
    from stretto.loadtest.runner import Bench, SystemClock

    clock = SystemClock()
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=api_root(args.url),
        headers=headers(args.api_key),
        timeout=timeouts(args.timeout),
        limits=pool,
    ) as client:
        model, server = await read_server(client, args.model)

        def send(index: int) -> AsyncIterator[tuple[float, Piece]]:
            return answers(client, workload.body(index, model.name), clock.now)

        before = await link_numbers(client)
        yield Bench(send, clock, want_audio=workload.speak), server
        server["hops"] = list(hops(before, await link_numbers(client)))


@dataclass(slots=True)
class Progress:
    """A bar for the level that runs."""

    quiet: bool
    bar: Any = None

    def begin(self, load: Load, requests: int | None) -> None:
        from tqdm import tqdm

        self.bar = tqdm(
            total=requests, desc=str(load), unit="req", leave=False, disable=self.quiet or None
        )

    def tick(self, sample: Sample) -> None:
        self.bar.update()

    def end(self) -> None:
        self.bar.close()


async def read_server(
    client: httpx.AsyncClient, model_name: str | None
) -> tuple[ListedModel, dict[str, Any]]:
    """The model to ask for, and what the server says of itself; ours also tells its version."""
    from stretto.loadtest.http import ListedModel, failures, read_models

    with failures():
        listed = await client.get("models")
        version = await client.get(outside_v1(client, "/version"))
    model = (
        ListedModel(model_name) if model_name else read_models(listed.status_code, listed.content)
    )
    server: dict[str, Any] = {"url": str(client.base_url), "model": model.name}
    if version.is_success:
        server["version"] = version.text[:200]
    return model, server


def outside_v1(client: httpx.AsyncClient, path: str) -> httpx.URL:
    """The address of something that is not below /v1."""
    root = client.base_url
    return root.copy_with(path=root.path.rstrip("/").removesuffix("/v1") + path)


async def link_numbers(client: httpx.AsyncClient) -> Series:
    """Counters of the server's links; empty if it has no /metrics, or not for this client."""
    import httpx

    from stretto.loadtest.hops import read_series

    try:
        page = await client.get(outside_v1(client, "/metrics"))
    except httpx.TransportError:
        return {}
    return read_series(page.text) if page.is_success else {}


def read_workload(args: argparse.Namespace) -> Workload:
    from stretto.loadtest.workload import Workload, read_prompts, read_sound

    check(args.max_tokens >= 1, "--max-tokens must be at least 1")
    check(
        args.prompt_tokens is None or args.prompt_tokens >= 1, "--prompt-tokens must be at least 1"
    )
    check(all(lead >= 0 for lead in args.prebuffer), "--prebuffer must not be negative")
    prompts = (
        read_prompts(args.prompts) if args.prompts else (args.prompt,) if args.prompt else None
    )
    if prompts is None:
        prompts = ("",) if args.audio else Workload().prompts
    sound, kind = read_sound(args.audio) if args.audio else (None, "wav")
    return Workload(
        prompts=prompts, prompt_tokens=args.prompt_tokens, sound=sound, sound_format=kind,
        system=args.system,
        speak=not args.text_only, audio_format=args.audio_format, voice=args.voice,
        max_tokens=args.max_tokens,
        temperature=args.temperature, dialect=args.dialect, extra=read_extra(args),
    )  # fmt: skip


def read_extra(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra) if args.extra else {}
    except ValueError as e:
        raise Invalid(f"--extra is not JSON: {e}", "extra") from None
    check(isinstance(extra, dict), "--extra must be a JSON object")
    check(args.frames is None or args.frames >= 1, "--frames must be at least 1")
    check(
        args.frames is None or not args.text_only,
        "--frames is of speech: it goes without --text-only",
    )
    lengths = Lengths(args.max_tokens, args.exact_tokens, args.frames)
    return {**length_fields(args.dialect, lengths, args.temperature), **extra}


def read_loads(args: argparse.Namespace) -> list[Load]:
    from stretto.loadtest.runner import Closed, Open

    streams, rates = args.concurrency or [], args.rate or []
    check(all(n >= 1 for n in streams), "--concurrency must be at least 1")
    check(all(r > 0 for r in rates), "--rate must be above 0")
    check(args.requests is None or args.requests >= 1, "--requests must be at least 1")
    check(args.duration is None or args.duration > 0, "--duration must be above 0")
    loads: list[Load] = [*(Closed(n) for n in streams), *(Open(r, args.seed) for r in rates)]
    return loads or [Closed(1)]


def read_limits(args: argparse.Namespace, load: Load) -> Targets:
    from stretto.loadtest.runner import Closed, Targets

    requests, warmup = args.requests, args.warmup
    if requests is None and args.duration is None:
        requests = max(16, 4 * load.streams) if isinstance(load, Closed) else 32
    if warmup is None:
        warmup = load.streams if isinstance(load, Closed) else 2
    return Targets(requests, args.duration, warmup)


# --- --find


def run_find(args: argparse.Namespace, workload: Workload) -> int:
    from stretto.loadtest.find import conclusion, to_json
    from stretto.loadtest.report import record

    plans = read_find(args)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    results, server = asyncio.run(find_limits(args, workload, plans))
    server.pop("hops", None)
    for limit, bounds, search in results:
        say(conclusion(limit, search, bounds))
    levels = [probe.level for _, _, search in results for probe in search.probes]
    if args.json:
        places = accumulate((len(search.probes) for _, _, search in results), initial=0)
        searches = [
            to_json(limit, search, first)
            for (limit, _, search), first in zip(results, places, strict=False)
        ]
        write_json(
            args,
            record(levels, args.prebuffer, arguments(args), server, started) | {"find": searches},
        )
    if any(level.interrupted for level in levels):
        return 130
    return 0 if results and all(search.highest for _, _, search in results) else 1


async def find_limits(
    args: argparse.Namespace, workload: Workload, plans: list[tuple[Limit, Bounds]]
) -> tuple[list[tuple[Limit, Bounds, Search]], dict[str, Any]]:
    """Each search, one after another; stops after one that was interrupted."""
    from stretto.loadtest.find import Prober, find, probe_line

    results: list[tuple[Limit, Bounds, Search]] = []
    async with connected(args, workload) as (runner, server):
        runner.want_audio = await answers_speak(runner)
        progress = Progress(args.quiet)
        for limit, bounds in plans if runner.want_audio else without_speech(plans):

            def show(probe: Probe, limit: Limit = limit) -> None:
                progress.end()
                say(probe_line(limit, probe), gap=False)

            say(f"{limit.title}:", gap=False)
            prober = Prober(
                runner,
                limit,
                args.requests,
                args.duration,
                args.warmup,
                args.seed,
                progress.begin,
                progress.tick,
            )
            search = await find(prober, start_of(args, bounds, results), show)
            say("", gap=False)
            results.append((limit, bounds, search))
            if search.probes[-1].last:
                break
    return results, server


async def answers_speak(runner: Bench) -> bool:
    """Whether answers have speech: one request finds out, which is not counted."""
    from stretto.loadtest.runner import Closed, Targets
    from stretto.loadtest.sse import RequestFailed

    runner.want_audio = False
    level = await runner.run(Closed(1), Targets(requests=1))
    if level.interrupted:
        raise KeyboardInterrupt
    [sample] = level.samples
    if sample.error is not None:
        raise RequestFailed(sample.error, sample.message or "the server gave no answer")
    return bool(sample.packets)


def without_speech(plans: list[tuple[Limit, Bounds]]) -> list[tuple[Limit, Bounds]]:
    from stretto.loadtest.find import FirstWithin

    say("The answers have no speech: no player can underrun, and a rate is searched by first text.")
    return [
        (replace(limit, spoken=False), bounds)
        for limit, bounds in plans
        if isinstance(limit, FirstWithin)
    ]


def start_of(
    args: argparse.Namespace, bounds: Bounds, results: list[tuple[Limit, Bounds, Search]]
) -> Bounds:
    """A rate that was not named starts with that of the answers to a single listener."""
    from stretto.loadtest.report import rates

    alone = [p for _, _, search in results for p in search.probes if p.load == 1 and p.level.good]
    if bounds.whole or args.rate or not alone:
        return bounds
    return rate_from(rates(alone[0].level)["requests_per_s"])


def rate_from(rate: float) -> Bounds:
    from stretto.loadtest.find import HALVINGS, LEAST_RATE, MOST, Bounds

    start = min(max(float(f"{rate:.3g}"), LEAST_RATE), MOST)
    return Bounds(start, max(LEAST_RATE, start / 2**HALVINGS), MOST)


def read_find(args: argparse.Namespace) -> list[tuple[Limit, Bounds]]:
    """The limits that are searched, each with the loads that may be tried."""
    from stretto.loadtest.find import LEAST_RATE, MOST, Bounds, FirstWithin, NoUnderrun

    streams, rates = args.concurrency or [], args.rate or []
    check(
        len(streams) + len(rates) <= 1,
        "with --find, -c or -r names one load, from which the search starts",
    )
    check(args.underrun_ms >= 0, "--underrun-ms must not be negative")
    check(args.first_audio_ms > 0, "--first-audio-ms must be above 0")
    check(0 < args.percentile < 100, "--percentile must be between 0 and 100")
    check(
        all(n <= MOST for n in (*streams, *rates)),
        f"--find tries at most {MOST} listeners, or requests a second",
    )
    check(
        all(r >= LEAST_RATE for r in rates),
        f"--find tries at least {LEAST_RATE:g} requests a second",
    )
    check(
        not (args.text_only and streams),
        "text has no underrun to search for: --text-only goes without -c",
    )
    smooth = (
        NoUnderrun(args.underrun_ms / 1e3),
        Bounds(streams[0] if streams else 1, 1, MOST, whole=True),
    )
    in_time = (
        FirstWithin(args.first_audio_ms / 1e3, args.percentile / 100),
        rate_from(rates[0] if rates else 1.0),
    )
    return [smooth] if streams else [in_time] if rates else [smooth, in_time]


# --- both


def check(fine: bool, otherwise: str) -> None:
    if not fine:
        raise Invalid(otherwise)


def say(text: str, gap: bool = True) -> None:
    """`gap`: an empty line follows."""
    sys.stdout.write(text + ("\n\n" if gap else "\n"))
    sys.stdout.flush()

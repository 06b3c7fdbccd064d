"""`stretto generate`: answer one conversation, or a file of them, through the pipeline and write
what came out."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from stretto.config.flags import add_flags
from stretto.config.loader import ENGINE_RECORDS, collect, engine_config
from stretto.errors import Invalid, StrettoError
from stretto.hub import MODEL_HELP, find_model
from stretto.params import ChunkSizes, Params

MEDIA = ("audio", "image", "video")
SOUND_FILES = (".wav", ".flac")
LEFT_OUT = ("min_pace", "share_prefix_cache")
"""Settings of an engine that only a server needs: no client listens while a file is made, and all
prompts have one owner."""

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from stretto.api import Answer, AsyncEngine
    from stretto.config.engine import EngineConfig
    from stretto.engine.events import Event, Finished, Modality


def add_generate_parser(jobs: Any) -> None:
    gen = jobs.add_parser(
        "generate",
        help="answer a conversation, aloud",
        usage="stretto generate [MODEL] --text QUESTION --out A.wav [FLAGS]",
        description="Answer one conversation, or a file of them. The engine's flags can also be "
        "set in the environment "
        "(STRETTO_DEVICE=cpu).",
    )
    gen.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add = gen.add_argument_group(
        "what to answer: a question of these parts, or a file"
    ).add_argument
    add("--text", help="a user's message; -: from standard input")
    for kind in MEDIA:
        files = {"type": Path, "action": "append", "default": [], "metavar": "FILE"}
        add(f"--{kind}", help="goes before --text; repeatable", **files)
    add("--system", help="system prompt")
    conversation = "a conversation in OpenAI chat format"
    add("--messages", type=Path, metavar="FILE.json", help=conversation)
    lines = "one conversation a line; answers go to --out-dir"
    add("--batch", type=Path, metavar="FILE.jsonl", help=lines)
    add = gen.add_argument_group("where the answer goes").add_argument
    add("--out", type=Path, metavar="A.wav", help="the speech, 16 bit, .wav or .flac")
    add("--samples", type=Path, metavar="A.npy", help="float32 samples before any conversion")
    add("--codes", type=Path, metavar="CODES.npy", help="codec frames [frames, codes]")
    report = "ids, text, counts, finish reasons, timings"
    add("--json", type=Path, metavar="OUT.json", help=report)
    timeline = "the stages' timeline, for ui.perfetto.dev"
    add("--trace", type=Path, metavar="T.json", help=timeline)
    answers = "for --batch: answers as 0.wav, 0.json, ..."
    add("--out-dir", type=Path, metavar="DIR", help=answers)
    add("--text-only", action="store_true", help="do not speak")
    add = gen.add_argument_group("how").add_argument
    own = "(default: the checkpoint's own)"
    seconds = f"12.5 frames are a second {own}"
    add("--voice", help="one of the model's voices (case does not matter)")
    add("--greedy", action="store_true", help="no chance in any stage")
    add("--temperature", type=float, help=f"of the text; 0 is greedy {own}")
    add("--top-p", type=float, help=own)
    add("--top-k", type=int, help=own)
    add("--seed", type=int, default=0)
    add("--max-tokens", "--max-text-tokens", type=int, metavar="N", help=f"of text {own}")
    add("--max-audio-frames", "--max-frames", type=int, metavar="N", help=seconds)
    add("--first-frames", type=int, default=1, metavar="N", help="frames in the first packet")
    add("--each-frames", type=int, default=None, metavar="N", help="frames in the others")
    add("--concurrency", type=int, default=8, metavar="N", help="of --batch")
    add_flags(gen, ENGINE_RECORDS, LEFT_OUT)
    gen.set_defaults(job=run_generate)


def settings(args: argparse.Namespace) -> EngineConfig:
    return read_config(args, max_requests=max(args.concurrency, 1))


def read_config(args: argparse.Namespace, max_requests: int) -> EngineConfig:
    """The engine's settings of a command that answers by itself; `speak` calls it too."""
    sources = collect(vars(args), os.environ, records=ENGINE_RECORDS)
    for warning in sources.warnings:
        say(f"stretto: warning: {warning}")
    return replace(engine_config(sources, max_requests=max_requests), min_pace=0.0)


def parameters(args: argparse.Namespace, defaults: Params) -> Params:
    """The parameters of the flags; those of the checkpoint where there is no flag."""
    each = args.each_frames if args.each_frames is not None else args.first_frames
    flags = {
        "temperature": 0.0 if args.greedy else args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "max_text_tokens": args.max_tokens,
        "max_frames": args.max_audio_frames,
    }
    return replace(
        defaults,
        **{name: value for name, value in flags.items() if value is not None},
        seed=args.seed,
        greedy_speech=args.greedy,
        packets=ChunkSizes(args.first_frames, each, None),
        want_codes=args.codes is not None,
    )


def read_messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.messages is not None:
        return _messages(_json(args.messages, args.messages.read_text), str(args.messages))
    parts: list[dict[str, Any]] = []
    for kind in MEDIA:
        for path in getattr(args, kind):
            if not path.is_file():
                raise Invalid(f"--{kind} {path}: there is no such file", kind)
            url = f"file://{quote(str(path.absolute()))}"
            parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
    text = sys.stdin.read().strip() if args.text == "-" else args.text
    if text:
        parts.append({"type": "text", "text": text})
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text if text and len(parts) == 1 else parts}]


def read_batch(path: Path) -> list[str]:
    """The lines of the file, each a conversation. They are decoded later, one by one."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise Invalid(f"{path}: cannot be read ({e})", "batch") from None


def _json(path: Path, read: Any) -> Any:
    try:
        return json.loads(read(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise Invalid(f"{path}: cannot be read as JSON ({e})", "messages") from None


def _messages(raw: Any, where: str) -> list[dict[str, Any]]:
    messages = raw.get("messages") if isinstance(raw, dict) else raw
    if not isinstance(messages, list):
        raise Invalid(f"{where}: must hold a list of messages", "messages")
    return messages


def run_generate(args: argparse.Namespace) -> int:
    check_inputs(args)
    check_outputs(args)
    parameters(args, Params())  # refuses impossible numbers before the model is loaded
    # The conversation is read before the model: a misspelt file should not cost a minute.
    conversation: list[Any] = (
        read_batch(args.batch) if args.batch is not None else read_messages(args)
    )
    return asyncio.run(_generate(args, conversation))


def check_inputs(args: argparse.Namespace) -> None:
    question = [f"--{name}" for name in ("text", *MEDIA) if getattr(args, name)]
    files = [f"--{name}" for name in ("messages", "batch") if getattr(args, name) is not None]
    if not question and not files:
        raise Invalid(
            "nothing to answer: give --text, --audio, --image, --video, --messages or --batch",
            "text",
        )
    if len(files) > 1 or (files and (question or args.system)):
        also = [*question, *(["--system"] if args.system else []), *files[1:]]
        raise Invalid(
            f"{files[0]} holds whole conversations: leave out {', '.join(also)}",
            files[0].strip("-"),
        )


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse files that could not be written in the end."""
    if args.batch is not None and args.out_dir is None:
        raise Invalid("--batch needs --out-dir", "out_dir")
    if args.out is not None:
        check_sound_file(args.out)
    sound = {"--out": args.out, "--samples": args.samples, "--codes": args.codes}
    if args.text_only and (flags := [flag for flag, path in sound.items() if path is not None]):
        raise Invalid(
            f"--text-only makes no speech: there is nothing to write for {', '.join(flags)}",
            "text_only",
        )
    for path in (args.samples, args.codes, args.json, args.trace):
        if path is not None and path.is_dir():
            raise Invalid(f"{path} is a directory; name a file", "out")


def check_sound_file(path: Path) -> None:
    """Refuse what speech could not be written to in the end; `speak` calls it too."""
    if path.suffix.lower() not in SOUND_FILES:
        raise Invalid(f"--out {path}: can be {' or '.join(SOUND_FILES)}", "out")
    if path.is_dir():
        raise Invalid(f"{path} is a directory; name a file", "out")


async def _generate(args: argparse.Namespace, conversation: list[Any]) -> int:
    from stretto.api import AsyncEngine

    config = settings(args)
    start = time.perf_counter()
    async with AsyncEngine(find_model(args.model, say), config=config) as engine:
        load_s = time.perf_counter() - start
        params = parameters(args, engine.info.defaults)
        if args.batch is not None:
            return await _batch(args, conversation, engine, params, load_s)
        return await _one(args, conversation, engine, params, load_s)


async def _answer(
    args: argparse.Namespace, messages: list[dict[str, Any]], engine: AsyncEngine, params: Params
) -> Answer:
    from stretto.api import BOTH, Answer

    modalities: Sequence[Modality] = ("text",) if args.text_only else BOTH
    events = engine.stream(messages, modalities=modalities, voice=args.voice, params=params)
    return await Answer.of(
        events if args.batch is not None else _shown(events), engine.info.sample_rate
    )


async def _shown(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Passes the events on, and writes their text to standard output."""
    from stretto.engine.events import TextDelta

    async for event in events:
        if isinstance(event, TextDelta):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        yield event


async def _one(
    args: argparse.Namespace,
    messages: list[dict[str, Any]],
    engine: AsyncEngine,
    params: Params,
    load_s: float,
) -> int:
    import numpy as np

    answer = await _answer(args, messages, engine, params)
    sys.stdout.write("\n")
    files = [path for path in (args.out, args.samples, args.codes, args.json, args.trace) if path]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.out is not None:
        write_sound(args.out, answer)
    if args.samples is not None:
        np.save(args.samples, answer.audio)
    if args.codes is not None:
        np.save(args.codes, answer.codes)
    if args.json is not None:
        write_report(args.json, answer, load_s)
    if args.trace is not None:
        write_trace(args.trace, answer.finished)
    spoken = "" if args.text_only else f", {answer.seconds:.2f} s of speech"
    first = answer.first_audio_s
    sooner = f", first sound after {first:.3f} s" if first is not None else ""
    tokens = answer.finished.usage.text_tokens
    say(f"{tokens} tokens{spoken} in {answer.total_s:.2f} s{sooner} (ready after {load_s:.1f} s)")
    if answer.cut:
        say("the answer met a limit before its end (--max-tokens, --max-audio-frames)")
    for path in files:
        say(f"wrote {path}")
    return 0


def write_sound(path: Path, answer: Answer) -> None:
    """`speak` calls it too."""
    import soundfile

    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, answer.audio, answer.sample_rate, subtype="PCM_16")


def write_report(path: Path, answer: Answer, load_s: float) -> None:
    end = answer.finished
    report = {
        "prompt_ids": list(end.prompt_ids),
        "text_ids": list(answer.text_ids),
        "text": answer.text,
        "frames": end.usage.frames,
        "samples": end.usage.samples,
        "finish": {"text": end.text, "audio": end.audio},
        "seed": end.seed,
        "timings": {
            "load_s": load_s,
            "first_text_s": answer.first_text_s,
            "first_audio_s": answer.first_audio_s,
            "total_s": answer.total_s,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_trace(path: Path, end: Finished) -> None:
    from stretto.observe.trace import TraceEvents

    spans = [(s.lane, s.name, int(1e9 * s.start), int(1e9 * s.stop)) for s in end.timeline]
    path.write_text(json.dumps({"traceEvents": TraceEvents().of("request", spans)}) + "\n")


async def _batch(
    args: argparse.Namespace, lines: list[str], engine: AsyncEngine, params: Params, load_s: float
) -> int:
    """Every line of the file, a few at a time. A line that fails is reported and the others go
    on."""
    from tqdm import tqdm

    gate = asyncio.Semaphore(args.concurrency)
    bar = tqdm(total=len(lines), desc="answers", unit="answer", disable=None)

    async def work(i: int, line: str) -> bool:
        async with gate:
            try:
                raw = _json(args.batch, lambda encoding: line)
                messages = _messages(raw, f"{args.batch}:{i + 1}")
                own = replace(params, seed=args.seed + i)
                answer = await _answer(args, messages, engine, own)
                if not args.text_only:
                    write_sound(args.out_dir / f"{i}.wav", answer)
                write_report(args.out_dir / f"{i}.json", answer, load_s)
            except StrettoError as e:
                say(f"line {i + 1}: {e}")
                return False
            finally:
                bar.update()
            return True

    answered = sum(await asyncio.gather(*(work(i, line) for i, line in enumerate(lines))))
    bar.close()
    say(f"{answered} of {len(lines)} answered, in {args.out_dir}")
    return 0 if answered == len(lines) else 1


def say(line: str) -> None:
    sys.stderr.write(line + "\n")

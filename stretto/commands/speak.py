"""`stretto speak`: read a text aloud, through the pipeline. A text on standard input is spoken
while it comes."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.commands.generate import (
    LEFT_OUT,
    check_sound_file,
    read_config,
    say,
    write_sound,
)
from stretto.config.flags import add_flags
from stretto.config.loader import ENGINE_RECORDS
from stretto.errors import Invalid
from stretto.hub import MODEL_HELP, find_model
from stretto.params import Params

PIECE = 4096

if TYPE_CHECKING:
    from stretto.api import Answer
    from stretto.engine.events import Event


def add_speak_parser(jobs: Any) -> None:
    speak = jobs.add_parser(
        "speak",
        help="read a text aloud; standard input while it comes",
        usage="stretto speak [MODEL] --text TEXT --out A.wav [FLAGS]",
        description="Read a text aloud. Without --text it is read from standard input, and models "
        "that can begin to "
        "speak before it has ended. The engine's flags can also be set in the environment "
        "(STRETTO_DEVICE=cpu).",
    )
    speak.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    speak.add_argument("--text", help="default, or -: standard input")
    formats = (
        "16 bit, .wav or .flac; -: raw samples to standard output as they are made, such as "
        "for aplay -f S16_LE -r 24000"
    )
    speak.add_argument("--out", type=Path, required=True, metavar="A.wav", help=formats)
    add = speak.add_argument_group("how").add_argument
    add("--voice", help="one of the model's voices (case does not matter)")
    add("--language", help="of the text (default: the model finds out)")
    add("--instructions", default="", help="how to speak, in words")
    add("--clip", type=Path, metavar="SOUND", help="speak with the voice of this sound file")
    add("--clip-text", default="", metavar="TEXT", help="what is said in it: a closer likeness")
    add("--speed", type=float, default=1.0, metavar="X", help="0.25 to 4, at the same pitch")
    add("--greedy", action="store_true", help="no chance")
    add("--seed", type=int, default=0)
    seconds = "12.5 frames are a second"
    add("--max-audio-frames", "--max-frames", type=int, metavar="N", help=seconds)
    add_flags(speak, ENGINE_RECORDS, LEFT_OUT)
    speak.set_defaults(job=run_speak)


def run_speak(args: argparse.Namespace) -> int:
    if str(args.out) != "-":
        check_sound_file(args.out)
    if args.clip is not None and not args.clip.is_file():
        raise Invalid(f"--clip {args.clip}: there is no such file", "clip")
    parameters(args, Params())  # refuses impossible numbers before the model is loaded
    return asyncio.run(_speak(args))


def parameters(args: argparse.Namespace, defaults: Params) -> Params:
    """The parameters of the flags; those of the checkpoint where there is no flag."""
    most = {} if args.max_audio_frames is None else {"max_frames": args.max_audio_frames}
    return replace(defaults, seed=args.seed, greedy_speech=args.greedy, speed=args.speed, **most)


async def _speak(args: argparse.Namespace) -> int:
    from stretto.api import Answer, AsyncEngine
    from stretto.params import SpeechStyle

    config = read_config(args, max_requests=1)
    directory = find_model(args.model, say)
    async with AsyncEngine(directory, config=config) as engine:
        voice = b""
        if args.clip is not None:
            voice = await engine.make_voice(args.clip, args.clip_text)
        style = SpeechStyle(args.instructions, args.language, voice)
        text: str | AsyncIterator[str] = args.text
        if args.text in (None, "-"):
            text = standard_input()
            if not engine.info.reads_while_written:
                text = "".join([piece async for piece in text])
        params = parameters(args, engine.info.defaults)
        events = engine.stream_aloud(text, voice=args.voice, style=style, params=params)
        played = _played(events) if str(args.out) == "-" else events
        answer = await Answer.of(played, engine.info.sample_rate)
    return finish(args.out, answer)


def finish(out: Path, answer: Answer) -> int:
    """Say how long it took and whether speech was cut; write the file, if there is one."""
    length = answer.finished.usage.samples / answer.sample_rate
    first_s = answer.first_audio_s or 0.0
    say(f"{length:.2f} s of speech in {answer.total_s:.2f} s, first sound after {first_s:.3f} s")
    if answer.cut:
        say("the speech met a limit before the end of the text (--max-audio-frames)")
    if str(out) != "-":
        write_sound(out, answer)
    return 0


async def _played(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Passes the events on without their samples, which go to standard output."""
    from stretto.engine.events import AudioChunk

    async for event in events:
        if isinstance(event, AudioChunk):
            sys.stdout.buffer.write(event.pcm16())
            sys.stdout.buffer.flush()
            yield replace(event, samples=event.samples[:0])
        else:
            yield event


async def standard_input() -> AsyncIterator[str]:
    """Standard input as it comes; never half a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := await asyncio.to_thread(os.read, sys.stdin.fileno(), PIECE):
        if piece := decoder.decode(data):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest

"""`stretto speak`: read a text aloud, through the pipeline. A text on standard input is spoken
while it comes."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.commands.generate import LEFT_OUT, check_sound_file, read_config, say
from stretto.config.flags import add_flags
from stretto.config.loader import ENGINE_RECORDS
from stretto.errors import Invalid
from stretto.hub import MODEL_HELP, find_model
from stretto.params import Params

PIECE = 4096

if TYPE_CHECKING:
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
    speak.add_argument(
        "--out", type=Path, required=True, metavar="A.wav",
        help="16 bit, .wav or .flac; -: raw samples to standard output as they are made, such as "
             "for aplay -f S16_LE "
        "-r 24000",
    )  # fmt: skip
    how = speak.add_argument_group("how")
    how.add_argument("--voice", help="one of the model's voices (case does not matter)")
    how.add_argument("--language", help="of the text (default: the model finds out)")
    how.add_argument("--instructions", default="", help="how to speak, in words")
    how.add_argument(
        "--clip", type=Path, metavar="SOUND", help="speak with the voice of this sound file"
    )
    how.add_argument(
        "--clip-text", default="", metavar="TEXT", help="what is said in it: a closer likeness"
    )
    how.add_argument("--greedy", action="store_true", help="no chance")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument(
        "--max-audio-frames", "--max-frames", type=int, metavar="N", help="12.5 frames are a second"
    )
    add_flags(speak, ENGINE_RECORDS, LEFT_OUT)
    speak.set_defaults(job=run_speak)


def run_speak(args: argparse.Namespace) -> int:
    if str(args.out) != "-":
        check_sound_file(args.out)
    if args.clip is not None and not args.clip.is_file():
        raise Invalid(f"--clip {args.clip}: there is no such file", "clip")
    parameters(args, Params())  # are they numbers that can be?
    return asyncio.run(_speak(args))


def parameters(args: argparse.Namespace, defaults: Params) -> Params:
    """As the flags say; what they leave open, as the checkpoint does."""
    most = {} if args.max_audio_frames is None else {"max_frames": args.max_audio_frames}
    return replace(defaults, seed=args.seed, greedy_speech=args.greedy, **most)


async def _speak(args: argparse.Namespace) -> int:
    from stretto.api import AsyncEngine
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
        events = engine.stream_aloud(text, voice=args.voice, manner=style, params=params)
        return await _write(args.out, events, engine.info.sample_rate)


async def _write(out: Path, events: AsyncIterator[Event], sample_rate: int) -> int:
    """Write the speech: to standard output as it is made, or to a file in the end."""
    import soundfile

    from stretto.api import Answer
    from stretto.engine.events import AudioChunk

    since = time.perf_counter()
    first = 0.0
    collected: list[Event] = []
    async for event in events:
        collected.append(event)
        if isinstance(event, AudioChunk):
            first = first or time.perf_counter() - since
            if str(out) == "-":
                collected.pop()
                sys.stdout.buffer.write(event.pcm16())
                sys.stdout.buffer.flush()
    took = time.perf_counter() - since
    answer = Answer.of(collected, sample_rate)
    length = answer.finished.usage.samples / sample_rate
    say(f"{length:.2f} s of speech in {took:.2f} s, first sound after {first:.3f} s")
    if answer.cut:
        say("the speech met a limit before the end of the text (--max-audio-frames)")
    if str(out) != "-":
        out.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(out, answer.audio, sample_rate, subtype="PCM_16")
    return 0


async def standard_input() -> AsyncIterator[str]:
    """What comes, as soon as it does; never half a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := await asyncio.to_thread(os.read, sys.stdin.fileno(), PIECE):
        if piece := decoder.decode(data):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest

"""`stretto talk`: its flags, and the parts that they select. `cli.py` calls it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.errors import Invalid

DEFAULT_URL = "http://127.0.0.1:8000"


def add_talk_parser(jobs: Any) -> None:
    talk = jobs.add_parser(
        "talk",
        help="talk with a server in the terminal",
        usage="stretto talk [URL] [--live] [FLAGS]",
        description="A conversation in the terminal. Type, or press Enter on an empty line to "
        "speak (needs the package "
        "sounddevice). /voice NAME, /image FILE, /file SOUND, /new, /quit.",
    )
    talk.add_argument(
        "url", nargs="?", metavar="URL", default=DEFAULT_URL, help="default: %(default)s"
    )
    talk.add_argument("--model", help="default: the first the server lists")
    talk.add_argument("--api-key", "--key", help="API key", metavar="KEY")
    talk.add_argument(
        "--live", action="store_true", help="an open microphone: just talk, and interrupt when you "
                                            "like; with --file, "
        "the file is spoken in place of a microphone, and the first answer ends it",
    )  # fmt: skip
    once = talk.add_argument_group("one question, then leave")
    once.add_argument("--file", type=Path, metavar="QUESTION.wav", help="a spoken question")
    once.add_argument("--text", help="a written one, or what goes with the file")
    how = talk.add_argument_group("how it answers")
    how.add_argument("--voice")
    how.add_argument("--system", help="system prompt")
    how.add_argument("--max-tokens", type=int, metavar="N")
    how.add_argument("--text-only", action="store_true", help="do not ask for speech")
    how.add_argument(
        "--save", type=Path, metavar="DIR", help="write each spoken answer to DIR/answer-N.wav"
    )
    how.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="of silence (default: %(default)s)",
    )
    talk.set_defaults(job=run_talk)


def run_talk(args: argparse.Namespace) -> int:
    import httpx

    from stretto.loadtest.http import (
        ListedModel,
        answers_now,
        api_root,
        failures,
        headers,
        read_models,
        timeouts,
    )
    from stretto.talk.sound import find_sound
    from stretto.talk.typed import Talk

    sent, patience = headers(args.api_key), timeouts(args.timeout)
    with httpx.Client(base_url=api_root(args.url), headers=sent, timeout=patience) as client:
        with failures():
            listed = client.get("models")
        listing = read_models(listed.status_code, listed.content)
        model = (
            listing
            if args.model is None
            else ListedModel(args.model, listing.voices, listing.sample_rate)
        )
        if args.live:
            return run_live(args, str(client.base_url), model.name)
        talk = Talk(
            ask=lambda body: answers_now(client, body), model=model, out=sys.stdout, read=input,
            sound=find_sound(),
            voice=args.voice, system=args.system, max_tokens=args.max_tokens,
            speak=not args.text_only, save=args.save,
        )  # fmt: skip
        if args.file or args.text:
            return talk.once(args.text, args.file)
        return talk.run()


def run_live(args: argparse.Namespace, root: str, model: str) -> int:
    from urllib.parse import quote

    from websockets.exceptions import ConnectionClosed, InvalidStatus
    from websockets.sync.client import connect

    from stretto.loadtest.sse import RequestFailed
    from stretto.talk.live import FileMicrophone, LiveTalk, realtime_url
    from stretto.talk.sound import MICROPHONE_RATE, NoSound, find_sound

    if args.text or args.text_only:
        raise Invalid("--live is a spoken conversation: it goes without --text and --text-only")
    sound = find_sound()
    if args.file is not None:
        pcm = read_pcm(args.file, MICROPHONE_RATE)

        def listen(rate: int, take: Callable[[bytes], None]) -> Any:
            return FileMicrophone(pcm, rate, take)
    elif isinstance(sound, NoSound):
        raise Invalid(f"there is no microphone to listen with: {sound.why}; or give --file")
    else:
        listen = sound.listen
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    url = f"{realtime_url(root)}?model={quote(model)}"
    try:
        with connect(
            url, additional_headers=headers, max_size=None, max_queue=None, compression=None
        ) as socket:
            return LiveTalk(
                socket, sys.stdout, listen, None if isinstance(sound, NoSound) else sound.speaker,
                args.voice, args.system, args.max_tokens, args.save,
                max_answers=1 if args.file is not None else None,
            ).run()  # fmt: skip
    except InvalidStatus as e:
        status = e.response.status_code
        body = e.response.body.decode()[:300]
        raise RequestFailed(f"http {status}", f"the server refused: {status} {body}") from None
    except (ConnectionClosed, OSError) as e:
        raise RequestFailed("closed", f"the conversation has ended: {e}") from None


def read_pcm(path: Path, rate: int) -> bytes:
    """A sound file as mono 16-bit samples at a rate."""
    import soundfile
    import soxr

    try:
        samples, file_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as e:
        raise Invalid(f"{path}: cannot be read ({e})", "file") from None
    mono = soxr.resample(samples.mean(axis=1), file_rate, rate)
    return bytes((mono * 32767).round().clip(-32768, 32767).astype("<i2").tobytes())

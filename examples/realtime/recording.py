"""What the examples in this folder share: their arguments, the recording that is spoken, which is
read before anything is connected, and the answer's file. Whatever is wrong ends with a sentence."""

import argparse
import sys
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

RATE = 24_000
PATIENCE_S = 30.0
"""How long to wait for a server that says nothing."""


@dataclass(frozen=True)
class Arguments:
    question: str
    data: bytes  # the question's samples
    answer: str
    url: str
    key: str

    @property
    def seconds(self) -> float:
        return len(self.data) / 2 / RATE

    def refuse(self, error: object) -> NoReturn:
        """The server cannot be reached, or wants nothing of this client."""
        sys.exit(f"{self.url}: {error} (is `stretto serve` running there, and is --key right?)")

    def give_up(self) -> NoReturn:
        sys.exit(f"no answer within {PATIENCE_S:.0f} s: is there speech in {self.question}?")

    def write(self, sound: bytes) -> None:
        with wave.open(self.answer, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(sound)


def read_arguments(about: str | None, url: str, key: str = "none") -> Arguments:
    """`url`, `key`: where none is given."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", help="a WAV file: 24 kHz, mono, 16 bits")
    parser.add_argument("answer", help="the WAV file that is written")
    parser.add_argument("--url", default=url)
    parser.add_argument("--key", default=key)
    args = parser.parse_args()
    if not Path(args.answer).absolute().parent.is_dir():
        sys.exit(f"{args.answer}: there is no such directory")
    return Arguments(args.question, read(args.question), args.answer, args.url, args.key)


def read(path: str) -> bytes:
    try:
        with wave.open(path) as file:
            form = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
            data = file.readframes(file.getnframes())
    except FileNotFoundError:
        sys.exit(f"{path}: there is no such file")
    except (wave.Error, EOFError, OSError) as error:
        sys.exit(f"{path}: cannot be read as a WAV file ({error})")
    if form != (RATE, 1, 16):
        sys.exit(
            f"{path}: {form[0]} Hz, {form[1]} channel(s), {form[2]} bits, but it must be 24 kHz, "
            f"mono, 16 bits: ffmpeg -i {path} -ar 24000 -ac 1 -sample_fmt s16 question.wav"
        )
    return data

"""Speech for the audio encoder: the grammar's questions, and remarks to be written down, in the
voices of flite and espeak-ng (Debian).

Two voices are held out of training: `rms` of flite, a man's recorded voice, and one variant of
espeak-ng. Chunks of questions are files of a folder, each whole or not there, so that training can
begin while they are made. `pack` makes an archive of both synthesizers for a machine without them.
Called by `__main__.py` and `listen.py`."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
import tarfile
import time
import wave
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import soxr

from recipes.nano import grammar, spoken
from recipes.nano.report import say

RATE = 16000
LONGEST = 8 * RATE  # samples, silence around included
CHUNK = 200
HELD_CHUNKS = 2  # the first chunks, also of remarks, are spoken by the voices that are held out
REMARKS = 4998  # the chunks from here on are of remarks
PREFIX = Path("/opt/voices-packed")
ESPEAK_DATA = Path("/usr/lib/x86_64-linux-gnu/espeak-ng-data")
_ENGLISH = ("phondata", "phonindex", "phontab", "intonations", "en_dict", "lang/gmw", "voices/!v")
FLITE = ("slt", "awb", "kal16", "kal")
ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-gb-x-gbclan")
VARIANTS = """m1 m2 m3 m4 m5 m6 m7 f1 f2 f3 f4 klatt2 klatt3 klatt4 Andy Annie Alex Alicia Andrea Denis Gene2 Hugo Jacky
Lee Marco Michael Mike adam anika belinda benjamin caleb david ed edward iven2 linda max norbert paul quincy rob robert
shelby steph travis victor""".split()
HELD_OUT = (("flite", "rms"), ("espeak", "en-us+f5"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to be spoken, and how."""

    pair: grammar.Pair
    engine: str
    voice: str
    stretch: float  # of durations
    pitch: float  # 0 low to 1 high


def speakable(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z ,.?!':-]+", text) is not None


KINDS = {"sum": 22, "count": 8, "calendar": 8, "opposite": 8, "capital": 5, "talk": 13, "fact": 11}
OTHERS = {"say": 8, "unknown": 10}  # to repeat, to decline: not scored


@cache
def _domain(kind: str, held_out: bool) -> tuple[grammar.Pair, ...]:
    """What can be spoken of a kind; held-out combinations only for the score."""
    pairs = grammar.domain_kinds()[kind]
    return tuple(p for p in pairs if speakable(p.question) and (held_out or not p.held_out))


def question(rng: Random) -> grammar.Pair:
    """A question to learn from."""
    kinds = KINDS | OTHERS
    while True:
        kind = rng.choices([*kinds], [*kinds.values()])[0]
        if kind in KINDS:
            return rng.choice(_domain(kind, held_out=False))
        pair = grammar.say(rng) if kind == "say" else grammar.unknown(rng)
        if speakable(pair.question) and len(pair.question.split()) <= 10:
            return pair


def remark(rng: Random) -> grammar.Pair:
    """Something to write down that can be spoken."""
    while True:
        pair = spoken.remark(rng)
        if speakable(pair.question):
            return pair


def scored_question(rng: Random) -> grammar.Pair:
    """A question of the closed domain, held-out combinations included."""
    return rng.choice(_domain(rng.choices([*KINDS], [*KINDS.values()])[0], held_out=True))


def held_out(number: int) -> bool:
    return number < HELD_CHUNKS or 0 <= number - REMARKS < HELD_CHUNKS


@cache
def chunk(number: int) -> tuple[Asked, ...]:
    """What is asked in a chunk, and by whom."""
    rng = Random(f"spoken {number}")
    found = []
    for _ in range(CHUNK):
        if held_out(number):
            engine, voice = HELD_OUT[number % len(HELD_OUT)]
            pair = scored_question(rng) if number < REMARKS else remark(rng)
            found.append(Asked(pair, engine, voice, 1.0, 0.5))
            continue
        pair = question(rng) if number < REMARKS else remark(rng)
        if rng.random() < 0.55:
            engine, voice = "flite", rng.choices(FLITE, (4, 4, 2, 1))[0]
        else:
            engine, voice = (
                "espeak",
                f"{rng.choices(ACCENTS, (5, 3, 1, 1, 1, 1))[0]}+{rng.choice(VARIANTS)}",
            )
        found.append(Asked(pair, engine, voice, rng.uniform(0.8, 1.3), rng.random()))
    return tuple(found)


def _command(asked: Asked, out: Path) -> list[str]:
    text = asked.pair.question
    if asked.engine == "flite":
        pitch = (
            ["--setf", f"int_f0_target_mean={90 + 110 * asked.pitch:.0f}"]
            if asked.stretch != 1.0
            else []
        )
        given = [
            "-voice",
            asked.voice,
            "--setf",
            f"duration_stretch={asked.stretch:.2f}",
            *pitch,
            "-t",
            text,
        ]
        return [*_run("flite"), *given, "-o", str(out)]
    speed, pitch_ = round(165 / asked.stretch), round(15 + 65 * asked.pitch)
    given = ["-v", asked.voice, "-s", str(speed), "-p", str(pitch_), "-w", str(out), text]
    return [*_run("espeak-ng"), *given]


def _run(program: str) -> list[str]:
    """A packed program by its own loader, so that the machine's libraries do not matter."""
    if not (PREFIX / "bin" / program).exists():
        return [program]
    library = PREFIX / "lib"
    data = [f"--path={PREFIX}"] if program == "espeak-ng" else []
    return [
        str(library / "ld-linux-x86-64.so.2"),
        "--library-path",
        str(library),
        str(PREFIX / "bin" / program),
        *data,
    ]


def speak(asked: Asked, out: Path) -> npt.NDArray[np.int16]:
    """The question at 16 kHz, one loudness, without silence around it."""
    subprocess.run(_command(asked, out), check=True, capture_output=True)
    with wave.open(str(out)) as file:
        rate, raw = file.getframerate(), file.readframes(file.getnframes())
    out.unlink()
    samples = np.asarray(soxr.resample(np.frombuffer(raw, np.int16).astype(np.float32), rate, RATE))
    peak = max(float(np.abs(samples).max()), 1.0)
    loud = np.flatnonzero(np.abs(samples) > 0.02 * peak)
    cut = samples[loud[0] : loud[-1] + 1] / peak * 0.8 * 32767
    return cut.astype(np.int16)


def _make(task: tuple[str, int]) -> float:
    """Seconds of speech of a chunk; none if it failed."""
    folder, number = Path(task[0]), task[1]
    try:
        spoken = [speak(a, folder / f"q{number}.wav") for a in chunk(number)]
    except (OSError, EOFError, IndexError, subprocess.CalledProcessError, wave.Error) as e:
        say("voices", f"chunk {number} failed: {e!r}")
        return 0.0
    part = folder / f"{number:04d}.part"
    with part.open("wb") as file:
        np.savez(file, samples=np.concatenate(spoken), lengths=np.array([len(s) for s in spoken]))
    part.rename(folder / f"{number:04d}.npz")
    return sum(map(len, spoken)) / RATE


def speak_all(folder: Path, workers: int, seconds: float, chunks: int, remarks: int) -> None:
    """Make the chunks that are missing, for so long: of questions and of remarks."""
    folder.mkdir(parents=True, exist_ok=True)
    started, total = time.monotonic(), 0.0
    every = (*range(chunks), *range(REMARKS, REMARKS + remarks))
    wanted = [c for c in every if not (folder / f"{c:04d}.npz").exists()]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for count, length in enumerate(
            pool.imap(_make, [(str(folder), c) for c in wanted]), start=1
        ):
            total += length
            if count == 3 and total == 0:
                raise SystemExit("the voices do not speak: apt-get install flite espeak-ng")
            took = time.monotonic() - started
            if count % 10 == 0 or count == len(wanted) or took > seconds:
                say(
                    "voices",
                    f"{count} of {len(wanted)} chunks, {total / 3600:.2f} h, {total / took:.0f}x "
                    f"real time",
                )
            if took > seconds:
                pool.terminate()
                break


def made(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("[0-9]*.npz"))


def load(folder: Path, number: int) -> list[npt.NDArray[np.int16]]:
    with np.load(folder / f"{number:04d}.npz") as file:
        samples, ends = file["samples"], np.cumsum(file["lengths"])
    return np.split(samples, ends[:-1])


def pack(archive: Path) -> None:
    """Write an archive of the synthesizers that are installed here; of espeak-ng only what English
    needs."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        libraries: set[str] = set()
        for program in ("flite", "espeak-ng"):
            binary = shutil.which(program)
            if binary is None:
                raise SystemExit("a synthesizer is missing: apt-get install flite espeak-ng")
            tar.add(Path(binary).resolve(), f"bin/{program}")
            listed = subprocess.run(
                ["ldd", binary], capture_output=True, text=True, check=True
            ).stdout
            libraries |= set(re.findall(r"(/\S+) \(0x", listed))
        for library in sorted(libraries):
            tar.add(Path(library).resolve(), f"lib/{Path(library).name}")
        for name in _ENGLISH:
            tar.add(ESPEAK_DATA / name, f"espeak-ng-data/{name}")


def unpack(archive: Path) -> None:
    """Put packed synthesizers in place."""
    if not PREFIX.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(PREFIX, filter="tar")

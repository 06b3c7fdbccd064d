"""The speech: which sentences, spoken by the teacher in chunks that can be made in any order and on
many cores.

Chunk 0 holds the 80 sentences of the score. The others are the domain's answers and sentences to
read, shuffled once; any prefix of them is a corpus. `speak_all` is resumable: a chunk that exists
is not made again. `pack` stores chunks as Opus for a machine without festival. Called by
`__main__.py`, `codec.py` and `talker.py`."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import time
import wave
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from recipes.nano import festival, grammar, phones
from recipes.nano.audio import RATE
from recipes.nano.report import say
from recipes.nano.sentences import FIXED

CHUNK = 100
NUM_READINGS = 40000
NUM_SALADS = 40000
Utterances = list[npt.NDArray[np.int16]]


@cache
def texts() -> tuple[str, ...]:
    """Every sentence to be spoken, chunk by chunk; the first 80 are those of the score. The last
    40,000 are mostly random words: what teaches reading is that no word follows from those before
    it."""
    first = _first_texts()
    rng = Random("salads")
    seen = {grammar.plain(t) for t in first}
    salads: list[str] = []
    while len(salads) < NUM_SALADS:
        text = grammar.reading(rng, (5, 20, 75))
        if grammar.plain(text) not in seen:
            seen.add(grammar.plain(text))
            salads.append(text)
    return (*first, *salads)


def _first_texts() -> tuple[str, ...]:
    answers = sorted({p.answer for p in grammar.domain()} | {grammar.REFUSAL})
    rng = Random("texts")
    seen = {grammar.plain(a) for a in answers}
    readings: list[str] = []
    while len(readings) < NUM_READINGS:
        text = grammar.reading(rng)
        if grammar.plain(text) not in seen:
            seen.add(grammar.plain(text))
            readings.append(text)
    rest = answers + readings
    # The answers all come within the first quarter, so that a short corpus has them.
    order = sorted(
        range(len(rest)), key=lambda i: rng.random() * (0.25 if i < len(answers) else 1.0)
    )
    return (*FIXED, *grammar.held_out_sentences(), *(rest[i] for i in order))


def chunk_texts(chunk: int) -> list[str]:
    score = len(FIXED) + len(grammar.held_out_sentences())
    if chunk == 0:
        return list(texts()[:score])
    start = score + (chunk - 1) * CHUNK
    return list(texts()[start : start + CHUNK])


def num_chunks() -> int:
    return 1 + -(-(len(texts()) - len(FIXED) - len(grammar.held_out_sentences())) // CHUNK)


def _path(folder: Path, chunk: int) -> Path:
    return folder / f"{chunk:04d}.npz"


def _make(task: tuple[str, int]) -> tuple[int, float]:
    """(chunk, seconds of speech); none if the teacher failed."""
    folder, chunk = Path(task[0]), task[1]
    scratch = folder / f"scratch-{chunk}"
    try:
        spoken = festival.speak(chunk_texts(chunk), scratch)
    except (OSError, EOFError, subprocess.CalledProcessError, wave.Error) as e:
        say("corpus", f"chunk {chunk} failed: {e!r}")
        return chunk, 0.0
    save(
        folder,
        chunk,
        [u.samples for u in spoken],
        np.concatenate([phones.labels(u) for u in spoken]),
    )
    shutil.rmtree(scratch)
    return chunk, sum(len(u.samples) for u in spoken) / RATE


def save(folder: Path, chunk: int, spoken: Utterances, labels: phones.Labels) -> None:
    part = folder / f"{chunk:04d}.part"
    with part.open("wb") as file:
        lengths = np.array([len(s) for s in spoken])
        np.savez(file, samples=np.concatenate(spoken), lengths=lengths, labels=labels)
    part.rename(_path(folder, chunk))  # whole or not there: others read this folder meanwhile


def load(folder: Path, chunk: int) -> Utterances:
    with np.load(_path(folder, chunk)) as file:
        samples, ends = file["samples"], np.cumsum(file["lengths"])
    return np.split(samples, ends[:-1])


def load_labels(folder: Path, chunk: int) -> phones.Labels:
    """What is said in each frame of the chunk."""
    with np.load(_path(folder, chunk)) as file:
        labels: phones.Labels = file["labels"]
    return labels


def made(folder: Path) -> list[int]:
    """The chunks that exist."""
    return sorted(int(p.stem) for p in folder.glob("[0-9]*.npz"))


def speak_all(
    folder: Path, workers: int, seconds: float, chunks: int | None = None, first: int = 0
) -> None:
    """Make chunks, from this one on, for so long or until so many exist."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    have = set(made(folder))
    wanted = [c for c in range(first, chunks or num_chunks()) if c not in have]
    total, count = 0.0, 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _, length in pool.imap_unordered(_make, [(str(folder), c) for c in wanted]):
            total, count = total + length, count + 1
            if count == 3 and total == 0:
                raise SystemExit("the teacher does not speak")
            if count % 10 == 0 or count == len(wanted):
                took = time.monotonic() - started
                say(
                    "corpus",
                    f"{count} of {len(wanted)} chunks, {total / 3600:.2f} h of speech, "
                    f"{total / took:.0f}x real time",
                )
            if time.monotonic() - started > seconds:
                pool.terminate()
                break


def pack(folder: Path, out: Path, hours: float, kbps: float = 24.0) -> None:
    """Chunks as Opus, one file each, as many as fit into so many hours."""
    import soundfile

    out.mkdir(parents=True, exist_ok=True)
    lengths: dict[str, list[int]] = {}
    labels: dict[str, phones.Labels] = {}
    left = hours * 3600 * RATE
    for chunk in made(folder):
        spoken = load(folder, chunk)
        left -= sum(map(len, spoken))
        if left < 0:
            break
        # libsndfile maps 0..1 to 256..6 kbit/s
        soundfile.write(out / f"{chunk:04d}.opus", np.concatenate(spoken), RATE, format="OGG",
            subtype="OPUS",
                        compression_level=1 - (kbps - 6) / 250)  # fmt: skip
        lengths[str(chunk)] = [len(s) for s in spoken]
        labels[str(chunk)] = load_labels(folder, chunk)
    np.savez_compressed(out / "labels.npz", **labels)  # type: ignore[arg-type]
    (out / "lengths.json").write_text(json.dumps(lengths))


def unpack(packed: Path, folder: Path) -> None:
    """Chunks from Opus; those that exist stay."""
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    have = set(made(folder))
    labels = np.load(packed / "labels.npz")
    for name, lengths in json.loads((packed / "lengths.json").read_text()).items():
        if int(name) not in have:
            samples, rate = soundfile.read(packed / f"{int(name):04d}.opus", dtype="int16")
            assert (rate, len(samples)) == (RATE, sum(lengths))
            save(folder, int(name), np.split(samples, np.cumsum(lengths)[:-1]), labels[name])


def hours(folder: Path, chunks: Iterable[int]) -> float:
    total = 0
    for chunk in chunks:
        with np.load(_path(folder, chunk)) as file:
            total += int(file["lengths"].sum())
    return total / RATE / 3600

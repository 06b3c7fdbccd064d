"""Texts of any length, read aloud: word error rates of what `/v1/audio/speech` says, by the
recogniser of `score.py`.

Held-out sentences one by one; the same in paragraphs of two, three, four and six; a text of 1,700
characters; and sentences with numbers, money, dates, times, abbreviations and addresses, whose
words are compared as they are spoken. Nothing of it is spoken in training. Called by
`__main__.py`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from recipes.nano import grammar, score
from recipes.nano.audio import RATE, Floats, resample
from recipes.nano.report import gate, note, say
from recipes.nano.sentences import FIXED
from stretto import Engine
from stretto.config.engine import EngineConfig, HostSettings
from stretto.preprocess.audio import cut_sound
from stretto.preprocess.english import as_words

SIZES = (1, 2, 3, 4, 6)
"""Sentences of a paragraph."""
DRAWS = 3
"""How often each sentence is said alone; everything else is said once."""
WINDOW_S = 10.0
"""What is longer is heard in windows of at most so much, cut at quiet places."""
GATES = (("1", 0.10), ("6", 0.15), ("long", 0.15))
WRITTEN = """Dr. Brown arrived at 3:45 in the morning.
The blue hat costs $12.50 at the market.
On Jan. 5, 2024 the school was closed.
About 35% of the farmers have 2 horses.
The old bridge is 120 km from the city.
Mr. Green bought 1,500 books in 1999.
Read more at www.garden.com today.
The 3rd house on the left is No. 27.
It was -5 degrees & very dark at 10 p.m.
She waited 2 1/2 hours, i.e. too long.
The ticket costs £20 or €25.
We need 4 kg of sugar, 3 l of milk, etc.""".splitlines()


@dataclass(frozen=True, slots=True)
class Text:
    part: str
    text: str
    seed: int


def texts() -> list[Text]:
    sentences = grammar.held_out_sentences()
    found = [Text("1", s, i + 100 * d) for d in range(DRAWS) for i, s in enumerate(sentences)]
    for size in SIZES[1:]:
        whole = [sentences[i : i + size] for i in range(0, len(sentences) - size + 1, size)]
        found += [Text(str(size), " ".join(p), i) for i, p in enumerate(whole)]
    found.append(Text("long", " ".join(FIXED), 0))
    return found + [Text("written", s, i) for i, s in enumerate(WRITTEN)]


def read(engine: Engine, some: list[Text], **options: Any) -> list[Any]:
    with ThreadPoolExecutor(score.AT_ONCE) as pool:
        return [*pool.map(lambda t: engine.read_aloud(t.text, seed=t.seed, **options), some)]


def hear(listener: score.Listener, samples: Floats) -> str:
    """What was said, however long it is."""
    if len(samples) <= WINDOW_S * RATE:
        return listener.hear(samples)
    heard = resample(samples, score.HEARD_RATE, RATE)
    windows = (np.asarray(w, np.float32) / 32768 for w in cut_sound(heard, WINDOW_S))
    return " ".join(listener.hear(resample(w, RATE, score.HEARD_RATE)) for w in windows)


def rates(some: list[Text], waves: list[Floats], listener: score.Listener) -> dict[str, float]:
    parts: dict[str, list[tuple[str, str]]] = {}
    for text, samples in zip(some, waves, strict=True):
        both = as_words(text.text), as_words(hear(listener, samples))
        parts.setdefault(text.part, []).append(both)
        if score.words(both[0]) != score.words(both[1]):
            say("aloud", f"  {text.part}: {both[0]} | {both[1]}")
    return {part: round(score.error_rate(heard), 4) for part, heard in parts.items()}


def run(work: Path, checkpoint: Path, recogniser: Path, wav: Path | None, **options: Any) -> None:
    some = texts()
    started = time.monotonic()
    patient = EngineConfig(host=HostSettings(device="cpu"), stall_s=600.0)  # others may use the CPU
    with Engine(checkpoint, config=patient) as engine:
        answers = read(engine, some, **options)
    took = time.monotonic() - started
    waves = [a.audio for a in answers]
    if wav is not None:
        wav.mkdir(parents=True, exist_ok=True)
        for i, (text, samples) in enumerate(zip(some, waves, strict=True)):
            soundfile.write(wav / f"{text.part}-{i}.wav", samples, RATE)
    found = rates(some, waves, score.Recogniser(recogniser))
    for part, limit in GATES:
        gate("aloud", f"{part}: word error rate {found[part]:.3f}, wanted {limit}",
             found[part] <= limit)  # fmt: skip
    ended = sum(a.finished.audio == "stop" for a in answers)
    gate("aloud", f"{ended} of {len(answers)} end by themselves", ended == len(answers))
    seconds = round(sum(map(len, waves)) / RATE, 1)
    note(work, "aloud", word_error_rate=found, ended=f"{ended} of {len(answers)}",
         characters=len(some[-len(WRITTEN) - 1].text), seconds=seconds, took=round(took, 1),
         options=options)  # fmt: skip

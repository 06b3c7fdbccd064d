"""Questions put to the finished checkpoint through the engine: typed ones, and spoken ones in
voices that training never heard, to be answered and to be transcribed.

What `thinker` and `listen` measure on their own modules, measured on what users run: a chat
message, with a WAV file where the question is spoken; text out. Remarks outside the domain are
transcribed too. Called by `__main__.py`."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import soundfile

from recipes.nano import grammar, thinker, voices
from recipes.nano.report import gate, note, say
from recipes.nano.score import error_rate
from stretto import Engine
from stretto.models.qwen3_omni.family import TRANSCRIPTION

WANTED = 0.85
TYPED = 0.95
IN_FLIGHT = 8
WRITTEN = 0.15  # of the words of a question in the better voice, at most
SILENCES = (
    0.05,
    0.1,
    0.15,
    0.25,
    0.4,
)  # seconds before and after; what is understood depends on them a little


def message(samples: np.ndarray, around: float, *behind: dict[str, str]) -> list[dict[str, Any]]:  # type: ignore[type-arg]
    """What the user says, and what follows the sound."""
    silence = np.zeros(int(around * voices.RATE), np.int16)
    file = io.BytesIO()
    soundfile.write(file, np.concatenate((silence, samples, silence)), voices.RATE, format="WAV")
    sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": sound}, *behind]
    return [{"role": "user", "content": content}]


def texts(engine: Engine, asked: Sequence[Any]) -> list[str]:
    """What the model says to each, several of them at a time."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(lambda a: engine.chat(a, modalities=("text",)).text, asked))


def spoken(folder: Path, number: int, count: int, around: float, *behind: dict[str, str]) -> Any:
    """A chunk's first pairs, and the messages that ask them."""
    pairs = [a.pair for a in voices.chunk(number)[:count]]
    sounds = voices.load(folder, number)[:count]
    return pairs, [message(samples, around, *behind) for samples in sounds]


def answers(
    engine: Engine, who: str, pairs: list[grammar.Pair], asked: Sequence[Any]
) -> list[bool]:
    """Which of them are right."""
    found = texts(engine, asked)
    for pair, said in zip(pairs, found, strict=True):
        if said != pair.answer:
            say("heard", f"  {who}: {pair.question} | {said}")
    right = [said == pair.answer for pair, said in zip(pairs, found, strict=True)]
    say("heard", f"{who}: {mean(right):.3f} of {len(right)}")
    return right


def transcripts(engine: Engine, folder: Path, number: int, count: int, around: float) -> float:
    """Word error rate of what the model writes down of a chunk's first sounds."""
    prompt = {"type": "text", "text": TRANSCRIPTION.transcribe}
    pairs, asked = spoken(folder, number, count, around, prompt)
    found = [(p.question, t) for p, t in zip(pairs, texts(engine, asked), strict=True)]
    for pair in found:
        if error_rate([pair]) > 0:
            say("heard", "  wrote: " + " | ".join(pair))
    rate = error_rate(found)
    say("heard", f"chunk {number}: WER {rate:.3f} of {len(found)}, {around} s of silence")
    return rate


def run(work: Path, checkpoint: Path, folder: Path, count: int) -> None:
    right: dict[str, float] = {}
    between: dict[str, list[float]] = {}
    kinds: dict[str, list[bool]] = {}
    written: dict[str, list[float]] = {}  # word error rate: mean, least, most
    remarks: dict[str, float] = {}
    with Engine(checkpoint, device="cpu") as engine:
        quiz = thinker.quiz(count)
        typed = mean(answers(engine, "typed", quiz, [p.question for p in quiz]))
        for number, (_, voice) in enumerate(voices.HELD_OUT):
            shares = []
            for around in SILENCES:
                pairs, asked = spoken(folder, number, count, around)
                found = answers(engine, f"{voice}, {around} s of silence", pairs, asked)
                shares.append(mean(found))
                for pair, is_right in zip(pairs, found, strict=True):
                    kinds.setdefault(pair.kind, []).append(is_right)
            right[voice] = round(mean(shares), 4)
            between[voice] = [min(shares), max(shares)]
            errors = [transcripts(engine, folder, number, count, around) for around in SILENCES]
            written[voice] = [round(f(errors), 4) for f in (mean, min, max)]
            other = transcripts(engine, folder, voices.REMARKS + number, count, SILENCES[1])
            remarks[voice] = round(other, 4)
    gate("heard", f"typed questions: {typed}, wanted above {TYPED}", typed > TYPED)
    gate(
        "heard",
        f"spoken questions, held-out voices: {right}, {between}, wanted above {WANTED}",
        min(right.values()) > WANTED,
    )
    least = min(w[0] for w in written.values())
    gate("heard", f"WER of transcripts: {written}, remarks {remarks}, wanted below {WRITTEN}",
        least < WRITTEN)  # fmt: skip
    by_kind = {kind: round(sum(v) / len(v), 3) for kind, v in kinds.items()}
    note(work, "heard", typed=typed, right=right, between=between, kinds=by_kind, questions=count,
        transcripts=written, remarks=remarks)  # fmt: skip

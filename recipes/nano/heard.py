"""Questions put to the finished checkpoint through the engine: typed ones, and spoken ones in
voices that training never heard, to be answered and to be transcribed.

What `thinker` and `listen` measure on their own modules, measured on what users run: a chat
message, with a WAV file where the question is spoken; text out. Remarks outside the domain are
transcribed too. Called by `__main__.py`."""

from __future__ import annotations

import base64
import io
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


def transcripts(engine: Engine, folder: Path, number: int, count: int, around: float) -> float:
    """Word error rate of what the model writes down of a chunk's first sounds."""
    prompt = {"type": "text", "text": TRANSCRIPTION.transcribe}
    asked, pairs = voices.chunk(number)[:count], []
    for a, samples in zip(asked, voices.load(folder, number), strict=False):
        text = engine.chat(message(samples, around, prompt), modalities=("text",)).text
        pairs.append((a.pair.question, text))
        if error_rate(pairs[-1:]) > 0:
            say("heard", f"  {a.voice} wrote: {a.pair.question} | {text}")
    found = error_rate(pairs)
    say(
        "heard",
        f"{asked[0].voice}: WER {found:.3f} of {len(pairs)} {asked[0].pair.kind}, {around} s",
    )
    return found


def run(work: Path, checkpoint: Path, folder: Path, count: int) -> None:
    right: dict[str, float] = {}
    between: dict[str, list[float]] = {}
    kinds: dict[str, list[bool]] = {}
    written: dict[str, list[float]] = {}  # word error rate: mean, least, most
    remarks: dict[str, float] = {}
    with Engine(checkpoint, device="cpu") as engine:

        def answered(who: str, pair: grammar.Pair, asked: Any) -> bool:
            said = engine.chat(asked, modalities=("text",)).text
            if said != pair.answer:
                say("heard", f"  {who}: {pair.question} | {said}")
            return said == pair.answer

        pairs = thinker.quiz(count)
        typed = sum(answered("typed", p, p.question) for p in pairs) / len(pairs)
        say("heard", f"typed: {typed:.3f} of {len(pairs)}")
        for number in range(voices.HELD_CHUNKS):
            asked = voices.chunk(number)[:count]
            voice, shares = asked[0].voice, []
            for around in SILENCES:
                found = []
                for a, samples in zip(asked, voices.load(folder, number), strict=False):
                    found.append(answered(voice, a.pair, message(samples, around)))
                    kinds.setdefault(a.pair.kind, []).append(found[-1])
                shares.append(sum(found) / len(found))
                say(
                    "heard",
                    f"{voice}: {shares[-1]:.3f} of {len(found)}, {around} s of silence before and "
                    f"after",
                )
            right[voice] = round(sum(shares) / len(shares), 4)
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

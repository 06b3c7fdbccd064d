"""Questions put to the finished checkpoint through the engine: typed ones, and spoken ones in
voices that training never heard.

What `thinker` and `listen` measure on their own modules, measured on what users run: a chat
message, with a WAV file where the question is spoken; text out. Called by `__main__.py`."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from recipes.nano import grammar, thinker, voices
from recipes.nano.report import gate, note, say
from stretto import Engine

WANTED = 0.85
TYPED = 0.95
SILENCES = (
    0.05,
    0.1,
    0.15,
    0.25,
    0.4,
)  # seconds before and after; what is understood depends on them a little


def message(samples: np.ndarray, around: float) -> list[dict[str, Any]]:  # type: ignore[type-arg]
    silence = np.zeros(int(around * voices.RATE), np.int16)
    file = io.BytesIO()
    soundfile.write(file, np.concatenate((silence, samples, silence)), voices.RATE, format="WAV")
    sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]


def run(work: Path, checkpoint: Path, folder: Path, count: int) -> None:
    right: dict[str, float] = {}
    between: dict[str, list[float]] = {}
    kinds: dict[str, list[bool]] = {}
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
    gate("heard", f"typed questions: {typed}, wanted above {TYPED}", typed > TYPED)
    gate(
        "heard",
        f"spoken questions, held-out voices: {right}, {between}, wanted above {WANTED}",
        min(right.values()) > WANTED,
    )
    by_kind = {kind: round(sum(v) / len(v), 3) for kind, v in kinds.items()}
    note(work, "heard", typed=typed, right=right, between=between, kinds=by_kind, questions=count)

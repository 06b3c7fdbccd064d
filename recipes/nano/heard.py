"""Spoken questions put to the finished checkpoint through the engine, in the voices that training never heard.

What `listen` measures on its own modules, measured on what users run: a WAV file in a chat message, text out. Called
by `__main__.py`."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from recipes.nano import voices
from recipes.nano.report import gate, note, say
from stretto import Engine

WANTED = 0.85
AROUND = 0.15  # seconds of silence before and after


def message(samples: np.ndarray) -> list[dict[str, Any]]:  # type: ignore[type-arg]
    silence = np.zeros(int(AROUND * voices.RATE), np.int16)
    file = io.BytesIO()
    soundfile.write(file, np.concatenate((silence, samples, silence)), voices.RATE, format="WAV")
    sound = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]


def run(work: Path, checkpoint: Path, folder: Path, count: int) -> None:
    right: dict[str, float] = {}
    kinds: dict[str, list[bool]] = {}
    with Engine(checkpoint, device="cpu") as engine:
        for number in range(voices.HELD_CHUNKS):
            asked = voices.chunk(number)[:count]
            found = []
            for a, samples in zip(asked, voices.load(folder, number), strict=False):
                said = engine.chat(message(samples), modalities=("text",), temperature=0.0).text
                found.append(said == a.pair.answer)
                kinds.setdefault(a.pair.kind, []).append(found[-1])
                if not found[-1]:
                    say("heard", f"  {a.voice}: {a.pair.question} | {said}")
            right[asked[0].voice] = sum(found) / len(found)
            say("heard", f"{asked[0].voice}: {right[asked[0].voice]:.3f} of {len(found)}")
    gate("heard", f"spoken questions, held-out voices: {right}, wanted above {WANTED}", min(right.values()) > WANTED)
    by_kind = {kind: round(sum(v) / len(v), 3) for kind, v in kinds.items()}
    note(work, "heard", right=right, kinds=by_kind, questions=count)

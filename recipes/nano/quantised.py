"""What rounding the finished checkpoint's weights does to its answers: `stretto quantize` in each
format, then the same questions, typed and read aloud greedily, through the engine on a CPU.

The result goes to one file, format by format; what is there already is not made again. Called by
`__main__.py`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bench.harness.env import describe
from bench.harness.results import write
from recipes.nano import score, thinker
from recipes.nano.report import say
from stretto import Engine
from stretto.cli import main

FORMATS: dict[str, tuple[str, ...] | None] = {
    "bfloat16": None,
    "int4": ("--format", "int4"),
    "int4, talker too": ("--format", "int4", "--talker"),
    "int4 with zero points, talker too": ("--format", "int4", "--talker", "--asymmetric"),
    "fp8-block, talker too": ("--format", "fp8-block", "--talker"),
    "fp8-row, talker too": ("--format", "fp8-row", "--talker"),
}
TYPED = 200  # questions that training never saw


def run(
    checkpoint: Path,
    recogniser: Path,
    out: Path,
    names: Collection[str] = FORMATS,
    typed: int = TYPED,
    spoken: int | None = None,
) -> None:
    """`spoken`: so many sentences of the score; None: all."""
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"formats": {}}
    found["env"] = describe()
    listener = score.Recogniser(recogniser)
    for name, flags in FORMATS.items():
        if name in found["formats"] or name not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = checkpoint
            if flags is not None:
                folder = Path(scratch) / "quantised"
                words = ["quantize", str(checkpoint), str(folder), *flags, "--device", "cpu"]
                assert main(words) == 0, name
            found["formats"][name] = {
                "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
                **_measure(folder, listener, typed, spoken),
            }
        say("quantised", f"{name}: {found['formats'][name]}")
        write(out, found)


def _measure(
    checkpoint: Path, listener: score.Listener, typed: int, spoken: int | None
) -> dict[str, Any]:
    quiz, pairs = thinker.quiz(typed), score.questions()[:spoken]
    with Engine(checkpoint, device="cpu") as engine:
        texts = [engine.chat(p.question, modalities=("text",)).text for p in quiz]
        speech = score.asked(engine, "greedy", pairs, greedy_speech=True)
    return {
        "typed": sum(t == p.answer for t, p in zip(texts, quiz, strict=True)) / len(quiz),
        "word_error_rate": score.rate(speech, pairs, listener, None),
        "texts": speech.exact,
        "ended": sum(speech.ended or ()),
    }

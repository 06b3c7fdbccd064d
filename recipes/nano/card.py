"""The model card: what it is, what was measured, what it sounds like beside its teacher.

Numbers come from the reports that the steps left in WORK, pictures and WAV files from what `speak` wrote. Called by
`__main__.py`, after `score`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recipes.nano import corpus, score
from recipes.nano.audio import RATE, Floats
from recipes.nano.report import say
from recipes.nano.spectra import Spectrum

SHOWN = (20, 24, 28, 34, 13)  # of the fixed sentences
TOP_HZ = 8000
FLOOR_DB = 70
STEPS = ("thinker", "codec", "talker", "export", "speak", "score")
TEXT = """# Nano

A speaking checkpoint of {parameters:.1f} M parameters ({megabytes:.0f} MB) in the released Qwen3-Omni layout, made by
`recipes/nano` so that Stretto can be heard without a model hub. **It is a toy**: it repeats what it is asked to say,
answers a small closed domain (who it is, what a stretto is, small sums, counting, days and months, opposites, capitals,
short facts, a few jokes), and declines everything else. It has nothing of the quality of Qwen3-Omni, and none of its
weights. Its voice is synthetic: the teacher is festival with the HTS voice `cmu_us_slt_arctic_hts`.

## Measured

Word error rate, heard by Moonshine tiny; "second opinion": by pocketsphinx, on the last 20 sentences.

| | {columns} |
| --- |{dashes}
{rates}

"control" are random codes through the same code2wav. {ended}

| step | minutes on one H200 | reached |
| --- | --- | --- |
{steps}

## What it sounds like

Teacher, codec and model one above the other, up to {top} kHz. The files are `sounds/`.

{pictures}

## What went in

festival (MIT-like), the slt HTS voice and the CMU lexicon (BSD-like; neither is part of the weights), a word list from
SCOWL (permissive), text of our own. Not for: anything where a wrong or misheard answer matters. A human voice at a
microphone is not understood.
"""


def picture(waves: list[Floats], path: Path) -> None:
    """Spectrograms one above the other, dark on light, as PNG."""
    from PIL import Image

    spectrum = Spectrum(1024, 120, 10)
    bins = int(TOP_HZ / RATE * 1024)
    panels: list[npt.NDArray[np.float64]] = []
    for w in waves:
        a = spectrum(torch.from_numpy(np.ascontiguousarray(w, np.float32))[None])[0, :bins].numpy()
        level = 20 * np.log10(np.maximum(a / max(float(a.max()), 1e-9), 1e-6))
        panels.append(255 * np.clip(-level / FLOOR_DB, 0, 1)[::-1])
    width = max(p.shape[1] for p in panels)
    rows = [np.pad(p, ((0, 6), (0, width - p.shape[1])), constant_values=255) for p in panels]
    Image.fromarray(np.concatenate(rows).astype(np.uint8)).resize((width, 3 * 170)).save(path, optimize=True)


def write(work: Path, speech: Path, audio: Path, out: Path) -> None:
    """Into the checkpoint's folder: README.md, `sounds/` with pictures and WAV files."""
    sounds = out / "sounds"
    sounds.mkdir(parents=True, exist_ok=True)
    texts = corpus.chunk_texts(0)
    taught = [a.astype(np.float32) / 32768 for a in corpus.load(audio, 0)]
    _, coded = score.decoded(work, speech / "codes-of-codec.npz")
    _, spoken = score.decoded(work, speech / "codes-of-sampled.npz")
    shown = [i for i in SHOWN if i < min(map(len, (taught, coded, spoken)))]
    for i in shown:
        picture([taught[i], coded[i], spoken[i]], sounds / f"{i}.png")
        score.write_wav(sounds / f"{i}.wav", spoken[i])
    pictures = "\n\n".join(f'"{texts[i]}"\n\n![teacher, codec, model](sounds/{i}.png)' for i in shown)
    (out / "README.md").write_text(text(work, pictures), encoding="utf-8")
    say("card", f"{len(shown)} sentences shown")


def text(work: Path, pictures: str) -> str:
    """The card, from the reports that are there."""
    found: dict[str, dict[str, Any]] = {}
    for step in STEPS:
        path = work / f"report-{step}.json"
        found[step] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rates: dict[str, dict[str, float]] = found["score"].get("word_error_rate", {})
    columns = [c for c in ("fixed", "held-out", "all", "second opinion") if any(c in r for r in rates.values())]
    lines = [
        f"| {name} | " + " | ".join(f"{r[c]:.1%}" if c in r else "" for c in columns) + " |"
        for name, r in rates.items()
    ]
    steps = [
        f"| {step} | {r.get('minutes', '')} | {_reached(r)} |" for step, r in found.items() if r and step != "score"
    ]
    ended: dict[str, float] = found["speak"].get("ended", {})
    export = found["export"]
    return TEXT.format(
        parameters=export.get("parameters", 0) / 1e6,
        megabytes=export.get("bytes", 0) / 1e6,
        columns=" | ".join(columns),
        dashes=" --- |" * len(columns),
        rates="\n".join(lines),
        ended="Sentences that ended by themselves: " + ", ".join(f"{k} {v:.0%}" for k, v in ended.items()) + ".",
        steps="\n".join(steps),
        top=TOP_HZ // 1000,
        pictures=pictures,
    )


def _reached(report: dict[str, Any]) -> str:
    kept = {k: v for k, v in report.items() if isinstance(v, float | int) and k not in ("minutes", "skipped")}
    kept |= report.get("best", {})
    return ", ".join(f"{k} {v:.4g}" for k, v in kept.items())

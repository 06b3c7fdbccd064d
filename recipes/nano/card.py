"""The model card: what it is, what was measured, what it sounds like beside its teacher.

Numbers come from the reports that the steps left in WORK, pictures and WAV files from what `score
--wav` wrote. Called by `__main__.py`, after `score` and `heard`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from recipes.nano import score
from recipes.nano.audio import RATE, Floats
from recipes.nano.heard import SILENCES, WANTED, WRITTEN
from recipes.nano.report import gate, say
from recipes.nano.spectra import Spectrum

SHOWN = (
    41,
    43,
    154,
    185,
    210,
)  # of the score: two held-out sentences, three answers; short, for the files are shipped
TOP_HZ = 8000
FLOOR_DB = 70
PANEL = 120  # rows of one spectrogram
GREYS = 12  # few, so that the picture is small
LIMIT = 60_000_000  # bytes, card included
NOISE = 0.01  # of a word error rate
ROWS = ("teacher", "codec", "sampled", "greedy", "random codes", "random checkpoint")
COLUMNS = ("fixed", "held-out", "domain", "second opinion")
STEPS = {
    "thinker": ("steps",),
    "codec": ("steps", "hours_trained"),
    "talker-first": ("steps", "hours"),
    "talker": ("steps", "hours"),
    "listen-first": ("steps", "hours"),
    "listen": ("steps", "hours"),
    "transcribe": ("steps", "clips"),
}
"""Of the reports with minutes, what the card shows. A step that went on from earlier weights has
two reports."""
TEXT = """# Nano

A speaking checkpoint of {parameters:.1f} M parameters in the released Qwen3-Omni layout ({megabytes:.0f} MB), made by
`recipes/nano` so that Stretto can be heard without a model hub. **It is a toy.** It repeats what it is asked to say and
answers a small closed domain: greetings, who it is, what a stretto is, small sums, counting, days and months,
opposites, capitals, short facts, a few jokes. It declines everything else. It has nothing of the quality of Qwen3-Omni,
and none of its weights. Pictures and videos are accepted and mean nothing to it.

**The voice is synthetic**, and so is its teacher: festival with the HTS voice `cmu_us_slt_arctic_hts`. Questions may be
spoken, and those of the domain are written down on request: it learned them from the synthetic voices of flite and
espeak-ng. With a human at the microphone it is an experiment: nobody has measured that.

## Measured

All of it through Stretto's engine on a CPU, with the sampling of `generation_config.json`.

**What it says**: word error rate, as Moonshine tiny hears it; "second opinion": pocketsphinx, on the last 20 held-out
sentences. 40 fixed and 40 held-out sentences to repeat; {num_domain} answers of the domain, {each} of each kind.
"sampled" is what is shipped, each text said {draws} times with other draws; "greedy" leaves nothing to chance.

| | {columns} |
| --- |{dashes}
{rates}

"codec" is the teacher's speech through the codes; "random codes" and "random checkpoint" are controls of ten sentences
that must not be understood. Wanted: codec below 5 % (fixed), answers of the domain below 10 %, held-out sentences below
20 %. {missed}

How speech is drawn was chosen on these same sentences, of five ways (answers of the domain: 9.6 % to 11.4 %; the recipe
has them all). A point more or less means nothing: changes of 0.00003 in the samples are enough for the recogniser to
hear some sentences otherwise, and it takes "eight" for "ate".

Sentences that ended by themselves: {ended}. Texts that are right, before they are spoken: {exact}.

Answers of the domain by kind:

| | {kind_columns} |
| --- |{kind_dashes}
{kinds}

{aloud}

**What it understands**: answers that are right word for word, of {questions} questions each. Spoken questions are
asked with five lengths of silence around them, from {least} to {most} s: the mean, and the worst and the best of them.
Wanted: 95 % and 85 %{voices_missed}.

| typed, not seen in training | {voice_columns} |
| --- |{voice_dashes}
{voices}

`rms` (flite) and `f5` (espeak-ng) are voices that training never heard. By kind, both voices together:
{heard_kinds}.

**What it writes down** (`/v1/audio/transcriptions`, transcripts of the user in realtime sessions): word error rate of
the same spoken questions, with the worst and the best length of silence. Wanted: {written} in the better voice. Remarks
are what is said outside the domain. They are **not** written down as they were said: most become a question of the
domain, so such a transcript does not prove that the question was asked.

| | questions | remarks |
| --- | --- | --- |
{transcripts}

## Made in

| step | minutes | |
| --- | --- | --- |
{steps}

On one H200; `transcribe` on two shared cores of a CPU. "first" runs began from nothing, the ones below them went on from
their weights; hours are of speech.

## What it sounds like

Teacher, codec and model one above the other, up to {top} kHz; the model's speech as WAV files in `sounds/`.

{pictures}

## What went in

festival (MIT-like), the slt HTS voice and the CMU lexicon (BSD-like), flite (BSD-like) and espeak-ng (GPL): programs
and data that made speech to learn from; none of it is part of the weights. A word list from SCOWL (permissive, its
notice is in `recipes/nano/words.txt`), all text our own. The weights are licensed like the project (Apache-2.0).

Not for anything where a wrong or misheard answer matters.
"""


ALOUD = """**Texts read aloud** (`/v1/audio/speech`), heard in the same way: the held-out sentences one by one, three draws of
each, and in paragraphs of two to six; a text of {characters:,} characters; and twelve sentences with prices, dates,
times, units and addresses. A text is read sentence by sentence, as words.

| | {columns} |
| --- |{dashes}
{rows}"""
ALOUD_STEPS = {"aloud-before": "in one piece, as written", "aloud": "as shipped"}


def aloud(reports: dict[str, dict[str, Any]]) -> str:
    """What was measured of texts of several lengths, by the reports of `aloud`."""
    parts = [*reports["aloud"]["word_error_rate"]]
    names = {"long": f"{reports['aloud']['characters']:,} characters", "written": "with numbers"}
    rows = [_row(ALOUD_STEPS[step], reports[step]["word_error_rate"], parts) for step in reports]
    return ALOUD.format(
        characters=reports["aloud"]["characters"],
        columns=" | ".join(names.get(part, part) for part in parts),
        dashes=" --- |" * len(parts),
        rows="\n".join(rows),
    )


def picture(waves: list[Floats], path: Path) -> None:
    """Spectrograms one above the other, dark on light, as PNG."""
    from PIL import Image

    spectrum = Spectrum(1024, 160, 10)
    bins = int(TOP_HZ / RATE * 1024)
    panels: list[npt.NDArray[np.float64]] = []
    for w in waves:
        a = spectrum(torch.from_numpy(np.ascontiguousarray(w, np.float32))[None])[0, :bins].numpy()
        level = 20 * np.log10(np.maximum(a / max(float(a.max()), 1e-9), 1e-6))
        panels.append(255 * np.clip(-level / FLOOR_DB, 0, 1)[::-1])
    width = max(p.shape[1] for p in panels)
    rows = [np.pad(p, ((0, 6), (0, width - p.shape[1])), constant_values=255) for p in panels]
    whole = Image.fromarray(np.concatenate(rows).astype(np.uint8)).resize((width, 3 * PANEL))
    whole.quantize(GREYS).save(path, optimize=True)


def write(work: Path, wav: Path, out: Path) -> None:
    """Into the checkpoint's folder: README.md, `sounds/` with pictures and WAV files."""
    sounds = out / "sounds"
    sounds.mkdir(parents=True, exist_ok=True)
    texts = [p.answer for p in score.questions()]
    for i in SHOWN:
        waves = [
            soundfile.read(wav / name / f"{i}.wav", dtype="float32")[0]
            for name in ("teacher", "codec", "sampled")
        ]
        picture(waves, sounds / f"{i}.png")
        shutil.copy(wav / "sampled" / f"{i}.wav", sounds)
    pictures = "\n\n".join(f'"{texts[i]}" ([listen](sounds/{i}.wav))\n\n![teacher, codec, '
                           f'model](sounds/{i}.png)'
                           for i in SHOWN)  # fmt: skip
    (out / "README.md").write_text(text(work, pictures), encoding="utf-8")
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    say("card", f"{len(SHOWN)} sentences shown")
    gate(
        "card",
        f"{size / 1e6:.2f} MB with the card, wanted at most {LIMIT / 1e6:.0f}",
        size <= LIMIT,
    )


def text(work: Path, pictures: str) -> str:
    """The card, from the reports."""
    scored, heard, export = (_report(work, step) for step in ("score", "heard", "export"))
    rates: dict[str, dict[str, Any]] = scored["word_error_rate"]
    kinds = {name: r["kinds"] for name, r in rates.items() if "kinds" in r}
    shown = [*next(iter(kinds.values()))]
    steps = [(step, _report(work, step)) for step in STEPS]
    return TEXT.format(
        parameters=export["parameters"] / 1e6,
        megabytes=export["bytes"] / 1e6,
        num_domain=score.EACH * len(shown),
        each=score.EACH,
        draws=score.DRAWS,
        exact=scored["exact"],
        columns=" | ".join(COLUMNS),
        dashes=" --- |" * len(COLUMNS),
        rates="\n".join(_row(name, rates[name], COLUMNS) for name in ROWS if name in rates),
        missed=_missed(rates),
        ended=", ".join(f"{name} {count}" for name, count in scored["ended"].items()),
        kind_columns=" | ".join(shown),
        kind_dashes=" --- |" * len(shown),
        kinds="\n".join(_row(name, values, shown) for name, values in kinds.items()),
        aloud=aloud({step: _report(work, step) for step in ALOUD_STEPS}),
        questions=heard["questions"],
        least=SILENCES[0],
        most=SILENCES[-1],
        voice_columns=" | ".join(f"spoken by `{v}`" for v in heard["right"]),
        voice_dashes=" --- |" * len(heard["right"]),
        voices=f"| {heard['typed']:.1%} | "
        + " | ".join(_between(heard, v) for v in heard["right"])
        + " |",
        voices_missed="".join(
            f"; missed with `{v}`" for v, share in heard["right"].items() if share <= WANTED
        ),
        heard_kinds=", ".join(f"{kind} {share:.0%}" for kind, share in heard["kinds"].items()),
        written=f"{WRITTEN * 100:.0f} %",
        transcripts="\n".join(_written(heard, voice) for voice in heard["transcripts"]),
        steps="\n".join(
            f"| {step} | {r['minutes']} | " + ", ".join(f"{k} {r[k]:,}" for k in STEPS[step]) + " |"
            for step, r in steps
        ),
        top=TOP_HZ // 1000,
        pictures=pictures,
    )


def _report(work: Path, step: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / f"report-{step}.json").read_text(encoding="utf-8"))
    return found


def _row(name: str, values: dict[str, float], columns: Sequence[str]) -> str:
    return (
        f"| {name} | "
        + " | ".join(f"{values[c]:.1%}" if c in values else "" for c in columns)
        + " |"
    )


def _between(heard: dict[str, Any], voice: str) -> str:
    least, most = heard["between"][voice]
    return f"{heard['right'][voice]:.1%} ({least:.1%} to {most:.1%})"


def _written(heard: dict[str, Any], voice: str) -> str:
    mean, least, most = heard["transcripts"][voice]
    remarks = heard["remarks"][voice]
    return f"| `{voice}` | {mean:.1%} ({least:.1%} to {most:.1%}) | {remarks:.1%} |"


def _missed(rates: dict[str, dict[str, Any]]) -> str:
    missed = [f"{name}, {part}" for name, part, limit in score.GATES if rates[name][part] >= limit]
    close = [
        f"{name}, {part}"
        for name, part, limit in score.GATES
        if 0 < limit - rates[name][part] < NOISE
    ]
    text = f"Missed: {'; '.join(missed)}." if missed else "All three are met."
    return f"{text} Met by less than the noise: {'; '.join(close)}." if close else text

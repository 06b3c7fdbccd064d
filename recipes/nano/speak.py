"""Codes for the score: the 80 sentences of chunk 0 by the codec alone and by the whole talker, and domain answers.

Written as `codes-of-NAME.npz`: small, and decoded where they are scored. Called by `__main__.py`; `score.py` reads
them."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import numpy as np
import torch

from recipes.nano import codes, corpus, grammar, speech, talker, thinker
from recipes.nano.audio import HOP, RATE
from recipes.nano.export import GENERATION
from recipes.nano.graph import device_of
from recipes.nano.report import gate, note, say
from recipes.nano.tokens import Text

GREEDY = speech.Sampling()
_OTHERS = speech.Draw(1.0, 50, 0.8)  # fixed in the released model
SHIPPED = speech.Sampling(
    speech.Draw(GENERATION["talker_temperature"], int(GENERATION["talker_top_k"]), GENERATION["talker_top_p"]), _OTHERS
)
COOL = speech.Sampling(SHIPPED.first, speech.Draw(0.6, 50, 0.8))  # what `export --cool 0.6` gives
RELEASED = speech.Sampling(speech.Draw(0.9, 50), _OTHERS)


def domain_pairs(count: int = 40) -> list[grammar.Pair]:
    """Questions of the domain, most of them held-out combinations."""
    rng = Random("domain score")
    held = [p for p in grammar.domain() if p.held_out]
    return rng.sample(held, count * 2 // 3) + rng.sample(grammar.domain_kinds()["talk"], count // 3)


def write(
    work: Path, out: Path, device_name: str | None, count: int | None = None, limit: int = 130, file: str = talker.FILE
) -> None:
    started = time.monotonic()
    device, text = device_of(device_name), Text.open(work)
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    score, _ = codes.read(work, 0.2).split(corpus.chunk_texts(0))
    _save(out, "codec", score.texts, [score.codes[s : s + n] for s, n in zip(score.starts, score.frames, strict=True)])
    embedding = thinker.embedding(work, device)
    model = talker.load(work, text, device, file)
    rng = Random("speak")
    asked = [(grammar.say(rng, t).question, t) for t in score.texts][:count]
    answers = [(p.question, p.answer) for p in domain_pairs()][:count]
    ended: dict[str, float] = {}
    for name, pairs, sampling in (
        ("greedy", asked, GREEDY),
        ("sampled", asked, SHIPPED),
        ("hot", asked, RELEASED),
        ("cool", asked, COOL),
        ("domain", answers, SHIPPED),
    ):
        found, ends = speech.generate(model, embedding, text, pairs, sampling, limit)
        _save(out, name, [t for _, t in pairs], [c.numpy().astype(np.uint16) for c in found])
        ended[name] = sum(ends) / len(ends)
        seconds = sum(map(len, found)) * HOP / RATE
        say(
            "speak",
            f"{name}: {ended[name]:.3f} ended, {seconds:.1f} s of speech (codec: {score.hours * 3600:.1f}), "
            f"{time.monotonic() - started:.0f} s",
        )
    gate("speak", f"every sentence ends by itself: {ended}", min(ended.values()) == 1.0)
    note(work, "speak", ended=ended)


def _save(out: Path, name: str, texts: list[str], found: list[codes.Codes]) -> None:
    table = np.concatenate([c.reshape(-1, 16) for c in found])
    np.savez_compressed(out / f"codes-of-{name}.npz", codes=table, lengths=[len(c) for c in found], texts=texts)

"""Speech for the score: the 80 sentences of chunk 0 by the codec alone and by the whole talker, and domain answers.

Written as 16-bit samples in `.npz` files, one per source. Called by `__main__.py`; `score.py` reads them."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import numpy as np
import torch

from recipes.nano import codec, codes, corpus, grammar, speech, talker, thinker
from recipes.nano.graph import device_of
from recipes.nano.report import gate, note, say
from recipes.nano.tokens import Text

GREEDY = speech.Sampling()
WARM = speech.Sampling(0.5, 20, 0.5, 20)


def domain_pairs(count: int = 24) -> list[grammar.Pair]:
    """Questions of the domain, most of them held-out combinations."""
    rng = Random("domain score")
    held = [p for p in grammar.domain() if p.held_out]
    return rng.sample(held, count * 2 // 3) + rng.sample(grammar.domain_kinds()["talk"], count // 3)


def write(work: Path, out: Path, device_name: str | None) -> None:
    started = time.monotonic()
    device, text = device_of(device_name), Text.open(work)
    torch.manual_seed(0)
    decoder = codec.load_decoder(work, device)
    score, _ = codes.read(work, 0.2).split(corpus.chunk_texts(0))

    def save(name: str, texts: list[str], found: list[torch.Tensor]) -> None:
        waves = []
        for c in found:
            with torch.no_grad():
                wave = decoder(c.long().to(device).t()[None])[0, 0] if len(c) else torch.zeros(2400)
            waves.append((wave.cpu().numpy() * 32767).astype(np.int16))
        out.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(out / f"speech-{name}.npz", samples=np.concatenate(waves), lengths=[len(w) for w in waves], texts=texts)

    save("codec", score.texts, [torch.from_numpy(score.codes[s : s + n].astype(np.int64)) for s, n in zip(score.starts, score.frames, strict=True)])
    say("speak", f"codec done, {time.monotonic() - started:.0f} s")
    embedding = thinker.load(work, text, device).model.embed_tokens.weight.detach()
    model = talker.load(work, text, device)
    rng = Random("speak")
    asked = [(grammar.say(rng, t).question, t) for t in score.texts]
    answers = [(p.question, p.answer) for p in domain_pairs()]
    ended: dict[str, float] = {}
    for name, pairs, sampling in (("greedy", asked, GREEDY), ("sampled", asked, WARM), ("domain", answers, WARM)):
        found, ends = speech.generate(model, embedding, text, pairs, sampling)
        save(name, [t for _, t in pairs], found)
        ended[name] = sum(ends) / len(ends)
        say("speak", f"{name}: {len(found)} sentences, {ended[name]:.2f} ended, {time.monotonic() - started:.0f} s")
    gate("speak", f"every sentence ends by itself: {ended}", min(ended.values()) == 1.0)
    note(work, "speak", ended=ended)

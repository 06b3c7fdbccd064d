"""Free-running speech from the training modules, many sentences at once, without caches: for checks during a run.

The engine is what speaks for users; this is only as fast as a GPU makes recomputing everything. Called by
`__main__.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.nano import layout
from recipes.nano.shape import CODES, GROUPS
from recipes.nano.talker import Talker
from recipes.nano.tokens import Text


@dataclass(frozen=True, slots=True)
class Draw:
    """How one code is chosen. Temperature 0 takes the most likely."""

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        best = logits.topk(self.top_k, dim=-1)
        chances = (best.values / self.temperature).softmax(dim=-1)
        before = chances.cumsum(dim=-1) - chances  # of those more likely
        chosen = torch.multinomial(chances * (before < self.top_p), 1)
        return best.indices.gather(-1, chosen)[:, 0]


@dataclass(frozen=True, slots=True)
class Sampling:
    first: Draw = Draw()
    others: Draw = Draw()


@torch.no_grad()
def generate(
    model: Talker, embedding: Tensor, text: Text, asked: Sequence[tuple[str, str]], sampling: Sampling, limit: int = 130
) -> tuple[list[Tensor], list[bool]]:
    """(question, answer) -> codes [frames, 16] of each answer, and whether it ended by itself."""
    device = embedding.device
    config = text.config
    prompts = []
    for question, answer in asked:
        user = text.turn("user", text.encode(question))
        prompts.append(layout.example(config, user, text.opening, text.encode(answer), limit, "nano"))
    width = max(len(p.text) for p in prompts)
    count = len(prompts)
    texts = torch.zeros(count, width, dtype=torch.long, device=device)
    marks = torch.full((count, width), layout.NONE, dtype=torch.long, device=device)
    before = torch.full((count, width, GROUPS - 1), layout.NONE, dtype=torch.long, device=device)
    first = []  # the row that gives frame 0
    for i, p in enumerate(prompts):
        texts[i, : len(p.text)] = torch.from_numpy(p.text).long()
        marks[i, : len(p.mark)] = torch.from_numpy(p.mark).long()
        first.append(int((p.frame == 0).nonzero()[0][0]))
    row = torch.tensor(first, device=device)
    every = torch.arange(count, device=device)
    positions = torch.arange(width, device=device)[None].expand(count, width)
    codes = torch.zeros(count, limit, GROUPS, dtype=torch.long, device=device)
    ended = torch.full((count,), limit, device=device)
    suppressed = torch.arange(config.talker.text.vocab_size, device=device)
    suppressed = (suppressed >= CODES) & (suppressed != model.end)
    for j in range(limit):
        reach = int(row.max()) + 1
        x = model.inputs(embedding, texts[:, :reach], marks[:, :reach], before[:, :reach])
        hidden = model.model(x, positions[:, :reach], None)[every, row]
        logits = model.codec_head(hidden).masked_fill(suppressed, float("-inf"))
        code = sampling.first(logits)
        ended = torch.where((code == model.end) & (ended == limit), j, ended)
        code = torch.where(code == model.end, 0, code)
        frame = _frame(model, hidden, code, sampling)
        codes[:, j] = frame
        row = row + 1
        if j + 1 == limit or bool((ended < limit).all()):
            break
        marks[every, row] = frame[:, 0]
        before[every, row] = frame[:, 1:]
    lengths = ended.tolist()
    return [codes[i, :n].cpu() for i, n in enumerate(lengths)], [n < limit for n in lengths]


def _frame(model: Talker, hidden: Tensor, code: Tensor, sampling: Sampling) -> Tensor:
    """Code 0 and the 15 that follow. [N, 16]"""
    found = [code]
    table = model.code_predictor.tables()
    first = model.model.codec_embedding(code)
    others = torch.zeros(len(code), GROUPS - 2, first.shape[-1], device=code.device)
    for g in range(GROUPS - 1):
        logits = model.code_predictor(hidden, first, others)[:, g]
        found.append(sampling.others(logits))
        if g < GROUPS - 2:
            others[:, g] = F.embedding(found[-1] + g * CODES, table)
    return torch.stack(found, dim=1)

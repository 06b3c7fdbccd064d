"""Two further losses that teach the talker to read; nothing of them is in the checkpoint.

`where`: head 0 of some layers is to look at the text of the word that the frame is part of.
`phones`: what is said in the frame must follow from the talker's state. The teacher tells both
(`phones.py`). Called by `talker.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.nano.decoder import Decoder
from recipes.nano.festival import PHONES
from recipes.nano.phones import UNKNOWN


class Aids(nn.Module):
    def __init__(self, decoder: Decoder, hidden: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, 2 * len(PHONES), bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        layers = list(decoder.layers)
        # Not the first ones, which do not yet know what was said before, and not the last.
        self.watched = [layer.self_attn for layer in layers[len(layers) // 3 : -1]]
        for attention in self.watched:
            attention.watched = True

    def phones(self, hidden: Tensor, wanted: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """States [B, T, H], phones [B, T, 2] -> loss, share of right ones; where `there` and the
        phones are known."""
        logits = self.head(hidden).float().view(-1, len(PHONES))
        known = (there[..., None] & (wanted != UNKNOWN)).flatten()
        target = torch.where(known, wanted.flatten(), 0)
        wrong = F.cross_entropy(logits, target, reduction="none") * known
        right = (logits.argmax(dim=-1) == target) & known
        count = known.sum().clamp_min(1)
        return wrong.sum() / count, right.sum() / count

    def where(self, low: Tensor, high: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Columns [B, T] and what may be seen [B, 1, T, T] -> loss, share of attention on the
        word."""
        columns = torch.arange(low.shape[1], device=low.device)
        on = (columns >= low[..., None]) & (columns <= high[..., None]) & mask[:, 0]
        known = low >= 0
        count = known.sum().clamp_min(1)
        losses, shares = [], []
        for attention in self.watched:
            assert attention.seen is not None
            q, k = (x.float() for x in attention.seen)
            scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~mask[:, 0], -1e4)
            log = torch.logsumexp(scores.masked_fill(~on, -1e4), dim=-1) - torch.logsumexp(
                scores, dim=-1
            )
            losses.append((-log * known).sum() / count)
            shares.append((log.exp() * known).sum() / count)
        return torch.stack(losses).mean(), torch.stack(shares).mean()

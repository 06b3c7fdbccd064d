"""How likely the tokens of a step were, for requests that ask: log-softmax of the model's own
logits, before biases, masks, penalties and temperature.

The runner computes it after the step, from the hidden rows that the step left: outside of captured
graphs, for the rows that ask alone, on the stage's stream. The figures travel to the host with the
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stretto.layers.upload import to_device

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden rows [rows, hidden] -> logits [rows, vocabulary]."""
Scored = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a token, and the likeliest tokens of its place with theirs, the likeliest
first."""

# rows at once: a row of logits in float32 takes over half a MiB
SLICE = 16
# for what cannot come at all: infinity has no form in JSON
LOWEST = -9999.0


@dataclass(slots=True, eq=False)
class StepLogprobs:
    """Log-probabilities of those rows of one step whose requests ask for them."""

    # row of the step's tokens -> row here, and how many of the likeliest
    requested: dict[int, tuple[int, int]]
    # [rows, 1 + most]: of the token, then of the likeliest
    values: torch.Tensor
    # [rows, most]
    ids: torch.Tensor

    def to_host(self) -> StepLogprobs:
        """Begins the copy to pinned memory; complete when the step's own copy is."""

        def copy(t: torch.Tensor) -> torch.Tensor:
            return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)

        return StepLogprobs(self.requested, copy(self.values), copy(self.ids))

    def of(self, row: int) -> Scored | None:
        """Of one row of the step's tokens, once they are on the host; None if it did not ask."""
        if row not in self.requested:
            return None
        at, count = self.requested[row]
        own, *best = (max(v, LOWEST) for v in self.values[at, : 1 + count].tolist())
        return own, tuple(zip(self.ids[at, :count].tolist(), best, strict=True))


def score(
    head: Head, hidden: torch.Tensor, tokens: torch.Tensor, requested: Sequence[tuple[int, int]]
) -> StepLogprobs:
    """For rows of a step (their number, how many of the likeliest), from all its hidden rows and
    tokens [rows]."""
    largest = max(count for _, count in requested)
    rows = to_device([row for row, _ in requested], hidden.device, torch.int64)
    values, ids = [], []
    for some in torch.split(rows, SLICE):
        chances = torch.log_softmax(head(hidden[some]).float(), -1)
        # -1 marks numbers that went bad
        own = chances.gather(1, tokens[some].long().clamp(min=0)[:, None])
        best = chances.topk(largest, -1)
        values.append(torch.cat((own, best.values), 1))
        ids.append(best.indices)
    places = {row: (at, count) for at, (row, count) in enumerate(requested)}
    return StepLogprobs(places, torch.cat(values), torch.cat(ids))

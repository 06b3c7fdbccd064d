"""Comparing rows in bfloat16: how far they are off, and the same experts on both sides.

A router's close call falls either way by a rounding, and that row is then another row. So a
comparison takes the experts that one side chose (`chosen`) and makes the other side go to the same
ones (`Forced`); what is left is rounding, of which hardly any row may have more than the limit.
Used by the tests that run models and kernels in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from stretto.kernels.reference import moe

SHARE = 0.95
"""Of the rows must be within the limit."""
# added to the logits of the experts that were not chosen; small enough to survive a norm's factor
NEVER = -1e30


def row_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Each row's distance from what is wanted, as a share of that row's size."""
    found, wanted = found.double().flatten(0, -2), wanted.double().flatten(0, -2)
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def check_rows(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    check_errors(row_errors(found, wanted), limit)


def check_errors(errors: torch.Tensor, limit: float) -> None:
    """At least SHARE of the rows are within the limit. What is not a number is not."""
    within = float((errors <= limit).double().mean())
    worst = ", ".join(
        f"{q:.0%}: {float(errors.double().quantile(q)):.4f}" for q in (0.5, SHARE, 1.0)
    )
    assert within >= SHARE, (
        f"{within:.1%} of {errors.numel()} rows within {limit:.4f}; errors by share of rows: "
        f"{worst}"
    )


@contextmanager
def chosen(routers: list[Any] | None = None) -> Iterator[list[torch.Tensor]]:
    """The experts [rows, top_k] that each call of a router chooses, in our plain layers or a
    reference's modules."""
    ids: list[torch.Tensor] = []
    route = moe.route

    def plain(logits: torch.Tensor, top_k: int, norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
        found = route(logits, top_k, norm)
        ids.append(found[1].clone())
        return found

    hooks = [
        r.register_forward_hook(lambda _, __, out: ids.append(out[2].clone()))
        for r in routers or ()
    ]
    with patch.object(moe, "route", plain):
        yield ids
    for hook in hooks:
        hook.remove()


class Forced:
    """Makes passes go to given experts, whatever computes them. Static memory, so that graphs
    captured under it read what is given before each replay."""

    def __init__(
        self, layers: int, rows: int, experts: int, device: torch.device, in_parts: bool = False
    ) -> None:
        """`in_parts`: several passes take the rows one after the other; else each takes them from
        the first."""
        self.bias = torch.zeros(layers, rows, experts, device=device)
        self.in_parts, self.calls, self.start = in_parts, 0, 0

    def give(self, ids: list[torch.Tensor]) -> None:
        """One tensor [rows, top_k] per layer, for the passes from now on."""
        assert len(ids) == len(self.bias)
        self.calls = self.start = 0
        self.bias.zero_()
        for layer, chosen_ids in enumerate(ids):
            rows = self.bias[layer, : len(chosen_ids)]
            rows.fill_(NEVER).scatter_(1, chosen_ids.long(), 0.0)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """A router's logits [rows, experts or more columns] of the next call, with only the given
        experts left."""
        layer, rows = self.calls % len(self.bias), logits.shape[-2]
        bias = self.bias[layer, self.start : self.start + rows]
        self.calls += 1
        if self.in_parts and layer == len(self.bias) - 1:
            self.start += rows
        out = logits.clone()
        out[..., : len(bias), : bias.shape[1]] += bias.to(out.dtype)
        return out

    def experts_of(
        self, router: Any, _: Any, out: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """A forward hook for a reference's router."""
        logits = self.logits(out[0])
        return logits, *moe.route(logits, router.top_k, norm=True)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In all of our ways to route: plain layers, prompts, one decoding row, several."""
        from stretto.kernels.triton import experts, experts_many, grouped

        route, prompts, one, several = moe.route, grouped.route, experts.project, experts_many.route

        def parts(*args: Any) -> torch.Tensor:
            found = several(*args)  # sums in parts: the first takes the bias
            return torch.cat((self.logits(found[0])[None], found[1:]))

        with ExitStack() as stack:
            for module, name, ours in (
                (moe, "route", lambda logits, *rest: route(self.logits(logits), *rest)),
                (grouped, "route", lambda logits, *rest: prompts(self.logits(logits), *rest)),
                (experts, "project", lambda *args, **kwargs: self.logits(one(*args, **kwargs))),
                (experts_many, "route", parts),
            ):
                stack.enter_context(patch.object(module, name, ours))
            yield

"""Who goes next: the waiting queue and the split of a step's prefill rows. Pure policy, no
resources; called by the scheduler on the stage's loop thread.

Order is `StageRequest.order`: priority, then playback deadline, then arrival. Age overrides it: a
request that has been left out for more than `patience` steps goes before all that have not, the
longest left out first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

from stretto.stage.request import StageRequest

# the most urgent first
by_order = attrgetter("order")
by_age = attrgetter("since")


def next_waiting(
    waiting: Collection[StageRequest], step: int, patience: int
) -> StageRequest | None:
    """The head of the queue. Only the head may leave for a row, so no request overtakes one that
    does not fit yet, and a large one is served as soon as enough others have ended."""
    if not waiting:
        return None
    oldest = min(waiting, key=by_age)
    if step - oldest.since > patience:
        return oldest
    return min(waiting, key=by_order)


def aged_first(
    requests: list[StageRequest], step: int, patience: int
) -> tuple[list[StageRequest], int]:
    """Moves the requests left out for more than `patience` steps to the front; also says how many
    they are."""
    aged = [r for r in requests if step - r.since > patience]
    if not aged:
        return requests, 0
    aged.sort(key=by_age)
    return aged + [r for r in requests if step - r.since <= patience], len(aged)


def split(budget: int, wants: Sequence[int], least: int) -> list[int]:
    """How many rows each prefill may compute. In order, each takes what it wants, but no more than
    half of what is left (or `least`, if that is more) while others wait: a long prompt cannot keep
    a short one behind it waiting, and small leftovers are not ground to dust. What remains goes out
    again in order, so no row is wasted."""
    shares = [0] * len(wants)
    left = budget
    for i, want in enumerate(wants):
        last = i == len(wants) - 1
        shares[i] = min(want, left if last else min(left, max(left // 2, least)))
        left -= shares[i]
    for i, want in enumerate(wants):
        more = min(want - shares[i], left)
        shares[i] += more
        left -= more
    return shares

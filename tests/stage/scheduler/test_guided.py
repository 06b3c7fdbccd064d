"""A guided request runs one step at a time, its guide hears every token once, and others do not
wait for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from stretto.stage.request import RequestSpec
from stretto.stage.scheduler import Scheduler, SchedulerConfig, StepResult
from stretto.types import RequestId

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_rows=8, max_context=100, overlap_depth=2)


class RecordingGuide:
    """Notes what it is told."""

    error = None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self) -> None:
        return None

    def bias(self) -> None:
        return None

    def accept(self, token: int) -> None:
        self.tokens.append(token)


def names(batch: Any) -> set[str]:
    return {str(s.request.id) for s in batch.spans}


def test_only_the_guided_request_waits_for_its_own_token() -> None:
    guide, scheduler = RecordingGuide(), Scheduler(CONFIG)
    scheduler.submit(RequestSpec(RequestId("guided"), 5, guide=guide), [1, 2, 3])
    scheduler.submit(RequestSpec(RequestId("free"), 9), [1, 2, 3])
    flying, seen, token = [], [], 10
    while any(RequestId(id) in scheduler for id in ("guided", "free")) or flying:
        batch = scheduler.schedule()
        if batch is not None:
            seen.append(names(batch))
            flying.append(batch)
        if len(flying) == 2 or batch is None:
            oldest = flying.pop(0)
            token += 1
            scheduler.retire(oldest, StepResult([[token]] * len(oldest.spans)))
    assert seen[:2] == [
        {"guided", "free"},
        {"free"},
    ]  # the second was launched before the first came back
    assert all(not ("guided" in a and "guided" in b) for a, b in pairwise(seen))
    assert sum("free" in s for s in seen) == 9
    assert len(guide.tokens) == 5


def test_alone_it_goes_on_as_soon_as_its_token_is_known() -> None:
    guide, scheduler = RecordingGuide(), Scheduler(CONFIG)
    scheduler.submit(RequestSpec(RequestId("guided"), 3, guide=guide), [1, 2, 3])
    for token in (7, 8, 9):
        batch = scheduler.schedule()
        assert batch is not None
        assert (
            scheduler.schedule() is None
        )  # there is room for a second step, and nothing to put into it
        scheduler.retire(batch, StepResult([[token]]))
    assert guide.tokens == [7, 8, 9]

"""In which order the loop polls the stages of a host. Made by the host, for its loop; on the loop
thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.stage.host.loop import Pollable
from stretto.stage.stage import Stage


class PushReports:
    """Sends the reports of the stages that were polled before it."""

    due_ns: int | None = None

    def __init__(self, push: Callable[[], None]) -> None:
        self.push = push

    def poll(self) -> bool:
        self.push()
        return False


class StagePoll:
    """Polls one stage, through the host."""

    def __init__(self, stage: Stage, poll: Callable[[Stage], bool]) -> None:
        self.stage = stage
        self._poll = poll

    @property
    def cheap(self) -> bool:
        return self.stage.cheap

    @property
    def due_ns(self) -> int | None:
        return self.stage.due_ns

    def poll(self) -> bool:
        return self._poll(self.stage)


class PrefillFirst:
    """Polls the stage that takes prompts once more, in rounds that brought requests."""

    due_ns: int | None = None

    def __init__(self, first: Pollable) -> None:
        self.first = first
        self.admitted = False  # requests were admitted in this round

    def poll(self) -> bool:
        admitted = self.admitted
        self.admitted = False
        return admitted and self.first.poll()


def poll_order(
    stages: Sequence[StagePoll],
    prefill_first: PrefillFirst | None,
    push: Callable[[], None],
    endpoints: Pollable,
) -> list[Pollable]:
    """In data-flow order (the loop goes through them from the end): what is ready leaves before
    anything else is done, and a stage goes before the one that feeds it, whose launches may be
    long. The last one, if it is cheap to poll, comes once more behind each stage but the first, so
    that what these sent is launched behind their own steps at once. Only a new prompt goes to the
    first stage before the others: their part of it can be done while the first one's runs."""
    pushing = PushReports(push)
    last = [stages[-1]] if len(stages) > 1 and stages[-1].cheap else []
    body = stages[: len(stages) - len(last)]
    order: list[Pollable] = [pushing]
    for i, stage in enumerate(body):
        order += [*last, stage] if i or prefill_first is None else [stage, pushing]
    if prefill_first is not None and len(stages) > 1:
        order.append(prefill_first)
    return [*order, pushing, *last, endpoints]

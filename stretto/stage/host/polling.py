"""In which order a host polls its stages, checks its links and pushes its reports in a round."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from stretto.stage.stage import Stage


class Poll(Enum):
    """What a round does beside polling stages."""

    # what went wrong on links to other hosts
    LINKS = auto()
    # send the reports of the stages that were polled before
    PUSH = auto()
    # poll the first stage, if requests were admitted since the last round
    NEW_PROMPTS = auto()


def poll_order(stages: Sequence[Stage]) -> list[Stage | Poll]:
    """`stages` are in data-flow order. What is ready leaves before anything else is done, and a
    stage goes before the one that feeds it, whose launches may be long. The last one, if it is
    cheap to poll, comes once more behind each stage but the first, so that what these sent is
    launched behind their own steps at once. Only a new prompt goes to the first stage before the
    others: their part of it can be done while the first one's runs."""
    takes_prompts = not stages[0].receives
    last = [stages[-1]] if len(stages) > 1 and stages[-1].cheap else []
    others = stages[1 if takes_prompts else 0 : len(stages) - len(last)]
    order: list[Stage | Poll] = [Poll.LINKS, *last, Poll.PUSH]
    if takes_prompts and len(stages) > 1:
        order.append(Poll.NEW_PROMPTS)
    for stage in reversed(others):
        order += [stage, *last]
    if takes_prompts:
        order += [Poll.PUSH, stages[0]]
    return [*order, Poll.PUSH]

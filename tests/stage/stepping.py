"""Stages without a loop: how many of their steps are in flight, and waiting for the oldest."""

from __future__ import annotations

from stretto.stage.codec import CodecStage
from stretto.stage.stage import Stage


def in_flight(stage: Stage | CodecStage) -> int:
    return len(stage._steps)


def wait(stage: Stage | CodecStage) -> None:
    """Until the oldest step is back."""
    if stage._steps:
        oldest = stage._steps[0]
        copied = oldest[0].copied if isinstance(oldest, tuple) else oldest.copied
        if copied is not None:
            copied.synchronize()


def idle(stage: Stage | CodecStage) -> bool:
    """Nothing is held for anybody."""
    if isinstance(stage, CodecStage) and stage.num_free != stage.config.slots:
        return False
    return not stage._steps and not len(stage)

"""What stages count and time of themselves, on the loop thread; `host/stats.py` gives it names,
benchmarks read it too."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.observe.recorder import Histogram

KINDS = ("decode", "prefill", "mixed")
"""Steps that make answers go on (all of a vocoder's), that read prompts, or both."""


@dataclass(slots=True)
class StepStats:
    """Of the steps of one kind."""

    steps: int = 0
    # host time to schedule and launch
    launch: Histogram = field(default_factory=Histogram)
    # from the device's first work on a step to its last
    device: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class StageStats:
    steps: int = 0
    # computed: positions of sequences, or frames that a vocoder took
    rows: int = 0
    # confirmed
    tokens: int = 0
    # steps
    failed: int = 0
    # host time to retire
    retire_ns: int = 0
    # launches that were held back for a while
    held: int = 0
    # of these, launches that found the device without work: held back for too long
    late: int = 0
    # launches that waited for another stage's prompts
    held_for_prefill: int = 0
    # from a request's arrival to its first row in a batch; from a stream's first frames to its slot
    queue: Histogram = field(default_factory=Histogram)
    kinds: dict[str, StepStats] = field(
        default_factory=lambda: {kind: StepStats() for kind in KINDS}
    )

"""The scheduler's limits and habits, chosen once when a stage starts."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import Invalid


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    num_blocks: int
    # rows of KV per block
    block_size: int = 16
    # requests that can be in a batch
    max_rows: int = 128
    # requests never admitted yet; more are refused with Busy
    max_waiting: int = 256
    # prompt and answer of one request
    max_context: int = 32768
    # rows computed by one step
    max_step_tokens: int = 8192
    # of those, prefill rows while any request is answering: keeps the decodes' cadence
    prefill_chunk: int = 1024
    # the same while none is: so that the next stage can follow a long prompt
    lone_prefill_chunk: int = 1 << 30
    # prefills and decodes in one step; else they take turns, each in steps of their own
    mixed: bool = True
    # a prefill's share of a step is not cut below this for others' sake
    least_share: int = 64
    # steps in flight
    overlap_depth: int = 2
    prefix_cache: bool = True
    # steps that a ready request may be left out before it goes first
    patience: int = 64
    # a request that was preempted more often goes before all others
    max_preemptions: int = 2

    def __post_init__(self) -> None:
        least = {
            "num_blocks": (self.num_blocks, 1),
            "block_size": (self.block_size, 1),
            "max_rows": (self.max_rows, 1),
            "max_waiting": (self.max_waiting, 1),
            # one for decodes and one for prefill: neither starves
            "max_step_tokens": (self.max_step_tokens, 2),
            "prefill_chunk": (self.prefill_chunk, 1),
            "lone_prefill_chunk": (self.lone_prefill_chunk, 1),
            "least_share": (self.least_share, 1),
            "overlap_depth": (self.overlap_depth, 1),
            "patience": (self.patience, 0),
            "max_preemptions": (self.max_preemptions, 0),
        }
        for name, (value, bound) in least.items():
            if value < bound:
                raise Invalid(f"{name} must be at least {bound}, got {value}", param=name)

"""Metrics of one end of a link. Plain numbers, which the host's statistics read.

Every number has one writing thread (the courier's, or the stage loop's for queues), so plain
integers suffice; readers on other threads see a value that is at most one update old."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stretto.observe.recorder import Histogram, Recorder


@dataclass(slots=True)
class LinkMetrics:
    """One end of one link. The sending end fills `put`, the receiving one `take`, both the rest."""

    link: str
    chunks: int = 0
    bytes: int = 0  # of payload
    put: Histogram = field(
        default_factory=Histogram
    )  # from the first attempt to the end of the put, credits included
    take: Histogram = field(
        default_factory=Histogram
    )  # from a chunk's arrival to its hand-over, upload included
    queue: Histogram = field(default_factory=Histogram)  # between stage loop and courier
    # Of chunks with rows on a GPU: from the start of their copy until it was found to be done.
    # Sending: device to host, and the sending behind it; receiving: host to device.
    copy: Histogram = field(default_factory=Histogram)
    credits: int = 0  # when last read
    queued: int = 0  # chunks now between stage loop and courier
    stalls: int = 0  # chunks that found no credit (receiving: no room in the queue)
    purged: int = 0  # chunks dropped because their request was over
    errors: Counter[str] = field(default_factory=Counter)  # by class name
    recorder: Recorder = field(default_factory=Recorder)  # is given spans

    def hop(self, what: str, start: float, stop: float, size: int) -> None:
        """A chunk was put or taken; seconds of the monotonic clock."""
        self.recorder.span(
            f"{self.link} {what}", f"{size} bytes", int(1e9 * start), int(1e9 * stop)
        )

    def error(self, error: Exception) -> None:
        self.errors[type(error).__name__] += 1

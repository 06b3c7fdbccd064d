"""Where a chunk ends. One pure function, used by the live path and the finish path alike, so that a tail is never
sent twice and never lost. No torch; any thread.

Positions count from the start of the segment. With `first=1, each=8, ramp=2` the sizes are 1, 2, 4, 8, 8, ...:

    0 1   3       7               15              23
    |-|---|-------|---------------|---------------|--- tail --|(mark)
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import Invalid
from stretto.stage.request import Confirmed
from stretto.types import Mark, Span

__all__ = ["ChunkPolicy", "Confirmed", "cut"]


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """How a link cuts its rows: `first` rows, then sizes that grow by the factor `ramp` up to `each`.

    `ramp=None` goes from `first` to `each` at once. `limit` is for links whose receiver takes any size: where more
    than the next chunk is ready, up to `limit` rows go together (a prompt of 2,500 ids is not 2,500 chunks)."""

    first: int = 1
    each: int = 1
    ramp: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise Invalid(f"chunk policy: {name} must be {rule}", param=name)

        check(self.first >= 1, "first", "at least 1")
        check(self.each >= self.first, "each", "at least `first`")
        check(self.ramp is None or self.ramp >= 2, "ramp", "at least 2, or none")
        check(self.limit is None or self.limit >= self.each, "limit", "at least `each`, or none")

    def boundary(self, sent: int) -> int:
        """The first chunk boundary after position `sent`."""
        size, stop = self.first, self.first
        while stop <= sent and size < self.each:
            size = self.each if self.ramp is None else min(size * self.ramp, self.each)
            stop += size
        if stop <= sent:  # beyond the ramp all chunks are alike
            stop += ((sent - stop) // self.each + 1) * self.each
        return stop


def cut(policy: ChunkPolicy, sent: int, ready: int, mark: Mark) -> list[tuple[Span, Mark]]:
    """The chunks to send now, when rows up to `sent` have gone and rows up to `ready` are there.

    With `Mark.MORE` only whole chunks; with an end mark all that is left, and the mark on the last chunk (on an
    empty one, if nothing is left). Call it with an end mark once per segment."""
    if not 0 <= sent <= ready:
        raise ValueError(f"sent {sent}, but only {ready} ready")
    spans: list[Span] = []
    while (stop := policy.boundary(sent)) <= ready:
        if policy.limit is not None:
            stop = max(stop, min(ready, sent + policy.limit))
        spans.append(Span(sent, stop))
        sent = stop
    if mark is not Mark.MORE and (sent < ready or not spans):
        spans.append(Span(sent, ready))
    return [(span, mark if span is spans[-1] else Mark.MORE) for span in spans]

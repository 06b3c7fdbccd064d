"""What a stage reports of a request to the engine: how it failed, or when its outputs came and how
it ended. Used by stages, and `failed` by their host; on the loop thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stretto.errors import StrettoError
from stretto.messages.requests import Ended, Failed
from stretto.stage.request import Reason
from stretto.types import RequestId

MAX_MARKS = 8192

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class StageTimings:
    """When a request began here and when its outputs came; what its timeline is drawn from."""

    begun: float
    marks: list[float] = field(default_factory=list)
    # of the prompt
    chunks: list[float] = field(default_factory=list)
    cached: int = 0
    # pieces of media
    encoded: int = 0
    encoded_at: float = 0.0

    def mark_chunk(self, now: float) -> None:
        if len(self.chunks) < MAX_MARKS:
            self.chunks.append(now)

    def mark(self, now: float) -> None:
        if len(self.marks) < MAX_MARKS:
            self.marks.append(now)

    def deadline(self, each_s: float) -> float | None:
        """When a listener has played all outputs, who began with the first and plays each for
        `each_s`."""
        return self.marks[0] + each_s * len(self.marks) if self.marks else None

    def ended(self, id: RequestId, stage: str, reason: Reason) -> Ended:
        marks, chunks = tuple(self.marks), tuple(self.chunks)
        return Ended(
            id,
            stage,
            reason.value,
            self.begun,
            marks,
            self.cached,
            chunks,
            self.encoded,
            self.encoded_at,
        )


def failed(id: RequestId, stage: str, error: StrettoError) -> Failed:
    return Failed(id, stage, type(error).__name__, str(error), getattr(error, "param", None))

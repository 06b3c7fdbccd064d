"""What is asked of a card, and what its listeners get. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a load."""

    prompt: int
    text: int
    frames: int


@dataclass(slots=True)
class Heard:
    """What its listener got. Times in seconds; packets are (when, seconds of sound)."""

    arrived: float
    asked: Asked
    first_text: float | None = None
    packets: list[tuple[float, float]] = field(default_factory=list)
    end: float | None = None

    @property
    def first_audio(self) -> float | None:
        return self.packets[0][0] - self.arrived if self.packets else None

    @property
    def rtf(self) -> float:
        """Time until the last packet over what all of them sound."""
        return (self.packets[-1][0] - self.arrived) / sum(s for _, s in self.packets)

    @property
    def waited(self) -> float:
        """Seconds that a player who starts at once had nothing to play."""
        total, until = 0.0, self.packets[0][0]
        for when, seconds in self.packets:
            total += max(0.0, when - until)
            until = max(until, when) + seconds
        return total

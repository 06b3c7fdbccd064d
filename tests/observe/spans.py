"""Ids of a caller's trace, and a step of a timeline."""

from __future__ import annotations

from dataclasses import dataclass

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass(frozen=True)
class Step:
    lane: str
    name: str
    start: float
    stop: float

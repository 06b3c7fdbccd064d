"""Long work in parts. An encoder's run over minutes of video takes longer than listeners can wait,
and it shares a loop with their steps: so it is a generator that yields after each part of bounded
size, and returns its result in the end. Whoever has nothing else to do runs it through at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Parts = Generator[None, None, T]


def run_through(parts: Parts[T]) -> T:
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result

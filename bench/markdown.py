"""A table as Markdown. Used by the tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Nothing, if it would have no lines."""
    if not lines:
        return ""
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])

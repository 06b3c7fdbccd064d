"""A table as Markdown, and the words that its cells are made of. Used by the tables of
bench/report."""

from __future__ import annotations

from collections.abc import Sequence

NOT_YET = "not measured"
Line = tuple[str, ...]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Nothing, if it would have no lines."""
    if not lines:
        return ""
    rule = "|" + "---|" * len(head)
    return "\n".join(
        [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]
    )


def both(values: Sequence[float], digits: int) -> str:
    """Two measurements of the same side by side."""
    return " / ".join(f"{v:.{digits}f}" for v in values)


def many(streams: int) -> str:
    return f"{streams} stream{'s' * (streams > 1)}"


def count_of(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"

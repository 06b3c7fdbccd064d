"""The cost of a hop between two processes of a server, from the counters in its /metrics. No I/O.

Only Stretto's servers have these counters, if their stages are in several processes. The engine
reads them from its hosts once a second, so the last chunks of a run may not be counted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

LINE = re.compile(r"(stretto_link_\w+)\{([^}]*)\} (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')
PARTS = {
    "sender's queue": ("queue", "out"),
    "put": ("put", "out"),
    "take": ("take", "in"),
    "receiver's queue": ("queue", "in"),
}
"""The parts of a chunk's hop: each has a histogram at one end of the link. Copies off and onto the
device are in `put` and `take`."""

Series = dict[tuple[str, str, str], float]
"""Values by link, end and name."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One link during a run; means of a chunk."""

    link: str
    chunks: int
    bytes: float
    parts_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())


def read_series(page: str) -> Series:
    """Counters of links in a page of Prometheus text."""
    series: Series = {}
    for name, labels, value in LINE.findall(page):
        tags = dict(LABEL.findall(labels))
        if "le" not in tags and {"link", "end"} <= tags.keys():
            key = tags["link"], tags["end"], name.removeprefix("stretto_link_")
            series[key] = series.get(key, 0.0) + float(value)
    return series


def hops(before: Series, after: Series) -> Iterator[Hop]:
    """What went over each link between two readings."""
    for link in sorted({key[0] for key in after}):

        def grew(name: str, end: str, link: str = link) -> float:
            return after.get((link, end, name), 0.0) - before.get((link, end, name), 0.0)

        chunks = grew("chunks_total", "in")
        if chunks <= 0:
            continue
        parts = {}
        for part, (name, end) in PARTS.items():
            count = grew(f"{name}_seconds_count", end)
            parts[part] = grew(f"{name}_seconds_sum", end) / count if count > 0 else 0.0
        yield Hop(link, round(chunks), grew("bytes_total", "in") / chunks, parts)


def hop_line(hop: Hop) -> str:
    parts = ", ".join(f"{part} {1e6 * seconds:.0f}" for part, seconds in hop.parts_s.items())
    return (
        f"  {hop.link}: {hop.chunks} chunks of {hop.bytes / 1024:.1f} KiB; a chunk takes "
        f"{1e6 * hop.seconds:.0f} µs on average ({parts})"
    )


def to_json(hop: Hop) -> dict[str, Any]:
    return {**asdict(hop), "seconds": hop.seconds}

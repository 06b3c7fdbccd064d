"""A picture as SVG text, written by hand: small, without dependencies, readable on light and on
dark pages.

Used by pictures.py. Coordinates are pixels from the upper left corner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6e", "#b5539c", "#8a8f98", "#c94f4f", "#7a6bd1", "#4aa3b5")
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.small { font-size: 10.5px; } .title { font-size: 14px; font-weight: 600; } .dim { fill: #59636e; }
.line { stroke: #1f2328; } .grid { stroke: #59636e; stroke-opacity: 0.22; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .dim { fill: #9198a1; } .line { stroke: #e6edf3; } .grid { stroke: #9198a1; }
}
"""


@dataclass(slots=True)
class Picture:
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "start", style: str = "") -> None:
        kind = f' class="{style}"' if style else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        style: str = "line",
        width: float = 1.0,
        dash: str = "",
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke-width="{width:g}"{dashed}/>'
        )

    def bar(
        self, x: float, y: float, width: float, height: float, colour: str, about: str = ""
    ) -> None:
        """A rectangle; `about` shows when the pointer rests on it."""
        told = f"<title>{escape(about)}</title>" if about else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" '
            f'rx="1.5" '
            f'fill="{colour}" fill-opacity="0.85">{told}</rect>'
        )

    def dot(
        self,
        x: float,
        y: float,
        colour: str,
        radius: float = 4.5,
        about: str = "",
        hollow: bool = False,
    ) -> None:
        told = f"<title>{escape(about)}</title>" if about else ""
        fill = f'fill="none" stroke="{colour}" stroke-width="1.8"' if hollow else f'fill="{colour}"'
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {fill}>{told}</circle>'
        )

    def render(self) -> str:
        size = (
            f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" '
            f"{size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Scale:
    """From values [low, high] to pixels [start, stop]."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, about: int = 8) -> Iterable[float]:
        if self.log:
            first, last = (
                math.ceil(math.log10(self.low) - 1e-9),
                math.floor(math.log10(self.high) + 1e-9),
            )
            return [10.0**n for n in range(first, last + 1)]
        rough = (self.high - self.low) / about
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + step * i for i in range(count + 1)]

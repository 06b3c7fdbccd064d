"""A text in pieces: long ones cut into passages that end where sentences do, and texts that are still being written cut
where their tokens are certain. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_SENTENCE = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s)|[。！？]+[」』”’）]*|\n+""")
_CLAUSE = re.compile(r"[,;:](?=\s)|[，、；：]|\s+[-–—](?=\s)")
_SPACE = re.compile(r"\s+")
_CERTAIN = re.compile(r"(?<=\S) (?=[^\W\d_])")


def passages(text: str, most: int) -> list[str]:
    """The text in passages of at most `most` characters. They end with a sentence where one ends in time, else with a
    clause, a word, or wherever they must. Joined, they are the text, but for white space between them."""
    found, rest = [], text.strip()
    while len(rest) > most:
        end = _last(_SENTENCE, rest, most) or _last(_CLAUSE, rest, most) or _last(_SPACE, rest, most) or most
        found.append(rest[:end].strip())
        rest = rest[end:].strip()
    return [p for p in (*found, rest) if p]


def _last(mark: re.Pattern[str], text: str, most: int) -> int:
    """Where the last such mark within the first `most` characters ends; 0: there is none."""
    return max((m.end() for m in mark.finditer(text[: most + 1]) if m.end() <= most), default=0)


@dataclass(slots=True, eq=False)
class Writing:
    """Tokens of a text as it is written: those that no later letter can change. A word waits until the next begins, so
    the tokens are those of the whole text, however it is cut."""

    encode: Callable[[str], list[int]]
    _held: str = ""
    _begun: bool = False

    def push(self, piece: str) -> list[int]:
        self._held += piece
        if not self._begun:
            self._held = self._held.lstrip("\r\n")
        cuts = [m.start() for m in _CERTAIN.finditer(self._held)]
        if not cuts:
            return []
        self._begun = True
        ready, self._held = self._held[: cuts[-1]], self._held[cuts[-1] :]
        return self.encode(ready)

    @property
    def held(self) -> int:
        """Characters that wait."""
        return len(self._held)

    def finish(self) -> list[int]:
        rest, self._held = self._held, ""
        return self.encode(rest) if rest else []

"""A text in pieces: long ones cut into passages that end where sentences do, and texts that are
still being written cut where their tokens are certain. A text is cut into the same passages whether
it is there or comes. Imports no torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

_SENTENCE = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s)|[。！？]+[」』”’）]*|\n+""")
_CLAUSE = re.compile(r"[,;:](?=\s)|[，、；：]|\s+[-–—](?=\s)")
_SPACE = re.compile(r"\s+")
_ENDS = ((8, _SENTENCE), (11, _CLAUSE), (11.5, _SPACE))
"""What a passage ends with, and from which twelfth of its greatest length on."""
_CERTAIN = re.compile(r"(?<=\S) (?=[^\W\d_])")


def passages(text: str, most: int) -> list[str]:
    """The text in passages of at most `most` characters. They end with the first sentence that ends
    in their last third; if none does with a clause, a word, or wherever they must. Joined, they are
    the text, but for white space between them."""
    found, rest = [], text.strip()
    while end := passage_end(rest, most):
        found.append(rest[:end].strip())
        rest = rest[end:].strip()
    return [p for p in (*found, rest) if p]


def passage_end(text: str, most: int) -> int:
    """Where the first passage of a text ends, if more of the text follows; 0: it is not over yet.
    What comes behind the text cannot change it, so it does not matter how much of it is there."""
    head = text[: most + 1]
    ends = (
        m.end()
        for twelfths, mark in _ENDS
        for m in mark.finditer(head)
        if twelfths * most <= 12 * m.end() < 12 * len(head)
    )
    end = min(ends, default=most)
    return end if end < len(head) else 0


@dataclass(slots=True, eq=False)
class Coming:
    """A text that is still being written, passage by passage. One passage is read at a time, by one
    task at a time; who is cancelled while it waits loses nothing of the text."""

    text: AsyncIterator[str]
    most: int
    _here: str = ""  # of the passage that is being read, and of what follows it
    _ended: bool = False  # the whole text is here
    _pull: asyncio.Future[str | None] | None = field(default=None)

    async def passages(self) -> AsyncIterator[Callable[[], AsyncIterator[str]]]:
        """Each as what gives its pieces from the beginning, however often it is called. There is at
        least one."""
        try:
            yield self._pieces
            while await self._next():
                yield self._pieces
        finally:
            if self._pull is not None:
                self._pull.cancel()

    async def _pieces(self) -> AsyncIterator[str]:
        given = 0
        while True:
            end = self._end()
            ready = self._here[: end or self.most].rstrip()  # white space at its end is not spoken
            if len(ready) > given:
                yield ready[given:]
                given = len(ready)
            if end or not await self._more():
                return

    async def _next(self) -> bool:
        """Go on behind the passage that was read, all of it or not; False: there is nothing."""
        while not (end := self._end()):
            if not await self._more():
                return False
        self._here = self._here[end:].lstrip()
        while not self._here:
            if not await self._more():
                return False
        return True

    def _end(self) -> int:
        return passage_end(self._here, self.most)

    async def _more(self) -> bool:
        """Wait for another piece; False: there is none."""
        if self._ended:
            return False
        if self._pull is None:
            self._pull = asyncio.ensure_future(self._piece())
        piece = await asyncio.shield(self._pull)
        self._pull = None
        self._ended = piece is None
        self._here = (self._here + (piece or "")).lstrip()
        return not self._ended

    async def _piece(self) -> str | None:
        return await anext(self.text, None)


@dataclass(slots=True, eq=False)
class Writing:
    """Tokens of a text as it is written: those that no later letter can change. A word waits until
    the next begins, so the tokens are those of the whole text, however it is cut."""

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
        ready = self._held[: cuts[-1]]
        self._held = self._held[cuts[-1] :]
        return self.encode(ready)

    def finish(self) -> list[int]:
        rest = self._held
        self._held = ""
        return self.encode(rest) if rest else []

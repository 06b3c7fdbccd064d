"""A text in pieces: long ones cut into passages that end where sentences do, and texts that are
still being written cut where their tokens are certain. A text is cut into the same passages whether
it is there or comes. A passage that a model cannot read at once is cut further, when all of it is
there (`divide`). Imports no torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from stretto.preprocess.english import TITLES, as_words

_SENTENCE = re.compile(r"""(?<![.!?…])[.!?…]++["'”’)\]]*+(?=\s)|[。！？]+[」』”’）]*|\n+""")
_NO_END = re.compile(rf"\b(?:{'|'.join(map(re.escape, TITLES))}|[A-HJ-Z])\Z")
"""A full stop behind a title, or behind an initial, does not end a sentence."""
_CLAUSE = re.compile(r"[,;:](?=\s)|[，、；：]|\s+[-–—](?=\s)")
_SPACE = re.compile(r"\s+")
_WORD_START = re.compile(r"(?<=\S) (?=[^\W\d_])")
AT_ONCE = 8
"""Passages of a model that reads by sentences are so many times as long as its longest sentence, so
that they end where sentences do."""
LONGEST_TITLE = max(map(len, TITLES))
MIN_PART = 1 / 4
"""The smaller part of a text that is cut in two has at least so much of it."""
NORMALISERS = {"en": as_words}
"""Functions that write a text out as words, by its language."""


@dataclass(frozen=True, slots=True)
class Passages:
    """How a long text is read aloud: in passages of at most `max_chars` characters, which end with
    the first sentence that ends after `min_chars`.

    `sentence`: characters that the model reads at once; a sentence with more is cut again. 0: as
    many as a passage has. `normalise`: the language of texts whose numbers, signs and abbreviations
    are written out as words first."""

    max_chars: int
    min_chars: int
    sentence: int = 0
    normalise: str | None = None

    @classmethod
    def by_sentence(cls, sentence: int, normalise: str | None) -> Passages:
        return cls(AT_ONCE * sentence, sentence // 8, sentence, normalise)


def passages(text: str, rules: Passages) -> Iterator[str]:
    """The text in passages. One without the end of a sentence ends with a clause, a word, or
    wherever it must. Joined, they are the text, but for white space between them."""
    rest = text.strip()
    while end := passage_end(rest, rules):
        yield rest[:end].strip()
        rest = rest[end:].strip()
    if rest:
        yield rest


def passage_end(text: str, rules: Passages) -> int:
    """Where the first passage of a text ends, if more of the text follows; 0: it is not over yet.
    What comes behind the text cannot change it, so it does not matter how much of it is there."""
    longest = rules.max_chars
    head = text[: longest + 1]
    marks = (
        (_SENTENCE, rules.min_chars),
        (_CLAUSE, longest * 11 / 12),
        (_SPACE, longest * 23 / 24),
    )
    ends = (end for mark, first in marks for end in _ends(mark, head) if first <= end < len(head))
    end = min(ends, default=longest)
    return end if end < len(head) else 0


def _ends(mark: re.Pattern[str], text: str) -> Iterator[int]:
    for m in mark.finditer(text):
        at = m.start()
        if text[at] != "." or not _NO_END.search(text, max(0, at - LONGEST_TITLE), at):
            yield m.end()


def divide(text: str, max_chars: int, normalise: str | None) -> list[str]:
    """A passage as texts that are spoken one by one, of at most `max_chars` characters: as words,
    if it is to be normalised, and with long sentences cut at the clause nearest to their middle. A
    text without words has none."""
    if normalise is not None:
        text = NORMALISERS[normalise](text)
    return [part for part in halves(text.strip(), max_chars) if any(map(str.isalnum, part))]


def halves(text: str, max_chars: int) -> list[str]:
    if len(text) <= max_chars:
        return [text]
    cut = _middle(text)
    return [*halves(text[:cut].strip(), max_chars), *halves(text[cut:].strip(), max_chars)]


def _middle(text: str) -> int:
    """Where a text is best cut in two: where a sentence, else a clause, else a word ends."""
    for mark in (_SENTENCE, _CLAUSE, _SPACE):
        margin = MIN_PART * len(text)
        ends = [end for end in _ends(mark, text) if margin <= end <= len(text) - margin]
        if ends:
            return min(ends, key=lambda end: abs(2 * end - len(text)))
    return len(text) // 2


@dataclass(slots=True, eq=False)
class UnfinishedText:
    """A text that is still being written, passage by passage. One passage is read at a time, by one
    task at a time; a task that is cancelled while it waits loses nothing of the text."""

    text: AsyncIterator[str]
    rules: Passages
    _rest: str = ""  # of the passage that is being read, and of what follows it
    _ended: bool = False  # the whole text is here
    _next_piece: asyncio.Future[str | None] | None = None

    async def passages(self) -> AsyncGenerator[Callable[[], AsyncIterator[str]]]:
        """Each passage, as a function that iterates over its pieces from the beginning, whenever it
        is called. There is at least one."""
        try:
            yield self._pieces
            while await self._next():
                yield self._pieces
        finally:
            if self._next_piece is not None:
                self._next_piece.cancel()

    async def _pieces(self) -> AsyncIterator[str]:
        num_sent = 0
        while True:
            end = self._end()
            ready = self._rest[
                : end or self.rules.max_chars
            ].rstrip()  # white space at its end is not spoken
            if len(ready) > num_sent:
                yield ready[num_sent:]
                num_sent = len(ready)
            if end or not await self._more():
                return

    async def whole_passages(self) -> AsyncIterator[str]:
        """Each passage when all of it is there."""
        async with aclosing(self.passages()) as passages:
            async for pieces in passages:
                yield "".join([piece async for piece in pieces()])

    async def _next(self) -> bool:
        """Go on behind the passage that was read, all of it or not; False: there is nothing."""
        while not (end := self._end()):
            if not await self._more():
                return False
        self._rest = self._rest[end:].lstrip()
        while not self._rest:
            if not await self._more():
                return False
        return True

    def _end(self) -> int:
        return passage_end(self._rest, self.rules)

    async def _more(self) -> bool:
        """Wait for another piece; False: there is none."""
        if self._ended:
            return False
        if self._next_piece is None:
            self._next_piece = asyncio.ensure_future(self._piece())
        piece = await asyncio.shield(self._next_piece)
        self._next_piece = None
        self._ended = piece is None
        self._rest = (self._rest + (piece or "")).lstrip()
        return not self._ended

    async def _piece(self) -> str | None:
        return await anext(self.text, None)


@dataclass(slots=True, eq=False)
class IncrementalEncoder:
    """Tokens of a text as it is written: those that no later letter can change. A word waits until
    the next begins, so the tokens are those of the whole text, however it is cut."""

    encode: Callable[[str], list[int]]
    _pending: str = ""
    _started: bool = False

    def push(self, piece: str) -> list[int]:
        self._pending += piece
        if not self._started:
            self._pending = self._pending.lstrip("\r\n")
        cuts = [m.start() for m in _WORD_START.finditer(self._pending)]
        if not cuts:
            return []
        self._started = True
        ready = self._pending[: cuts[-1]]
        self._pending = self._pending[cuts[-1] :]
        return self.encode(ready)

    def finish(self) -> list[int]:
        rest = self._pending
        self._pending = ""
        return self.encode(rest) if rest else []

"""A text in pieces: long ones cut into passages that end where sentences do, and texts that are
still being written cut where their tokens are certain. A text is cut into the same passages whether
it is there or comes. A passage that a model cannot read at once is cut further, when all of it is
there (`divide`). Imports no torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from stretto.preprocess.english import TITLES, as_words

_SENTENCE = re.compile(r"""(?<![.!?…])[.!?…]++["'”’)\]]*+(?=\s)|[。！？]+[」』”’）]*|\n+""")
_NO_END = re.compile(rf"\b(?:{'|'.join(map(re.escape, TITLES))}|[A-HJ-Z])\Z")
"""A full stop behind a title, or behind an initial, does not end a sentence."""
_CLAUSE = re.compile(r"[,;:](?=\s)|[，、；：]|\s+[-–—](?=\s)")
_SPACE = re.compile(r"\s+")
_CERTAIN = re.compile(r"(?<=\S) (?=[^\W\d_])")
AT_ONCE = 8
"""Of a model that reads `spoken` characters at once, passages have up to so many times as many, so
that they end where sentences do."""
LONGEST_TITLE = max(map(len, TITLES))
MIN_PART = 1 / 4
"""The smaller part of a text that is cut in two has at least so much of it."""
NORMALISERS = {"en": as_words}
"""By the language of the text."""


@dataclass(frozen=True, slots=True)
class Passages:
    """How a long text is read aloud: in passages of at most `most` characters, which end with the
    first sentence that ends after `least`.

    `spoken`: characters that the model reads at once; a sentence with more is cut again. 0: as many
    as a passage has. `normalise`: the language of texts whose numbers, signs and abbreviations are
    written out as words first."""

    most: int
    least: int
    spoken: int = 0
    normalise: str | None = None

    @classmethod
    def by_sentence(cls, spoken: int, normalise: str | None) -> Passages:
        return cls(AT_ONCE * spoken, spoken // 8, spoken, normalise)


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
    most = rules.most
    head = text[: most + 1]
    marks = ((rules.least, _SENTENCE), (most * 11 / 12, _CLAUSE), (most * 23 / 24, _SPACE))
    ends = (end for least, mark in marks for end in _ends(mark, head) if least <= end < len(head))
    end = min(ends, default=most)
    return end if end < len(head) else 0


def _ends(mark: re.Pattern[str], text: str) -> Iterator[int]:
    for m in mark.finditer(text):
        at = m.start()
        if text[at] != "." or not _NO_END.search(text, max(0, at - LONGEST_TITLE), at):
            yield m.end()


def divide(text: str, most: int, normalise: str | None) -> list[str]:
    """A passage as texts that are spoken one by one, of at most `most` characters: as words, if it
    is to be normalised, and with long sentences cut at the clause nearest to their middle. None is
    left of a text without words."""
    if normalise is not None:
        text = NORMALISERS[normalise](text)
    return [part for part in halves(text.strip(), most) if any(map(str.isalnum, part))]


def halves(text: str, most: int) -> list[str]:
    if len(text) <= most:
        return [text]
    cut = _middle(text)
    return [*halves(text[:cut].strip(), most), *halves(text[cut:].strip(), most)]


def _middle(text: str) -> int:
    """Where a text is best cut in two: where a sentence, else a clause, else a word ends."""
    for mark in (_SENTENCE, _CLAUSE, _SPACE):
        least = MIN_PART * len(text)
        ends = [end for end in _ends(mark, text) if least <= end <= len(text) - least]
        if ends:
            return min(ends, key=lambda end: abs(2 * end - len(text)))
    return len(text) // 2


@dataclass(slots=True, eq=False)
class Coming:
    """A text that is still being written, passage by passage. One passage is read at a time, by one
    task at a time; who is cancelled while it waits loses nothing of the text."""

    text: AsyncIterator[str]
    rules: Passages
    _here: str = ""  # of the passage that is being read, and of what follows it
    _ended: bool = False  # the whole text is here
    _pull: asyncio.Future[str | None] | None = field(default=None)

    async def passages(self) -> AsyncGenerator[Callable[[], AsyncIterator[str]]]:
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
            ready = self._here[
                : end or self.rules.most
            ].rstrip()  # white space at its end is not spoken
            if len(ready) > given:
                yield ready[given:]
                given = len(ready)
            if end or not await self._more():
                return

    async def whole_passages(self) -> AsyncIterator[str]:
        """Each when all of it is there."""
        async with aclosing(self.passages()) as passages:
            async for pieces in passages:
                yield "".join([piece async for piece in pieces()])

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
        return passage_end(self._here, self.rules)

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

"""Answers that follow a grammar: which tokens may come next, by `llguidance`. The scheduler runs a guided request one
step at a time, since its next mask follows from its last token; the runner writes the mask to the request's device row.

Guides are used on the stage's loop thread. Grammars are compiled in a thread of their own: most take under a
millisecond, but a client may send one that takes a hundred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from stretto.errors import Invalid, StrettoError
from stretto.prompt.template import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.int32]
"""A bit for each token, the lowest first: 1 where it may come next."""
FUEL = 100_000
"""Work that a mask may take (about 7 ms); a grammar that needs more fails its request."""


class Guide(Protocol):
    @property
    def error(self) -> StrettoError | None:
        """It cannot go on: the answer ends with the next token, and has failed."""
        ...

    def mask(self) -> Bits | None:
        """The tokens that may come next, at least one; None: any."""
        ...

    def bias(self) -> Sequence[tuple[int, float]] | None:
        """What is added to the logits of some tokens; None: the same as before."""
        ...

    def accept(self, token: int) -> None:
        """A token has become certain."""
        ...


class GrammarGuide:
    """Of one request."""

    def __init__(self, matcher: LLMatcher, vocab: int, end: int) -> None:
        self.error: StrettoError | None = None
        self._matcher, self._end = matcher, end
        self._bits = np.zeros(-(-vocab // 32), np.int32)

    def mask(self) -> Bits:
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
        if self.error is not None or not self._bits.any():
            self._bits[:] = 0
            self._bits[self._end // 32] = np.uint32(1 << self._end % 32).astype(np.int32)
        return self._bits

    def bias(self) -> None:
        return None

    def accept(self, token: int) -> None:
        if self.error is None and token != self._end:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = Invalid(f"the grammar cannot be followed: {_words(self._matcher)}", "response_format")


class PenaltyGuide:
    """Of a request with a frequency or presence penalty, and of one that has a grammar (`inner`) besides: tokens that
    the answer already has become less likely. At most `most` tokens have a bias: the rarest lose theirs, of these
    the latest."""

    def __init__(
        self, frequency: float, presence: float, stated: Mapping[int, float], most: int, inner: Guide | None = None
    ) -> None:
        self._frequency, self._presence, self._stated, self._most = frequency, presence, stated, most
        self._inner = inner
        self._counts: Counter[int] = Counter()

    @property
    def error(self) -> StrettoError | None:
        return self._inner.error if self._inner is not None else None

    def mask(self) -> Bits | None:
        return self._inner.mask() if self._inner is not None else None

    def bias(self) -> list[tuple[int, float]]:
        if len(self._counts) + len(self._stated) > self._most:
            room = self._most - len(self._stated)
            self._counts = Counter(dict(sorted(self._counts.items(), key=lambda c: -c[1])[:room]))
        told = dict(self._stated)
        for token, count in self._counts.items():
            told[token] = told.get(token, 0.0) - count * self._frequency - self._presence
        return list(told.items())

    def accept(self, token: int) -> None:
        self._counts[token] += 1
        if self._inner is not None:
            self._inner.accept(token)


class Grammars:
    """Makes guides. Its tokenizer is made in its thread too, while the weights load: a large one takes two seconds."""

    def __init__(self, directory: Path, vocab: int, end: int) -> None:
        """`directory`: the checkpoint, for its tokenizer."""
        self._vocab, self._end = vocab, end
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._tokenizer: Future[LLTokenizer] = self._thread.submit(_tokenizer, directory, vocab, end)

    def compile(self, grammar: str, then: Callable[[], None]) -> Future[GrammarGuide]:
        """A guide for a grammar in llguidance's form of Lark. `then` is called on the thread when it is there, or has
        failed with `Invalid`."""
        made = self._thread.submit(self._compile, grammar)
        made.add_done_callback(lambda _: then())
        return made

    def _compile(self, grammar: str) -> GrammarGuide:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_lexer_fuel=FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer.result(), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise Invalid(f"the schema cannot be used: {_words(matcher)}", "response_format")
        return GrammarGuide(matcher, self._vocab, self._end)


def _tokenizer(directory: Path, vocab: int, end: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    # As text: a checkpoint may have its vocabulary in other files than tokenizer.json, which llguidance does not read.
    return LLTokenizer(Tokenizer.open(directory).plain.to_str(), n_vocab=vocab, eos_token=end)


def _words(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:300]

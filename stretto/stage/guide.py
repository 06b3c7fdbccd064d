"""Answers that follow a grammar: which tokens may come next, by `llguidance`. The scheduler runs a
guided request one step at a time, since its next mask follows from its last token; the runner
writes the mask to the request's device row.

Guides are used on the stage's loop thread. Grammars are compiled in a thread of their own
(`preprocess/grammars.py`), with their first masks: most take a millisecond or two. A server lets
none come here that takes more than its limits."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Thread, stack_size
from typing import Protocol

from stretto.errors import Bug, StrettoError
from stretto.preprocess.grammars import Bits, GrammarCompiler, GrammarGuide

log = logging.getLogger(__name__)

STACK = 64 << 20
"""Bytes of the compiling thread: it recurses along references, of which the longest grammar has
room for 5,000."""


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


class PenaltyGuide:
    """Of a request with a frequency or presence penalty, and of one that has a grammar (`inner`)
    besides: tokens that the answer already has become less likely. At most `most` tokens have a
    bias: the rarest lose theirs, of these the latest."""

    def __init__(
        self,
        frequency: float,
        presence: float,
        logit_bias: Mapping[int, float],
        most: int,
        inner: Guide | None = None,
    ) -> None:
        self._frequency = frequency
        self._presence = presence
        self._logit_bias = logit_bias
        self._most = most
        self._inner = inner
        self._counts: Counter[int] = Counter()

    @property
    def error(self) -> StrettoError | None:
        return self._inner.error if self._inner is not None else None

    def mask(self) -> Bits | None:
        return self._inner.mask() if self._inner is not None else None

    def bias(self) -> list[tuple[int, float]]:
        if len(self._counts) + len(self._logit_bias) > self._most:
            room = self._most - len(self._logit_bias)
            self._counts = Counter(dict(sorted(self._counts.items(), key=lambda c: -c[1])[:room]))
        bias = dict(self._logit_bias)
        for token, count in self._counts.items():
            bias[token] = bias.get(token, 0.0) - count * self._frequency - self._presence
        return list(bias.items())

    def accept(self, token: int) -> None:
        self._counts[token] += 1
        if self._inner is not None:
            self._inner.accept(token)


@dataclass(slots=True, eq=False)
class _Compile:
    grammar: str
    guide: Future[GrammarGuide]


class Grammars:
    """Makes guides, in a thread of its own: one after the other, clients taking turns. The compiler
    is opened there too, while the weights load."""

    def __init__(self, compiler: Callable[[], GrammarCompiler]) -> None:
        self.compiler: Future[GrammarCompiler] = Future()
        self._open = compiler
        # by client, the next in turn first
        self._waiting: dict[bytes, deque[_Compile]] = {}
        self._changed = Condition()
        self._closed = False
        self._thread = _start(self._run)

    def compile(
        self, grammar: str, then: Callable[[], None], client: bytes = b""
    ) -> Future[GrammarGuide]:
        """A guide for a grammar in llguidance's form of Lark. `then` is called when it is there,
        has failed with `Invalid` (both on the thread) or was cancelled. One that is cancelled
        before its turn is never compiled."""
        work = _Compile(grammar, Future())
        work.guide.add_done_callback(lambda _: then())
        with self._changed:
            self._waiting.setdefault(client, deque()).append(work)
            self._changed.notify()
        return work.guide

    def close(self) -> None:
        """Compile nothing more, and wait for what is being compiled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.compiler.set_result(self._open())
        except BaseException as e:  # noqa: BLE001  requests with a grammar hear of it; the others go on
            self.compiler.set_exception(e)
        while (work := self._next()) is not None:
            try:
                work.guide.set_result(self.compiler.result().compile(work.grammar))
            except StrettoError as e:
                work.guide.set_exception(e)
            except BaseException as e:
                # one request must not end the thread, and with it those of others
                log.error("a grammar cannot be compiled", exc_info=e)
                work.guide.set_exception(Bug("the grammar cannot be compiled"))

    def _next(self) -> _Compile | None:
        """The next in turn, which cannot be cancelled any more. None: it is closed."""
        with self._changed:
            while True:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return None
                client, turns = next(iter(self._waiting.items()))
                work = turns.popleft()
                running = work.guide.set_running_or_notify_cancel()
                if running or not turns:
                    del self._waiting[client]
                if running:
                    if turns:
                        # behind the others
                        self._waiting[client] = turns
                    return work


def _start(run: Callable[[], None]) -> Thread:
    """A daemon: a host that is over does not wait for a grammar."""
    before = stack_size(STACK)
    try:
        thread = Thread(target=run, name="grammars", daemon=True)
        thread.start()
    finally:
        stack_size(before)
    return thread

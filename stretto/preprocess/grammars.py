"""Grammars that answers must follow, compiled by `llguidance`: which tokens may come next, step by
step.

Schemas come from clients, and the work that one makes is out of all proportion to its length: forty
letters compile for a minute and take gigabytes, and a chain of references ends the process. No
limit of the library's own covers that. So a server has each grammar *checked* by a child of the
prompt worker, within limits of CPU time and memory (`check_apart`), before the stage compiles it
once more, which then takes as long as it took there. What remains are steps, on the loop of the
stage: each has its fuel, and a request all of them together a budget of CPU time (`StepBudget`).

Used by the prompt worker and by `stage/guide.py`. Imports no torch."""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stretto.errors import Invalid
from stretto.preprocess.pool.job_process import WorkerLimits, limit
from stretto.preprocess.template import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.int32]
"""A bit for each token, the lowest first: 1 where it may come next."""
FUEL = 100_000
"""Work that a mask may take in regular expressions (about 7 ms); a grammar that needs more fails
its request."""
MAX_SYMBOLS = 4096
"""The size of a compiled grammar: about 590 optional properties. The cost of a step grows with the
square of those that are possible at once, and no fuel of the library's covers that."""
BURST_S, EACH_S = 0.05, 0.002
"""CPU time that the steps of one request may take: the most at once, and what each adds. Usual
steps take 0.05 to 0.3 ms."""
TRIAL_STEPS, MAX_TRIAL_STEPS = 16, 256
"""Steps of the answer that is tried when a grammar is checked. The second, if they take no longer
than compiling did."""
STACK = 8 << 20
"""Bytes, where a grammar is checked: the compiler recurses along references."""
STRUCTURE = tuple('""""{[,:]} 0a')
"""A trial answer draws from these: they lead through a schema, other letters stay within one
string."""

MAX_PER_SENDER, MAX_SENDERS = 64, 1024
"""Verdicts that are remembered."""


@dataclass(slots=True)
class StepBudget:
    """CPU time that the steps of one request may still take."""

    clock: Callable[[], float] = time.thread_time
    left: float = BURST_S

    def spend(self, since: float, earned: float = 0.0) -> bool:
        """Pay for work that began at `since` and is done. False: the budget is used up."""
        self.left = min(BURST_S, self.left + earned) - (self.clock() - since)
        return self.left >= 0


class GrammarGuide:
    """Follows the answer of one request. Its first mask is computed when it is made."""

    def __init__(
        self, matcher: LLMatcher, vocab: int, end: int, budget: StepBudget | None = None
    ) -> None:
        self.error: Invalid | None = None
        self._matcher = matcher
        self._end = end
        self._budget = budget or StepBudget()
        self._bits = np.zeros(-(-vocab // 32), np.int32)
        self._compute()
        self._fresh = True  # the mask is that of the next token

    def mask(self) -> Bits:
        """The tokens that may come next, at least one."""
        if not self._fresh:
            began = self._budget.clock()
            self._compute()
            self._fresh = True
            self._spend(began)
        return self._bits

    def bias(self) -> None:
        return None

    def accept(self, token: int) -> None:
        """A token has become certain."""
        if self.error is None and token != self._end:
            began = self._budget.clock()
            self._matcher.consume_token(token)
            self._fresh = False
            self._check()
            self._spend(began, EACH_S)

    def _compute(self) -> None:
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
        if self.error is not None or not self._bits.any():
            self._only_end()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._fail(error_of(self._matcher))

    def _spend(self, began: float, earned: float = 0.0) -> None:
        if not self._budget.spend(began, earned) and self.error is None:
            self._fail("its steps take too long")

    def _fail(self, why: str) -> None:
        self.error = Invalid(f"the grammar cannot be followed: {why}", "response_format")
        self._only_end()

    def _only_end(self) -> None:
        self._bits[:] = 0
        self._bits[self._end // 32] = np.uint32(1 << self._end % 32).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class GrammarCompiler:
    """Compiles for one model. Used by one thread at a time; its guides may be used by others."""

    tokenizer: LLTokenizer
    vocab: int
    end: int  # the token that ends a text

    @classmethod
    def open(cls, directory: Path, vocab: int, end: int) -> GrammarCompiler:
        """`directory`: the checkpoint, for its tokenizer. A large one takes two seconds."""
        from llguidance import LLTokenizer

        # As text: a checkpoint may have its vocabulary in other files than tokenizer.json, which
        # llguidance does not read.
        text = Tokenizer.open(directory).plain.to_str()
        return cls(LLTokenizer(text, n_vocab=vocab, eos_token=end), vocab, end)

    def compile(self, grammar: str, budget: StepBudget | None = None) -> GrammarGuide:
        """A guide for a grammar in llguidance's form of Lark. `Invalid`: there is none."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            step_lexer_fuel=FUEL, max_grammar_size=MAX_SYMBOLS, verbose_errors=False
        )
        matcher = LLMatcher(
            self.tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits
        )
        if matcher.is_error():
            raise Invalid(f"the schema cannot be used: {error_of(matcher)}", "response_format")
        guide = GrammarGuide(matcher, self.vocab, self.end, budget)
        if guide.error is not None:
            raise guide.error
        return guide

    def check(self, grammar: str) -> None:
        """Compile it and try the first steps of an answer. Raises `Invalid`."""
        began = time.thread_time()
        guide, draw = self.compile(grammar), random.Random(0)
        until = 2 * time.thread_time() - began
        likely = [id for letter in STRUCTURE for id in self.tokenizer.tokenize_str(letter)[:1]]
        for step in range(MAX_TRIAL_STEPS):
            bits = guide.mask()
            if guide.error is not None:
                raise guide.error
            if step >= TRIAL_STEPS and time.thread_time() >= until:
                return
            token = draw.choice(
                [id for id in likely if bits[id // 32] >> id % 32 & 1] or _some_tokens(bits)
            )
            if token == self.end:
                return
            guide.accept(token)


def check_apart(compiler: GrammarCompiler, grammar: str, cpu_s: float, memory_mb: int) -> None:
    """`GrammarCompiler.check` within limits of this process, which is a child for this one job: the
    kernel ends it."""
    limit(WorkerLimits(math.ceil(cpu_s) + 1, memory_mb))  # the timer, which is exact, comes first
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a handler would run when the compiler is done
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    stderr_copy, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # the compiler says there that memory is out, and ends
    try:
        compiler.check(grammar)
    finally:
        os.dup2(stderr_copy, 2)


def why_ended(number: int, cpu_s: float, memory_mb: int) -> str:
    """What was wrong with a grammar, by the signal that ended its process (`check_apart`)."""
    if number == signal.SIGPROF:
        return f"it takes more than {cpu_s:g} s of CPU time to compile"
    if number == signal.SIGXCPU:
        return "it takes too much CPU time to compile"
    if number in (signal.SIGABRT, signal.SIGKILL):
        return f"it takes more than {memory_mb} MiB of memory to compile"
    return "its parts refer to each other too deeply to compile"


def error_of(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:300]


def _some_tokens(bits: Bits) -> list[int]:
    """Some of the tokens that may come next: those in the first word of the bits that has any."""
    at = int(np.flatnonzero(bits)[0])
    return [32 * at + b for b in range(32) if bits[at] >> b & 1]


@dataclass(slots=True)
class GrammarVerdicts:
    """How checks of grammars ended, so that a schema that is used again is not checked again. The
    prompt pool has one, on the event loop.

    Each client has its own: one that sends many grammars pushes out none of others, and cannot find
    out which ones they use."""

    per_client: int = MAX_PER_SENDER
    clients: int = MAX_SENDERS
    _by_client: OrderedDict[str, OrderedDict[bytes, str]] = field(
        default_factory=OrderedDict
    )  # the latest used last

    def find(self, client: str, grammar: bytes) -> str | None:
        """What is wrong with a grammar, empty if nothing; None: it is not known."""
        own = self._by_client.get(client)
        if own is None or grammar not in own:
            return None
        self._by_client.move_to_end(client)
        own.move_to_end(grammar)
        return own[grammar]

    def store(self, client: str, grammar: bytes, wrong: str) -> None:
        own = self._by_client.setdefault(client, OrderedDict())
        self._by_client.move_to_end(client)
        own[grammar] = wrong
        if len(own) > self.per_client:
            own.popitem(last=False)
        if len(self._by_client) > self.clients:
            self._by_client.popitem(last=False)


def digest_of(grammar: bytes) -> bytes:
    return blake2b(grammar, digest_size=16).digest()

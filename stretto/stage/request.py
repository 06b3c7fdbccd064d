"""A request as one stage sees it: what was asked (`RequestSpec`), where it stands (`Cursor`), what
it holds, and its state. The scheduler owns and moves these records; the runner and the stages read
them. All on the stage's loop thread. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NewType

from stretto.errors import Bug, StrettoError
from stretto.types import RequestId, Span

if TYPE_CHECKING:
    from stretto.stage.guide import Guide

RowId = NewType("RowId", int)
"""A request's slot in the runner's device state, held from admission until it ends or is
preempted."""
BlockId = NewType("BlockId", int)
"""A page of KV: `block_size` consecutive rows of one sequence."""
Confirmed = NewType("Confirmed", int)
"""A row count made by `Cursor.confirm` alone. Stages send only up to one of these, never up to a
plain int."""

OPAQUE = -1
"""The id of an input row that no token id describes. Such a row, and all after it, cannot be
prefix-cached."""


class State(Enum):
    # has work to do, but no row: never admitted, preempted or parked
    WAITING = "waiting"
    # nothing new can come out until input or downstream credit arrives
    STARVED = "starved"
    # has a row, and work to launch or results on their way
    RUNNING = "running"
    # over; `reason` says why
    DONE = "done"


class Reason(Enum):
    """Why a request ended."""

    # a stop token
    STOP = "stop"
    # `max_new` tokens were made
    LENGTH = "length"
    CANCELLED = "cancelled"
    # see `StageRequest.error`
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.STARVED, State.DONE}),
    State.STARVED: frozenset({State.WAITING, State.RUNNING, State.DONE}),
    State.RUNNING: frozenset({State.WAITING, State.STARVED, State.DONE}),
    State.DONE: frozenset(),
}


@dataclass(slots=True)
class Cursor:
    """The positions of a request, in rows from the start of its sequence. Every method checks, then
    moves all positions in one assignment, so that no reader ever sees half of a move.

    Row `r` takes token (or input row) `r` and gives an output: its payload and, from the last
    prompt row on, token `r + 1`. So the watermarks `confirmed <= launched` speak of rows whose
    output is certain, or is at least on its way:

        0 ....... confirmed ....... launched ....... known
           certain          in flight        input exists, not launched yet

    `filled` (rows with KV, written or being written) follows `launched`, but falls back when KV is
    lost: the rows in between are computed again, and their outputs are not published a second
    time."""

    # rows of input
    prompt: int = 0
    # rows whose input exists: the prompt, then sampled tokens (on the host, or still on the device)
    known: int = 0
    filled: int = 0
    launched: int = 0
    confirmed: int = 0

    def append(self, rows: int) -> None:
        """More rows of an open prompt."""
        if rows < 0 or self.known != self.prompt:
            raise Bug(f"cannot append {rows} rows to {self}")
        self.prompt = self.prompt + rows
        self.known = self.known + rows

    def launch(self, stop: int, samples: bool) -> None:
        """A step computes rows [filled, stop). If it samples, token `stop` will exist on the
        device."""
        if not self.filled < stop <= self.known or (samples and stop != self.known):
            raise Bug(f"cannot launch up to {stop}, samples={samples}: {self}")
        launched = self.launched if self.launched > stop else stop
        self.filled = stop
        self.launched = launched
        self.known = self.known + samples

    def confirm(self, stop: int) -> Confirmed:
        """The step that computed the rows up to `stop` retired and its outputs stand."""
        if stop > self.launched:
            raise Bug(f"cannot confirm {stop} rows: {self}")
        if stop > self.confirmed:
            self.confirmed = stop
        return Confirmed(self.confirmed)

    def reuse(self, rows: int) -> None:
        """The KV of the first `rows` rows was found in the cache: what they give is certain without
        a launch."""
        if self.filled or rows >= self.known:
            raise Bug(f"cannot reuse {rows} rows: {self}")
        launched = self.launched if self.launched > rows else rows
        confirmed = self.confirmed if self.confirmed > rows else rows
        self.filled = rows
        self.launched = launched
        self.confirmed = confirmed

    def disown(self, rows: int) -> None:
        """Undo a `reuse` that was not reported to anyone: only `rows` rows were certain before
        it."""
        if self.filled or rows > self.confirmed or self.launched != self.confirmed:
            raise Bug(f"cannot go back to {rows} rows: {self}")
        self.launched = rows
        self.confirmed = rows

    def vacate(self, rows: int = 0) -> None:
        """KV from row `rows` on is gone and will be computed again. Nothing that was launched is
        taken back."""
        if rows < self.filled:
            self.filled = rows

    def recall(self) -> None:
        """What is in flight does not count: rows whose output was never confirmed are to be
        launched again."""
        self.filled = min(self.filled, self.confirmed)
        self.launched = self.confirmed


@dataclass(frozen=True, slots=True)
class Salt:
    """Rows whose content token ids do not describe (media), and a digest of that content.

    Where the stage encodes media itself, the digest is the media's. A stage that is given another
    one's rows uses that stage's `prefix_keys` up to their end: the rows depend on text that it
    never sees."""

    span: Span
    digest: bytes


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a stage is asked to do for one request. Never changes."""

    id: RequestId
    # tokens
    max_new: int
    stop_ids: frozenset[int] = frozenset()
    # lower goes first
    priority: int = 0
    # Each decode step consumes a step input, such as a token of the text of another stage: the j-th
    # row after the prompt runs once the j-th is there, or once no more will come.
    paced: bool = False
    # The prompt's last row can be made from the device row, like a generated one. It then runs as a
    # decode of its own, in a captured step with others'.
    last_on_device: bool = False
    # media rows taken from the cache are useless without their kept payload
    needs_payload: bool = False
    # token ids describe generated rows (not so where a row is a frame of codes)
    cache_output: bool = True
    # picks what this allows; each step waits for the one before to be certain
    guide: Guide | None = None
    # its tokens come with how likely they were, and this many of the likeliest
    logprobs: int | None = None
    # by owner, and by what the family adds: equal prefixes meet only under an equal root
    cache_root: bytes = b""

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise Bug(f"{self.id}: max_new must be at least 1, got {self.max_new}")


_UNLIMITED = 1 << 62


@dataclass(slots=True, eq=False)
class StageRequest:
    """A request's living state in one stage. The scheduler alone changes it."""

    spec: RequestSpec
    # order of submission
    arrival: int
    # what the model's adapter needs beside the ids; the adapter's and the stage's
    input: Any = None
    state: State = State.WAITING
    # why it ended
    reason: Reason | None = None
    # set with Reason.FAILED
    error: StrettoError | None = None
    cursor: Cursor = field(default_factory=Cursor)

    # Input
    # all tokens known on the host: prompt rows, then confirmed tokens
    ids: list[int] = field(default_factory=list)
    # prompt rows whose input is not here yet, in order; those in the cache need none
    missing: Sequence[Span] = ()
    # the prompt is complete: its last row samples
    closed: bool = False
    # paced: those that arrived
    num_step_inputs: int = 0
    step_inputs_ended: bool = False
    # no credit to send
    blocked_downstream: bool = False
    # rows from here on must not be launched: input is missing, or they would exceed `max_new`
    limit: int = 0

    # Order
    # when the output sent so far runs out at the listener; None: nothing sent yet
    deadline: float | None = None
    # smaller goes first
    order: tuple[float, float, int] = (0.0, 0.0, 0)
    # step at which it was last in a batch or last changed state: its age
    since: int = 0
    num_preemptions: int = 0

    # Holdings
    row: RowId | None = None
    blocks: list[BlockId] = field(default_factory=list)
    # steps launched and not retired
    in_flight: int = 0
    # the latest step it was in
    last_step: int = -1
    # index of the token that waits in the device row as the next input; -1: none
    device_at: int = -1
    # bumped when what is in flight becomes worthless
    epoch: int = 0
    was_admitted: bool = False

    # Prefix cache
    salts: list[Salt] = field(default_factory=list)
    # ids and salts describe rows below this
    keyable: int = 0
    # of full blocks: (chained key, has media rows)
    keys: list[tuple[bytes, bool]] = field(default_factory=list)
    # leading blocks that may be shared: never written again
    published: int = 0
    # prompt rows that were found in the cache, in all
    num_cached: int = 0
    # It has picked a token, so all rows up to there are numbers. Before that nobody knows, and
    # blocks that held bad ones would make every later request with this beginning fail.
    proven: bool = False

    @property
    def id(self) -> RequestId:
        return self.spec.id

    @property
    def starved(self) -> bool:
        """Whether nothing new can come out before input or credit arrives."""
        if self.blocked_downstream:
            return True
        cursor = self.cursor
        if not self.closed and cursor.launched >= cursor.prompt:
            return True
        if self.missing and cursor.launched >= self.gap:
            return True
        if not self.closed:
            return False
        if not self.spec.paced or self.step_inputs_ended:
            return False
        # `known == launched`: the prompt was closed after all its rows had run; the last one runs
        # again to sample.
        supplied = cursor.prompt + self.num_step_inputs
        dry = cursor.launched >= supplied and cursor.known > cursor.launched
        return dry and cursor.launched < cursor.prompt + self.spec.max_new - 1

    def move_to(self, state: State, step: int) -> None:
        """The one place where a state changes."""
        if state not in TRANSITIONS[self.state]:
            raise Bug(f"{self.id}: no way from {self.state.name} to {state.name}")
        self.state = state
        self.since = step

    def refresh_order(self, max_preemptions: int) -> None:
        """Priority, then playback deadline (first packets before all others), then arrival. A
        request that was preempted too often goes before everything, by arrival, so that it cannot
        be preempted for ever."""
        if self.num_preemptions > max_preemptions:
            self.order = (float("-inf"), 0.0, self.arrival)
        else:
            deadline = float("-inf") if self.deadline is None else self.deadline
            self.order = (self.spec.priority, deadline, self.arrival)

    @property
    def gap(self) -> int:
        """The first row that is to be computed and lacks its input, or where its piece of rows
        begins."""
        filled = self.cursor.filled
        return next((span.start for span in self.missing if span.stop > filled), _UNLIMITED)

    def refresh_limit(self) -> None:
        cursor = self.cursor
        gap = self.gap if self.missing else _UNLIMITED
        if not self.closed:
            self.limit = min(cursor.prompt, gap)
            return
        # The last token of the answer is sampled by row `prompt + max_new - 2` and never fed back.
        supply = _UNLIMITED
        if self.spec.paced and not self.step_inputs_ended:
            supply = cursor.prompt + self.num_step_inputs
        self.limit = min(supply, cursor.prompt + self.spec.max_new - 1, gap)

    def add_input(self, ids: Iterable[int], salts: Sequence[Salt]) -> int:
        """Appends prompt rows (`OPAQUE` for rows without an id); the cursor is the caller's to
        move."""
        before = len(self.ids)
        self.ids.extend(ids)
        self.salts.extend(salts)
        if self.keyable == before:
            try:
                self.keyable = self.ids.index(OPAQUE, before)
            except ValueError:
                self.keyable = len(self.ids)
        return len(self.ids) - before

    def add_token(self, token: int) -> Reason | None:
        """Takes a confirmed token; says whether the request ends with it."""
        ids, spec = self.ids, self.spec
        if self.keyable == len(ids) and spec.cache_output:
            self.keyable += 1
        ids.append(token)
        if spec.guide is not None:
            spec.guide.accept(token)
        if token in spec.stop_ids:
            return Reason.STOP
        return Reason.LENGTH if len(ids) - self.cursor.prompt >= self.spec.max_new else None

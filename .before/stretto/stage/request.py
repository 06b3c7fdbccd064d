"""A request as one stage sees it: what was asked (`RequestSpec`), where it stands (`Cursor`), what it holds, and
its state. The scheduler owns and moves these records; the runner and the outbox read them. All on the stage's loop
thread. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from stretto.errors import Bug, StrettoError
from stretto.types import RequestId, SamplingParams, Span

RowId = NewType("RowId", int)
"""A request's slot in the runner's device state, held from admission until it ends, pauses or is preempted."""
BlockId = NewType("BlockId", int)
"""A page of KV: `block_size` consecutive rows of one sequence."""
Confirmed = NewType("Confirmed", int)
"""A row count made by `Cursor.confirm` alone. The outbox sends only up to one of these, never up to a plain int."""

OPAQUE = -1
"""The id of an input row that no token id describes. Such a row, and all after it, cannot be prefix-cached."""


class State(Enum):
    WAITING = "waiting"  # has work to do, but no row: never admitted, preempted, parked, or back from a pause
    STARVED = "starved"  # nothing new can come out until input or downstream credit arrives
    RUNNING = "running"  # has a row, and work to launch or results on their way
    PAUSED = "paused"  # segment done, session open: keeps its blocks (unless others need them), has no row
    DONE = "done"  # over; `reason` says why


class Reason(Enum):
    """Why a segment or a request ended."""

    STOP = "stop"  # a stop token or the stop rule
    LENGTH = "length"  # `max_new` tokens were made
    INTERRUPTED = "interrupted"  # cut short by the caller; the session goes on
    CANCELLED = "cancelled"
    FAILED = "failed"  # see `StageRequest.error`


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.STARVED, State.PAUSED, State.DONE}),
    State.STARVED: frozenset({State.WAITING, State.RUNNING, State.PAUSED, State.DONE}),
    State.RUNNING: frozenset({State.WAITING, State.STARVED, State.PAUSED, State.DONE}),
    # A paused request has no row, so it can only run again through admission.
    State.PAUSED: frozenset({State.WAITING, State.STARVED, State.DONE}),
    State.DONE: frozenset(),
}


@dataclass(slots=True)
class Cursor:
    """The positions of a request, in rows from the start of its sequence. Every method checks, then moves all
    positions in one assignment, so that no reader ever sees half of a move.

    Row `r` takes token (or input row) `r` and gives an output: its payload and, from the last prompt row on, token
    `r + 1`. So the watermarks `sent <= confirmed <= launched` speak of rows whose output has left the stage, is
    certain, or is at least on its way:

        0 ....... sent ....... confirmed ....... launched ....... known
          left the stage   certain           in flight        input exists, not launched yet

    `filled` (rows with KV, written or being written) follows `launched`, but falls back when KV is lost: the rows
    in between are computed again, and their outputs are not published a second time."""

    prompt: int = 0  # rows of input: all earlier segments with their answers, and this segment's prompt
    known: int = 0  # rows whose input exists: the prompt, then sampled tokens (on the host, or still on the device)
    filled: int = 0
    launched: int = 0
    confirmed: int = 0
    sent: int = 0

    def check(self) -> None:
        if not (
            0 <= self.sent <= self.confirmed <= self.launched <= self.known
            and 0 <= self.filled <= self.launched
            and self.prompt <= self.known
        ):
            raise Bug(f"cursor out of order: {self}")

    def append(self, rows: int) -> None:
        """More rows of an open prompt."""
        if rows < 0 or self.known != self.prompt:
            raise Bug(f"cannot append {rows} rows to {self}")
        self.prompt, self.known = self.prompt + rows, self.known + rows

    def launch(self, stop: int, samples: bool) -> None:
        """A step computes rows [filled, stop). If it samples, token `stop` will exist on the device."""
        if not self.filled < stop <= self.known or (samples and stop != self.known):
            raise Bug(f"cannot launch up to {stop}, samples={samples}: {self}")
        launched = self.launched if self.launched > stop else stop
        self.filled, self.launched, self.known = stop, launched, self.known + samples

    def confirm(self, stop: int) -> Confirmed:
        """The step that computed the rows up to `stop` retired and its outputs stand."""
        if stop > self.launched:
            raise Bug(f"cannot confirm {stop} rows: {self}")
        if stop > self.confirmed:
            self.confirmed = stop
        return Confirmed(self.confirmed)

    def send(self, rows: Confirmed) -> None:
        """The outputs of all rows below `rows` have left the stage."""
        if not self.sent <= rows <= self.confirmed:
            raise Bug(f"cannot send up to {rows}: {self}")
        self.sent = rows

    def reuse(self, rows: int) -> None:
        """The KV of the first `rows` rows was found in the cache: what they give is certain without a launch."""
        if self.filled or rows >= self.known:
            raise Bug(f"cannot reuse {rows} rows: {self}")
        launched = self.launched if self.launched > rows else rows
        confirmed = self.confirmed if self.confirmed > rows else rows
        self.filled, self.launched, self.confirmed = rows, launched, confirmed

    def disown(self, rows: int) -> None:
        """Takes back a `reuse` that nobody has heard of: only `rows` rows were certain before it."""
        if self.filled or not self.sent <= rows <= self.confirmed or self.launched != self.confirmed:
            raise Bug(f"cannot go back to {rows} rows: {self}")
        self.launched, self.confirmed = rows, rows

    def vacate(self, rows: int = 0) -> None:
        """KV from row `rows` on is gone and will be computed again. Nothing that was launched is taken back."""
        if rows < self.filled:
            self.filled = rows

    def rollback(self, keep: int) -> None:
        """Forget all tokens from index `keep` on, with whatever was launched for them: after a stop this drops the
        surplus, after an interruption the part of the answer that nobody heard. Rows whose output was never
        confirmed are to be launched again if they are still wanted."""
        if not 0 <= keep <= self.known:
            raise Bug(f"cannot keep {keep} tokens: {self}")
        confirmed = min(self.confirmed, keep)
        self.prompt, self.known, self.filled, self.launched, self.confirmed, self.sent = (
            min(self.prompt, keep),
            keep,
            min(self.filled, confirmed),
            confirmed,
            confirmed,
            min(self.sent, confirmed),
        )

    def extend(self, rows: int) -> None:
        """A new segment: everything so far becomes prompt, followed by `rows` new rows."""
        if rows < 0 or self.launched != self.confirmed:
            raise Bug(f"cannot extend by {rows} rows: {self}")
        self.prompt, self.known = self.known + rows, self.known + rows


@dataclass(frozen=True, slots=True)
class Salt:
    """Rows whose content the token ids do not tell (media), and a digest of that content.

    In the thinker the digest is the media's. In the talker it is the thinker's `prefix_key` up to the end of the
    media, because those rows depend on text that the talker never sees."""

    span: Span
    digest: bytes


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a stage is asked to do for one request. Never changes, except `max_new` with a new segment."""

    id: RequestId
    max_new: int  # tokens per segment
    stop_ids: frozenset[int] = frozenset()
    # Asked after each confirmed token; may read `request.ids`. With `host_history` nothing is in flight then;
    # without it the next token may be on its way when this says stop, and is discarded.
    stop_rule: Callable[[StageRequest], bool] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # lower goes first
    resumable: bool = False  # a segment's end pauses the request instead of ending it
    # Each decode step consumes one text token (the talker): the j-th row after the prompt runs once text j is
    # there, or once the text has ended.
    paced: bool = False
    # The prompt's last row can be made from the device row, like a generated one (the talker's: the codec's begin mark
    # and a text token). It then runs as a decode of its own, in a captured step with others'.
    last_on_device: bool = False
    host_history: bool = False  # the next step needs all earlier tokens on the host: never more than one in flight
    needs_payload: bool = False  # media rows taken from the cache are useless without their kept payload
    cache_output: bool = True  # generated rows are told by their token ids (not so in the talker: 16 codes and text)
    cache_root: bytes = b""  # by owner, and by speaker: equal prefixes meet only under an equal root

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise Bug(f"{self.id}: max_new must be at least 1, got {self.max_new}")
        if self.last_on_device and self.resumable:
            raise Bug(f"{self.id}: the device row of a later segment holds something else")


_UNLIMITED = 1 << 62


@dataclass(slots=True, eq=False)
class StageRequest:
    """A request's living state in one stage. The scheduler alone changes it."""

    spec: RequestSpec
    arrival: int  # order of submission
    state: State = State.WAITING
    reason: Reason | None = None  # why the last segment, or the request, ended
    error: StrettoError | None = None  # set with Reason.FAILED
    cursor: Cursor = field(default_factory=Cursor)

    # Input
    ids: list[int] = field(default_factory=list)  # all tokens known on the host: prompt rows, then confirmed tokens
    closed: bool = False  # the prompt is complete: its last row samples
    max_new: int = 0  # of this segment
    num_text: int = 0  # paced: text tokens that arrived in this segment
    text_ended: bool = False
    blocked_downstream: bool = False  # no credit to send
    limit: int = 0  # rows from here on must not be launched: input is missing, or they would exceed `max_new`
    resumable: bool = False

    # Order
    deadline: float | None = None  # when the output sent so far runs out at the listener; None: nothing sent yet
    order: tuple[float, float, int] = (0.0, 0.0, 0)  # smaller goes first
    since: int = 0  # step at which it was last in a batch or last changed state: its age
    num_preemptions: int = 0

    # Holdings
    row: RowId | None = None
    blocks: list[BlockId] = field(default_factory=list)
    in_flight: int = 0  # steps launched and not retired
    last_step: int = -1  # the latest step it was in
    device_at: int = -1  # index of the token that waits in the device row as the next input; -1: none
    epoch: int = 0  # bumped when what is in flight becomes worthless
    was_admitted: bool = False

    # Prefix cache
    salts: list[Salt] = field(default_factory=list)
    keyable: int = 0  # rows below this are told by ids and salts
    keys: list[tuple[bytes, bool]] = field(default_factory=list)  # of full blocks: (chained key, has media rows)
    published: int = 0  # leading blocks that may be shared: never written again
    # It has picked a token, so all rows up to there are numbers. Before that nobody knows, and blocks that held bad
    # ones would make every later request with this beginning fail.
    proven: bool = False

    @property
    def id(self) -> RequestId:
        return self.spec.id

    @property
    def answer(self) -> list[int]:
        """This segment's confirmed tokens."""
        return self.ids[self.cursor.prompt :]

    @property
    def starved(self) -> bool:
        """Whether nothing new can come out before input or credit arrives."""
        if self.blocked_downstream:
            return True
        cursor = self.cursor
        if not self.closed:
            return cursor.launched >= cursor.prompt
        if not self.spec.paced or self.text_ended:
            return False
        # `known == launched`: the prompt was closed after all its rows had run; the last one runs again to sample.
        dry = cursor.launched >= cursor.prompt + self.num_text and cursor.known > cursor.launched
        return dry and cursor.launched < cursor.prompt + self.max_new - 1

    def move_to(self, state: State, step: int) -> None:
        """The one place where a state changes."""
        if state not in TRANSITIONS[self.state]:
            raise Bug(f"{self.id}: no way from {self.state.name} to {state.name}")
        self.state, self.since = state, step

    def refresh_order(self, max_preemptions: int) -> None:
        """Priority, then playback deadline (first packets before all others), then arrival. A request that was
        preempted too often goes before everything, by arrival, so that it cannot be preempted for ever."""
        if self.num_preemptions > max_preemptions:
            self.order = (float("-inf"), 0.0, self.arrival)
        else:
            deadline = float("-inf") if self.deadline is None else self.deadline
            self.order = (self.spec.priority, deadline, self.arrival)

    def refresh_limit(self) -> None:
        cursor = self.cursor
        if not self.closed:
            self.limit = cursor.prompt
            return
        # The last token of the answer is sampled by row `prompt + max_new - 2` and never fed back.
        supply = _UNLIMITED if self.text_ended or not self.spec.paced else cursor.prompt + self.num_text
        self.limit = min(supply, cursor.prompt + self.max_new - 1)

    def add_input(self, ids: Iterable[int], salts: Sequence[Salt]) -> int:
        """Appends prompt rows (`OPAQUE` for rows without an id); the cursor is the caller's to move."""
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
        """Takes a confirmed token; says whether the segment ends with it."""
        ids, spec = self.ids, self.spec
        if self.keyable == len(ids) and spec.cache_output:
            self.keyable += 1
        ids.append(token)
        if token in spec.stop_ids:
            return Reason.STOP
        if spec.stop_rule is not None and spec.stop_rule(self):
            return Reason.STOP
        return Reason.LENGTH if len(ids) - self.cursor.prompt >= self.max_new else None

    def forget(self, keep: int, block_size: int) -> None:
        """Drops all tokens from index `keep` on, and what was derived from them."""
        del self.ids[keep:]
        del self.keys[keep // block_size :]
        self.keyable = min(self.keyable, keep)
        self.salts = [
            Salt(Span(salt.span.start, min(salt.span.stop, keep)), salt.digest)
            for salt in self.salts
            if salt.span.start < keep
        ]

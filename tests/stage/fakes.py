"""A runner without a model, and a driver that plays the stage around a scheduler.

`FakeRunner` keeps what a real one keeps on the device (block tables, KV slots, the last token of
each row) and obeys `Batch` to the letter. The value of a row depends on its input and on the values
of *all* rows before it, read through the block table, so a wrong table, a lost or foreign block, a
wrong input token or a wrong position changes every token that follows. `Driver` compares all that
comes out with `answer_of`, which knows nothing of batches or blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stretto.errors import StrettoError
from stretto.stage.request import OPAQUE, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.scheduler import (
    Batch,
    Outcome,
    RowJoin,
    Scheduler,
    SchedulerConfig,
    StepResult,
)
from stretto.types import RequestId, Span
from tests.stage.invariants import check_scheduler
from tests.stage.pools import clear_cache, num_held

VOCAB = 7  # small, so that prefixes meet and stops come soon
STOP = 0
_MASK = (1 << 61) - 1


def value_of(position: int, content: int, before: int) -> int:
    """What a row computes: from its place, its input and the sum of all values before it."""
    x = (
        position * 0x9E3779B97F4A7C15 + content * 0xC2B2AE3D27D4EB4F + before * 0x165667B19E3779F9
    ) & _MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & _MASK


def token_of(value: int) -> int:
    return (value >> 20) % VOCAB


@dataclass(slots=True)
class Story:
    """The true input of one request: what its rows contain, whether or not ids tell it."""

    extras: list[int] = field(
        default_factory=list
    )  # by row: what is not in the id (media, text), 0 for nothing
    prompt: int = 0  # rows of the prompt
    texts: list[int] = field(default_factory=list)  # paced
    answer: list[int] = field(default_factory=list)  # confirmed
    values: list[int] = field(default_factory=list)  # published outputs, by row
    history: list[int] = field(default_factory=list)  # ids of all prompt rows
    missing: list[Span] = field(default_factory=list)  # rows whose input has not come
    alone: bool = False  # the prompt's last row is a decode

    def content(self, position: int, token: int) -> int:
        if position < len(self.extras):
            return token + 1000 * self.extras[position]
        text = position - self.prompt
        return token + 1000 * (self.texts[text] if 0 <= text < len(self.texts) else 0)


def answer_of(story: Story, max_new: int, stop_ids: frozenset[int]) -> tuple[list[int], list[int]]:
    """The oracle: the answer to a story's current prompt, and the values of all rows that it
    takes."""
    values: list[int] = []
    total = 0
    tokens = list(story.history[: story.prompt])
    while True:
        for position in range(len(values), len(tokens)):
            values.append(value_of(position, story.content(position, tokens[position]), total))
            total = (total + values[-1]) & _MASK
        tokens.append(token_of(values[-1]))
        if tokens[-1] in stop_ids or len(tokens) - story.prompt == max_new:
            return tokens[story.prompt :], values


@dataclass(slots=True)
class FakeStep:
    batch: Batch
    tokens: list[int]
    payload: list[dict[int, int]]  # per span: row -> value, for the rows to publish
    blocks: set[int]  # all that the step reads or writes
    written: set[int]


class FakeRunner:
    def __init__(
        self,
        block_size: int,
        host_input: Callable[[RequestId, int], int],
        stories: dict[str, Story],
    ) -> None:
        self._size = block_size
        self._host_input = host_input
        self._stories = stories
        self.kv: dict[tuple[int, int], int] = {}
        self._tables: dict[int, list[int]] = {}
        self._owners: dict[int, StageRequest] = {}
        self._tokens: dict[int, tuple[int, int]] = {}  # row -> (index, token)
        self._flying: deque[FakeStep] = deque()

    def launch(self, batch: Batch) -> FakeStep:
        busy = {span.row for step in self._flying for span in step.batch.spans}
        used = {block for step in self._flying for block in step.blocks}
        assert len({join.row for join in batch.joined}) == len(batch.joined), "a row joined twice"
        for join in batch.joined:
            assert join.row not in busy, "a row joined under a step in flight"
            self._tokens.pop(join.row, None)
            self._owners[join.row], self._tables[join.row] = join.request, list(join.blocks)
        assert len({span.row for span in batch.spans}) == len(batch.spans) > 0
        assert batch.num_tokens == sum(span.stop - span.start for span in batch.spans)
        step = FakeStep(batch, [], [], set(), set())
        for index, span in enumerate(batch.spans):
            assert (index < batch.num_decodes) == (span.samples and span.stop == span.start + 1)
            assert self._owners[span.row] == span.request
            assert not used & set(span.new_blocks), "a block was given out under a step in flight"
            table = self._tables[span.row]
            assert 0 <= span.first_block <= len(table)
            table[span.first_block : span.first_block + len(span.new_blocks)] = span.new_blocks
            self._run(step, index)
        self._flying.append(step)
        return step

    def _run(self, step: FakeStep, index: int) -> None:
        span = step.batch.spans[index]
        table, story = self._tables[span.row], self._stories[span.request.id]
        before = sum(self._slot(table, p) for p in range(span.start)) & _MASK
        payload = {}
        for position in range(span.start, span.stop):
            if span.from_device and span.row in self._tokens:
                at, token = self._tokens[span.row]
                assert at == position == span.stop - 1, "the device row holds another token"
            elif span.from_device:
                assert story.alone, "there is nothing in the device row"
                assert position == span.stop - 1 == story.prompt - 1
                token = self._host_input(span.request.id, position)
            else:
                token = self._host_input(span.request.id, position)
            value = value_of(position, story.content(position, token), before)
            self.kv[table[position // self._size], position % self._size] = value
            step.written.add(table[position // self._size])
            before = (before + value) & _MASK
            if position >= span.publish_from:
                payload[position] = value
        step.payload.append(payload)
        step.blocks.update(table[: -(-span.stop // self._size)])  # the table may have a stale tail
        step.tokens.append(token_of(value) if span.samples else -1)
        if span.samples:
            self._tokens[span.row] = (span.stop, step.tokens[-1])

    def _slot(self, table: list[int], position: int) -> int:
        return self.kv[table[position // self._size], position % self._size]

    def retire(self, step: FakeStep) -> StepResult:
        assert self._flying.popleft() is step
        return StepResult([[token] for token in step.tokens])


class OrderCheck:
    """Who could run before a batch was made, to judge whom it left out."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        table = scheduler.table
        self._ready = {
            r.id: (r, table.step - r.since) for r in table.requests.values() if self._is_ready(r)
        }

    def _is_ready(self, request: StageRequest) -> bool:
        """Ready without a new block: only the budget can keep it out."""
        cursor = request.cursor
        rows = min(cursor.known, request.limit) - cursor.filled
        free = rows > 0 and cursor.filled < len(request.blocks) * self._config.block_size
        return free and request.state is State.RUNNING

    def check(self, batch: Batch) -> None:
        placed = {span.request.id for span in batch.spans}
        decodes = [s.request.id for s in batch.spans[: batch.num_decodes]]
        patience = self._config.patience
        for id, (request, age) in self._ready.items():
            if id in placed or request.state is not State.RUNNING:
                continue
            assert age <= patience + self._config.max_rows + self._config.overlap_depth, (
                "left out for too long"
            )
            cursor = request.cursor
            if cursor.filled + 1 == cursor.known and request.closed:
                for other in decodes:
                    was, other_age = self._ready.get(other, (None, 0))
                    if was is not None and other_age <= patience:
                        assert was.order < request.order, "a less urgent decode went first"


class Driver:
    """Plays the stage: feeds a scheduler, runs its batches, and checks everything that comes
    out."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.stories: dict[str, Story] = {}
        self.live: dict[str, StageRequest] = {}
        self.ended: dict[str, StageRequest] = {}
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(config.block_size, self._host_input, self.stories)
        self.flying: deque[FakeStep] = deque()
        self.batches: list[Batch] = []

    def _host_input(self, id: RequestId, position: int) -> int:
        request, story = self.live[id], self.stories[id]
        assert position < len(request.ids), "input asked for that the host does not know"
        assert not any(s.start <= position < s.stop for s in story.missing), (
            "input asked for that has not come"
        )
        token = request.ids[position]
        ids = story.history + story.answer
        if token == OPAQUE:
            return ids[position]
        assert token == ids[position]
        return token

    # -- input

    def submit(
        self,
        id: str,
        rows: Sequence[int] = (),
        *,
        closed: bool = True,
        media: Sequence[int] = (),
        missing: Sequence[Span] = (),
        **spec: object,
    ) -> StageRequest:
        """`media`: what the first rows contain beyond their ids; their salt follows from it."""
        story = Story(alone=bool(spec.get("last_on_device")))
        full = RequestSpec(RequestId(id), **{"max_new": 8, "stop_ids": frozenset({STOP}), **spec})  # type: ignore[arg-type]
        salts = self._add(story, rows, media)
        story.missing = list(missing)
        self.stories[id] = story
        try:
            request = self.scheduler.submit(
                full, list(rows), closed=closed, salts=salts, missing=list(missing)
            )
        except StrettoError:
            del self.stories[id]
            raise
        self.live[id] = request
        return request

    def append(
        self,
        id: str,
        rows: Sequence[int],
        *,
        media: Sequence[int] = (),
        opaque: bool = False,
        last: bool,
    ) -> None:
        salts = self._add(self.stories[id], rows, media)
        self.scheduler.append_rows(
            RequestId(id), len(rows) if opaque else list(rows), last=last, salts=salts
        )

    def text(self, id: str, token: int) -> None:
        self.stories[id].texts.append(token)
        self.scheduler.append_step_inputs(RequestId(id))

    def provide(self, id: str, at: int = 0) -> None:
        """The input of one of the missing spans has come."""
        story = self.stories[id]
        del story.missing[at]
        self.scheduler.set_missing(RequestId(id), list(story.missing))

    def cancel(self, id: str) -> None:
        assert self.scheduler.cancel(RequestId(id))
        self._compare(self.live[id], whole=False)
        self.ended[id] = self.live.pop(id)

    def _add(self, story: Story, rows: Sequence[int], media: Sequence[int]) -> list[Salt]:
        start = len(story.history)
        story.history.extend(rows)
        story.extras.extend([*media, *[0] * (len(rows) - len(media))])
        story.prompt = len(story.history)
        if not media:
            return []
        return [Salt(Span(start, start + len(media)), repr(list(media)).encode())]

    # -- steps

    def launch(self) -> Batch | None:
        order = OrderCheck(self.scheduler)
        only_decodes = self.scheduler.only_decodes_wait and not self.scheduler.num_waiting
        batch = self.scheduler.schedule()
        if batch is not None:
            order.check(batch)
            assert batch.decode_only or not only_decodes, (
                "a prompt in a batch that was told to be without"
            )
            for join in batch.joined:
                self._take_reused(join)
            self.batches.append(batch)
            self.flying.append(self.runner.launch(batch))
            for span in batch.spans:
                request = span.request
                assert request.in_flight <= self.config.overlap_depth
                assert request.cursor.known <= request.cursor.prompt + request.spec.max_new, (
                    "more than max_new launched"
                )
            assert len(self.flying) <= self.config.overlap_depth
        elif not self.flying:
            # Whoever was seated in this call and then lacks input keeps its blocks until the next
            # one.
            rests = any(r.state is State.STARVED and r.row is not None for r in self.live.values())
            assert rests or all(r.state is State.STARVED for r in self.live.values()), (
                "idle with work to do"
            )
        self._check()
        return batch

    def _take_reused(self, join: RowJoin) -> None:
        """Rows from the cache publish their kept payload; rows without one have their value looked
        up in the KV."""
        request, story, size = (
            join.request,
            self.stories[join.request.id],
            self.config.block_size,
        )
        if join.reused_from == join.filled:
            return
        assert len(story.values) == join.reused_from
        cached = {at: value for rows in join.payloads for at, value in rows.items()}
        for position in range(join.reused_from, join.filled):
            value = self.runner.kv[join.blocks[position // size], position % size]
            if request.spec.needs_payload and any(
                s.span.start <= position < s.span.stop for s in request.salts
            ):
                assert cached[position] == value
            story.values.append(value)

    def retire(
        self, error: StrettoError | None = None, victims: Sequence[str] = ()
    ) -> list[Outcome]:
        step = self.flying.popleft()
        result = self.runner.retire(step)
        if error is not None:
            hit = {
                s.request.id: error
                for s in step.batch.spans
                if not victims or s.request.id in victims
            }
            result = replace(result, errors=hit)
        outcomes = self.scheduler.retire(step.batch, result)
        for outcome in outcomes:
            self._take(outcome, step)
        self._check()
        return outcomes

    def _check(self) -> None:
        check_scheduler(self.scheduler)
        findable = set(self.scheduler.pool.index.values())
        for step in self.flying:
            assert not findable & step.written, "a block that others may read is being written"

    def _take(self, outcome: Outcome, step: FakeStep) -> None:
        request = outcome.request
        story = self.stories[request.id]
        start, payload = len(story.values), step.payload[outcome.at]
        assert all(position >= start for position in payload), "rows offered a second time"
        assert set(payload) >= set(range(start, outcome.confirmed)), "rows lost"
        story.values.extend(payload[p] for p in range(start, outcome.confirmed))
        if outcome.row:
            story.answer.append(outcome.row[0])
        for block in outcome.published:
            rows = {at: story.values[at] for at in range(block.start, block.stop)}
            self.scheduler.pool.attach(block.block, block.key, rows)
        if outcome.reason in (Reason.STOP, Reason.LENGTH):
            self._compare(request, whole=True)
        if request.state is State.DONE:
            self.ended[request.id] = self.live.pop(request.id)

    def _compare(self, request: StageRequest, whole: bool) -> None:
        """All that came out so far is what the oracle says."""
        story = self.stories[request.id]
        if not request.closed and not whole:
            assert not story.answer
            return
        tokens, values = answer_of(story, request.spec.max_new, request.spec.stop_ids)
        if whole:
            assert (story.answer, story.values) == (tokens, values), request.id
        else:
            assert story.answer == tokens[: len(story.answer)], request.id
            assert story.values == values[: len(story.values)], request.id

    def drain(self, limit: int = 10_000) -> None:
        """Runs until nothing can run: launches whenever possible, retires otherwise."""
        for _ in range(limit):
            if self.launch() is None:
                if not self.flying:
                    return
                self.retire()
        raise AssertionError(
            f"still busy after {limit} turns: {[r.state for r in self.live.values()]}"
        )

    def check_idle(self) -> None:
        assert not self.flying
        assert not self.live
        pool = self.scheduler.pool
        assert num_held(pool) == 0
        assert not self.scheduler.table.allocation.by_row
        assert self.scheduler.num_waiting == 0
        clear_cache(pool)
        assert pool.num_available == pool.num_blocks
        assert not pool.payloads, "payload kept for blocks that are gone"

"""Random lives of requests, with no model. After every step: blocks conserved, rows and states
consistent, cursors in order, every transition legal (the transition table raises otherwise),
decodes in order, nobody left out for too long. At the end: every answer and every published row
equals the oracle's, and nothing is held."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stretto.errors import Bug, Busy, Invalid
from stretto.stage.request import StageRequest
from stretto.stage.scheduler import SchedulerConfig
from stretto.types import RequestId, Span
from tests.stage.fakes import Driver
from tests.stage.invariants import check_scheduler

COMMON = [1, 2, 2, 1, 2, 1, 1, 1, 2, 2, 1, 2]
rows = st.builds(
    lambda n, tail: COMMON[:n] + tail, st.integers(0, 12), st.lists(st.integers(1, 2), max_size=3)
)
more = st.lists(st.integers(1, 2), max_size=5)
pick = st.integers(0, 1000)

configs = st.builds(
    SchedulerConfig,
    num_blocks=st.integers(5, 24),
    block_size=st.integers(1, 4),
    max_rows=st.integers(1, 5),
    max_waiting=st.just(6),
    max_context=st.just(40),
    max_step_tokens=st.integers(2, 16),
    prefill_chunk=st.integers(1, 8),
    least_share=st.integers(1, 4),
    overlap_depth=st.integers(1, 3),
    prefix_cache=st.booleans(),
    patience=st.integers(0, 5),
    max_preemptions=st.integers(0, 2),
)


flags = st.sampled_from(["late", "paced", "needs_payload", "open"])
life = st.fixed_dictionaries(
    {
        "rows": rows,
        "max_new": st.integers(1, 12),
        "priority": st.integers(0, 2),
        "flags": st.sets(flags, max_size=2),
        "cache_output": st.booleans(),
        "media": st.sampled_from([0, 0, 2, 5]),
    }
)


class Lives(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config)
        self.minted = 0

    def among(self, requests: list[StageRequest], index: int) -> str | None:
        return requests[index % len(requests)].id if requests else None

    @property
    def live(self) -> list[StageRequest]:
        return list(self.driver.live.values())

    # -- requests

    @rule(lives=st.lists(life, min_size=1, max_size=4))
    def submit(self, lives: list[dict[str, Any]]) -> None:
        for life in lives:
            self.submit_one(**life)

    def submit_one(
        self,
        rows: list[int],
        max_new: int,
        priority: int,
        flags: set[str],
        cache_output: bool,
        media: int,
    ) -> None:
        self.minted += 1
        closed = "open" not in flags
        config = self.driver.config
        fresh = sum(not r.was_admitted for r in self.live)
        total = len(rows) + max_new
        fits = (
            total <= config.max_context
            and -(-(total - 1) // config.block_size) <= config.num_blocks
        )
        try:
            self.driver.submit(
                f"r{self.minted}",
                rows,
                closed=closed,
                media=[7] * min(media, len(rows)),
                max_new=max_new,
                priority=priority,
                # A paced request's rows also depend on its text, which ids do not tell.
                cache_output=cache_output and "paced" not in flags,
                missing=[Span(2, 4), Span(4, 5), Span(7, 9)]
                if "late" in flags and len(rows) > 9
                else [],
                **dict.fromkeys(flags - {"open", "late"}, True),
            )
        except Busy:
            assert fresh >= config.max_waiting
        except Invalid:
            assert not fits or (closed and not rows)
        else:
            assert fits
            assert fresh < config.max_waiting

    @rule(index=pick, rows=more, media=st.integers(0, 3), opaque=st.booleans(), last=st.booleans())
    def append(self, index: int, rows: list[int], media: int, opaque: bool, last: bool) -> None:
        id = self.among([r for r in self.live if not r.closed], index)
        if id is None:
            return
        story = self.driver.stories[id]
        before = len(story.history)
        try:
            self.driver.append(
                id, rows, media=[8] * min(media, len(rows)), opaque=opaque, last=last
            )
        except Invalid:
            del story.history[before:], story.extras[before:]
            story.prompt = before

    @rule(index=pick, tokens=st.lists(st.integers(1, 9), max_size=4))
    def text(self, index: int, tokens: list[int]) -> None:
        paced = [r for r in self.live if r.spec.paced and not r.step_inputs_ended]
        id = self.among(paced, index)
        if id is None:
            return
        for token in tokens:
            self.driver.text(id, token)
        if not tokens:
            self.driver.scheduler.append_step_inputs(RequestId(id), 0, last=True)

    @rule(index=pick, at=st.integers(0, 2))
    def provide(self, index: int, at: int) -> None:
        """In any order."""
        late = [r for r in self.live if self.driver.stories[r.id].missing]
        id = self.among(late, index)
        if id is not None:
            self.driver.provide(id, at % len(self.driver.stories[id].missing))

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def cancel(self, index: int) -> None:
        self.driver.cancel(self.live[index % len(self.live)].id)

    @rule(index=pick, blocked=st.booleans())
    def block(self, index: int, blocked: bool) -> None:
        id = self.among(self.live, index)
        if id is not None:
            self.driver.scheduler.set_blocked(RequestId(id), blocked)

    @rule(index=pick, deadline=st.none() | st.floats(0, 10))
    def deadline(self, index: int, deadline: float | None) -> None:
        id = self.among(self.live, index)
        if id is not None:
            self.driver.scheduler.set_deadline(RequestId(id), deadline)

    # -- steps

    @rule(turns=st.lists(st.booleans(), min_size=10, max_size=40))
    def run(self, turns: list[bool]) -> None:
        for launch in turns:
            if launch:
                self.driver.launch()
            elif self.driver.flying:
                self.driver.retire()

    @precondition(lambda self: self.driver.flying)
    @rule(index=pick, kind=st.integers(0, 9))
    def trouble(self, index: int, kind: int) -> None:
        if kind < 6:
            return self.run([True, False] * 10)
        if kind < 8:
            return self.cancel(index) if self.live else None
        spans = self.driver.flying[0].batch.spans
        victims = [] if kind == 9 else [spans[index % len(spans)].request]
        self.driver.retire(Bug("injected"), victims)
        return None

    # -- the end

    def teardown(self) -> None:
        driver = self.driver
        for request in self.live:
            self.finish_input(request)
        work = sum(len(r.ids) + r.spec.max_new for r in self.live)
        before = len(driver.batches)
        driver.drain()
        # Rows may be computed again after a preemption, each request a bounded number of times.
        assert len(driver.batches) - before <= 20 + work * (3 + driver.config.max_preemptions)
        assert not driver.live
        check_scheduler(driver.scheduler)
        driver.check_idle()

    def finish_input(self, request: StageRequest) -> None:
        scheduler = self.driver.scheduler
        scheduler.set_blocked(request.id, False)
        while self.driver.stories[request.id].missing:
            self.driver.provide(request.id)
        if not request.closed:
            if request.cursor.prompt:
                scheduler.append_rows(request.id, 0, last=True)
            else:
                self.driver.cancel(request.id)
                return
        if request.spec.paced and not request.step_inputs_ended:
            scheduler.append_step_inputs(request.id, 0, last=True)


Lives.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLives = Lives.TestCase


def soak(seed: int, turns: int) -> Driver:
    """A long run under steady load with little trouble: what short random lives seldom reach."""
    rng = random.Random(seed)
    lives = Lives()
    depth, size = rng.randint(1, 3), rng.randint(1, 4)
    lives.start(
        config=SchedulerConfig(
            num_blocks=rng.randint(24 // size + 1, 100 // size),
            block_size=size,
            max_rows=rng.randint(1, 8),
            max_waiting=12,
            max_context=60,
            max_step_tokens=rng.choice([2, 5, 12, 64]),
            prefill_chunk=rng.choice([1, 4, 16]),
            least_share=rng.choice([1, 4]),
            overlap_depth=depth,
            prefix_cache=rng.random() < 0.8,
            patience=rng.choice([0, 4, 30]),
            max_preemptions=rng.randint(0, 2),
        )
    )
    names = ["late", "paced", "needs_payload", "open"]
    odd = rng.choice([0.0, 0.3, 0.8])  # how many requests are out of the ordinary
    for _ in range(turns):
        index, roll = rng.randrange(1000), rng.random()
        if roll < 0.10 and len(lives.live) < 12:
            flags = {name for name in names if rng.random() < odd / 2}
            life = {
                "rows": COMMON[: rng.randint(0, 12)] + [rng.randint(1, 2)] * rng.randint(0, 6),
                "max_new": rng.randint(1, 14),
                "priority": rng.choice([0, 0, 0, 1]),
                "flags": flags,
                "cache_output": rng.random() < 0.5,
                "media": rng.choice([0, 0, 3, 5]),
            }
            lives.submit(lives=[life])
        elif roll < 0.20:
            lives.text(index=index, tokens=[rng.randint(1, 9)] * rng.randint(0, 5))
            lives.append(
                index=index,
                rows=[1] * rng.randint(0, 3),
                media=rng.choice([0, 1]),
                opaque=False,
                last=rng.random() < 0.5,
            )
        elif roll < 0.25:
            lives.provide(index=index, at=rng.randrange(3))
            lives.block(index=index, blocked=rng.random() < 0.1)
            lives.deadline(index=index, deadline=rng.choice([None, rng.random()]))
        elif roll < 0.27 and lives.live and odd:
            lives.cancel(index=index)
        elif roll < 0.30 and lives.driver.flying:
            lives.trouble(index=index, kind=rng.randrange(10))
        else:
            lives.run(turns=[rng.random() < 0.6 for _ in range(4)])
    lives.teardown()
    return lives.driver


@pytest.mark.parametrize("seed", range(12))
def test_long_runs_under_load(seed: int) -> None:
    driver = soak(seed, turns=250)
    assert len(driver.ended) > 10

"""Prefill before the talker's decode: which listeners allow a wait and for how long, what a stage
does about it, and that first packets are no later for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config.engine import HostSettings, OverlapSwitches
from stretto.models.qwen3_omni.load import Models
from stretto.models.speech.pacing import FrameTiming, PacketPacing
from stretto.models.speech.prefill_priority import MAX_WAIT_S, MIN_BUFFER_S, hold_ns, slack_s
from stretto.stage.host.host import Host
from stretto.stage.host.loop import TICK_NS
from stretto.stage.request import RequestSpec, StageRequest, State
from stretto.types import RequestId
from tests.models.driven import Driven
from tests.stage.simulated import MS
from tests.stage.stepping import in_flight
from tests.stage.timed_desk import Timed

FRAME_S, OPENING_S = 0.08, 0.023


def paced(
    buffered_s: float | None, timing: FrameTiming | None = None, **changed: object
) -> tuple[StageRequest, PacketPacing]:
    """Of a listener who has so much buffered at second 10; None: nothing was sent yet."""
    timing = timing or FrameTiming(FRAME_S, OPENING_S)
    request = StageRequest(RequestSpec(RequestId("a"), 100), 0)
    request.state, request.closed = State.RUNNING, True
    for name, value in changed.items():
        setattr(request, name, value)
    pace = PacketPacing(1, 8, 2, timing)
    if buffered_s is not None:
        pace.packet_sent(1, 10.0)
        pace.first_sent = 10.0 + buffered_s - FRAME_S + OPENING_S
    return request, pace


def test_the_shortest_buffer_counts() -> None:
    assert slack_s([paced(0.9), paced(0.7), paced(3.0)], 10.0) == pytest.approx(0.7 - MIN_BUFFER_S)
    assert slack_s([paced(0.9), paced(0.2)], 10.0) < 0


def test_a_listener_without_a_first_packet_needs_frames_now() -> None:
    assert slack_s([paced(3.0), paced(None), paced(3.0)], 10.0) == 0


def test_requests_that_can_have_no_frame_now_do_not_count() -> None:
    """They wait for text, or their prompt is not complete."""
    others = [
        paced(None, state=State.STARVED),
        paced(0.1, state=State.STARVED),
        paced(None, closed=False),
    ]
    assert slack_s([paced(0.9), *others], 10.0) == pytest.approx(0.9 - MIN_BUFFER_S)


def test_nobody_waits_for_long_without_another_look() -> None:
    assert slack_s([], 10.0) == slack_s([paced(60.0)], 10.0) == MAX_WAIT_S


def test_a_launch_waits_as_long_as_no_listener_needs_a_frame() -> None:
    timing = FrameTiming(FRAME_S, OPENING_S)
    assert hold_ns([paced(0.75)], timing, 10.0) == pytest.approx(250 * MS, abs=2)
    assert timing.held_at == 10.0


def test_it_does_not_wait_for_less_than_a_tick() -> None:
    timing = FrameTiming(FRAME_S, OPENING_S)
    for left in (MIN_BUFFER_S, MIN_BUFFER_S + 0.9 * TICK_NS / 1e9):
        assert hold_ns([paced(left)], timing, 10.0) == 0
        assert timing.held_at == 0


def test_a_frame_that_was_held_back_does_not_count_as_slow() -> None:
    """Otherwise the first packets of newcomers would wait, who are never held back."""
    timing = FrameTiming(FRAME_S, OPENING_S)
    pace = PacketPacing(1, 8, 2, timing)
    pace.frame_made(1.0)
    pace.frame_made(1.005)
    timing.held_at = 1.1
    pace.frame_made(1.11)
    assert timing.slowest_s == pytest.approx(0.005)
    assert timing.first_packet_delay(0.057, 1.11) == 0
    pace.frame_made(1.2)
    assert timing.slowest_s == pytest.approx(0.09), "one that began afterwards counts"


class Holding(Timed):
    """A stage that gives way until a moment that the test sets."""

    def __init__(self, models: Models) -> None:
        super().__init__(models, on=False)
        self.until: int | None = None

    def poll(self) -> bool:
        made = self.stage.poll()
        launched = self.stage.launch(
            None if self.until is None or self.until <= self.clock.now else self.until
        )
        for output in [*made, *self.stage.poll()]:
            self.collect(output)
        return bool(made) or launched

    def land(self) -> None:
        """Until nothing is in flight."""
        self.until = self.clock.now + 1000 * MS
        while in_flight(self.stage):
            self.go()


@pytest.fixture
def holding(models: Models) -> Holding:
    desk = Holding(models)
    desk.text("old", 0, 20)
    while len(desk.tokens["old"]) < 5:
        desk.go()
    desk.land()
    return desk


def test_a_held_launch_is_woken_when_it_is_due(holding: Holding) -> None:
    stage, launches = holding.stage, holding.device.launches
    holding.until = due = holding.clock.now + 30 * MS
    before = len(launches)
    while holding.clock.now < due:
        holding.go()
    assert len(launches) == before
    holding.go()
    assert launches[before].at == due + holding.device.launch_ns
    assert (stage.stats.held_for_prefill, stage.stats.held, stage.stats.late) == (1, 0, 0)
    holding.finish()
    assert len(holding.tokens["old"]) == 20


def test_a_prompt_of_its_own_is_not_held_back(holding: Holding) -> None:
    holding.until = holding.clock.now + 1000 * MS
    assert not holding.round()
    holding.text("new", 1, 3)
    assert holding.round()
    assert RequestId("new") in {s.request.id for s in holding.device.launches[-1].batch.spans}
    holding.until = None
    holding.finish()


def test_a_step_with_a_prompt_counts_as_prefill_in_flight(models: Models) -> None:
    desk = Timed(models, on=False)
    assert not desk.stage.prefill_in_flight
    desk.text("a", 0, 4)
    desk.round()
    assert desk.stage.prefill_in_flight
    while not desk.tokens["a"]:
        desk.go()
    assert not desk.stage.prefill_in_flight
    desk.finish()


@pytest.mark.parametrize(
    ("stages", "switches", "waits"),
    [
        ((), OverlapSwitches(), True),
        ((), OverlapSwitches(prefill_priority=False), False),
        (("talker", "code2wav"), OverlapSwitches(), False),
    ],
    ids=["beside a thinker", "switched off", "without a thinker"],
)
def test_prompts_of_a_thinker_in_the_same_host_go_first(
    stages: tuple[str, ...], switches: OverlapSwitches, waits: bool, tiny_dir: Path
) -> None:
    host: Host = Driven(tiny_dir, stages=stages, switches=switches).host
    assert isinstance(host.context.settings, HostSettings)
    prefill = host.stages["talker"].prefill  # type: ignore[attr-defined]
    assert (prefill is not None) == waits
    if prefill is not None:
        assert prefill is host.stages["thinker"].core  # type: ignore[attr-defined]
    host.close()

"""Prefill before the talker's decode: which listeners allow a wait and for how long, what a stage
does about it, and that first packets are no later for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.config.engine import HostSettings, OverlapSwitches
from stretto.models.qwen3_omni.load import Models
from stretto.models.speech.pacing import FrameTiming, PacketPacing
from stretto.models.speech.prefill_priority import MAX_WAIT_S, MIN_BUFFER_S, DecodeHold, slack_s
from stretto.stage.host.host import Host
from stretto.stage.host.loop import TICK_NS
from stretto.stage.request import RequestSpec, StageRequest, State
from stretto.types import RequestId
from tests.models.driven import Driven
from tests.stage.simulated import MS
from tests.stage.stepping import in_flight
from tests.stage.timed_desk import Timed

FRAME_S, OPENING_S = 0.08, 0.023


@dataclass
class Voice:
    request: StageRequest
    pace: PacketPacing


def voice(lead_s: float | None, timing: FrameTiming | None = None, **changed: object) -> Voice:
    """Of a listener who has so much in hand at second 10; None: nothing was sent yet."""
    timing = timing or FrameTiming(FRAME_S, OPENING_S)
    request = StageRequest(RequestSpec(RequestId("a"), 100), 0)
    request.state, request.closed = State.RUNNING, True
    for name, value in changed.items():
        setattr(request, name, value)
    pace = PacketPacing(1, 8, 2, timing)
    if lead_s is not None:
        pace.packet_sent(1, 10.0)
        pace.first_sent = 10.0 + lead_s - FRAME_S + OPENING_S
    return Voice(request, pace)


def test_the_one_with_the_least_in_hand_counts() -> None:
    assert slack_s([voice(0.9), voice(0.7), voice(3.0)], 10.0) == pytest.approx(0.7 - MIN_BUFFER_S)
    assert slack_s([voice(0.9), voice(0.2)], 10.0) < 0


def test_who_has_heard_nothing_yet_can_spare_nothing() -> None:
    assert slack_s([voice(3.0), voice(None), voice(3.0)], 10.0) == 0


def test_those_that_could_have_no_frame_now_do_not_count() -> None:
    """They wait for text, or their prompt is not complete."""
    others = [
        voice(None, state=State.STARVED),
        voice(0.1, state=State.STARVED),
        voice(None, closed=False),
    ]
    assert slack_s([voice(0.9), *others], 10.0) == pytest.approx(0.9 - MIN_BUFFER_S)


def test_nobody_waits_for_long_without_another_look() -> None:
    assert slack_s([], 10.0) == slack_s([voice(60.0)], 10.0) == MAX_WAIT_S


@dataclass
class Reading:
    prefill_in_flight: bool = True


def asked(*voices: Voice, reading: bool = True) -> tuple[int | None, FrameTiming]:
    timing = FrameTiming(FRAME_S, OPENING_S)
    hold = DecodeHold(Reading(reading), lambda: 10.0, lambda: 7 * MS)
    return hold.until_ns(voices, timing), timing


def test_a_launch_waits_as_long_as_everybody_can_spare_it() -> None:
    due, timing = asked(voice(0.75))
    assert due == pytest.approx(7 * MS + 250 * MS, abs=2)
    assert timing.held_at == 10.0


def test_it_does_not_wait_without_prompts_nor_for_less_than_a_tick() -> None:
    assert asked(voice(0.75), reading=False) == (None, FrameTiming(FRAME_S, OPENING_S))
    for left in (MIN_BUFFER_S, MIN_BUFFER_S + 0.9 * TICK_NS / 1e9):
        due, timing = asked(voice(left))
        assert due is None
        assert timing.held_at == 0


def test_a_frame_that_was_held_back_says_nothing_of_the_device() -> None:
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


class Polite(Timed):
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
def polite(models: Models) -> Polite:
    desk = Polite(models)
    desk.text("old", 0, 20)
    while len(desk.tokens["old"]) < 5:
        desk.go()
    desk.land()
    return desk


def test_a_held_launch_is_woken_when_it_is_due(polite: Polite) -> None:
    stage, launches = polite.stage, polite.device.launches
    polite.until = due = polite.clock.now + 30 * MS
    before = len(launches)
    while polite.clock.now < due:
        polite.go()
    assert len(launches) == before
    polite.go()
    assert launches[before].at == due + polite.device.launch_ns
    assert (stage.stats.held_for_prefill, stage.stats.held, stage.stats.late) == (1, 0, 0)
    polite.finish()
    assert len(polite.tokens["old"]) == 20


def test_a_prompt_of_its_own_is_not_held_back(polite: Polite) -> None:
    polite.until = polite.clock.now + 1000 * MS
    assert not polite.round()
    polite.text("new", 1, 3)
    assert polite.round()
    assert RequestId("new") in {s.request.id for s in polite.device.launches[-1].batch.spans}
    polite.until = None
    polite.finish()


def test_reading_is_while_a_step_with_a_prompt_is_in_flight(models: Models) -> None:
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
    ("stages", "switches", "held"),
    [
        ((), OverlapSwitches(), True),
        ((), OverlapSwitches(prefill_priority=False), False),
        (("talker", "code2wav"), OverlapSwitches(), False),
    ],
    ids=["beside a thinker", "switched off", "without a thinker"],
)
def test_frames_give_way_to_the_prompts_of_a_thinker_in_their_host(
    stages: tuple[str, ...], switches: OverlapSwitches, held: bool, tiny_dir: Path
) -> None:
    host: Host = Driven(tiny_dir, stages=stages, switches=switches).host
    assert isinstance(host.context.settings, HostSettings)
    hold = host.stages["talker"]._hold  # type: ignore[attr-defined]
    assert (hold is not None) == held
    if hold is not None:
        assert hold.prefill is host.stages["thinker"].core  # type: ignore[attr-defined]
    host.close()

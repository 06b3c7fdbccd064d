"""One step is retired, then one is launched: the device does not wait while the host looks at the
results of several steps."""

from collections.abc import Callable
from typing import Any

from stretto.models.qwen3_omni.load import Models
from stretto.stage.ar import StageCore
from stretto.stage.vocoder import CodecConfig, VocoderCore
from stretto.types import RequestId
from tests.stage.simulated import MS
from tests.stage.stepping import poll_core
from tests.stage.timed_desk import Timed
from tests.stage.vocoder.test_core import Device, Ears, codes

LAUNCH = 2 * MS
RETIRE = 6 * MS
OTHER = 10 * MS
"""Time of the host: for a launch, for a retirement, and for its other stages in every third
round."""

Turn = Callable[[StageCore, Callable[[Any], None]], bool]


def retire_all_then_launch(core: StageCore, collect: Callable[[Any], None]) -> bool:
    """What a stage must not do."""
    made = core.poll()
    while core.can_retire:
        made += core.poll()
    for output in made:
        collect(output)
    return core.launch() or bool(made)


class HostBound(Timed):
    """A stage whose host is often busy elsewhere when its steps end."""

    def __init__(self, models: Models, turn: Turn) -> None:
        super().__init__(models, on=False)
        self.turn = turn
        self.device.lasts = lambda batch: MS * self.rng.randrange(6, 15)
        self.device.launch_ns = LAUNCH
        retire = self.stage.runner.retire

        def timed(step: Any) -> Any:
            self.clock.now += RETIRE
            return retire(step)

        self.stage.runner.retire = timed  # type: ignore[method-assign]

    def poll(self) -> bool:
        if self.rounds % 3 == 0:
            self.clock.now += OTHER
        return self.turn(self.stage, self.collect)

    def idle_share(self) -> float:
        """Of the time between the first launch and the end of the last step."""
        launches = self.device.launches
        return sum(self.device.gaps()) / (launches[-1].end - launches[0].start)


def test_a_host_bound_stage_idles_less_and_answers_the_same(models: Models) -> None:
    shares, answers = [], []
    for turn in (retire_all_then_launch, poll_core):
        desk = HostBound(models, turn)
        for i in range(3):
            desk.text(str(i), i, 40 + i)
        desk.finish()
        assert desk.stage.stats.tokens == 40 + 41 + 42
        shares.append(desk.idle_share())
        answers.append(desk.tokens)
    assert answers[0] == answers[1]
    before, after = shares
    assert before > 0.3
    assert after < 0.75 * before


def test_a_stage_launches_between_two_retirements(models: Models) -> None:
    desk = Timed(models, on=False)
    desk.text("a", 0, 20)
    while desk.stage.in_flight < 2 or not desk.tokens["a"]:
        desk.go()
    desk.clock.move_to(desk.device.free_ns)
    launched = len(desk.device.launches)
    desk.stage.poll()
    assert desk.stage.in_flight == 1
    assert desk.stage.launch()
    assert len(desk.device.launches) == launched + 1
    desk.stage.poll()
    assert desk.stage.in_flight == 1
    desk.finish()


def test_a_stage_asks_to_be_polled_again_while_a_step_can_be_retired(models: Models) -> None:
    """Also when it has nothing to launch, and when what was retired gave nothing: the loop would
    sleep, and both wakes of the device have come."""
    desk = Timed(models, on=False)
    desk.text("a", 0, 20)
    while desk.stage.in_flight < 2 or not desk.tokens["a"]:
        desk.go()
    desk.stage.cancel(RequestId("a"))
    desk.clock.move_to(desk.device.free_ns)
    assert not desk.stage.poll()
    assert desk.stage.in_flight == 1
    assert desk.stage.launch()
    assert not desk.stage.poll()
    assert not desk.stage.launch()
    assert not len(desk.stage)


def test_a_step_is_not_held_back_behind_one_that_is_done(models: Models) -> None:
    """The device ended both steps earlier than usual, and stands still."""
    desk = Timed(models)
    desk.text("a", 0, 40)
    due = desk.until_held()
    desk.device.lasts = lambda batch: 2 * MS
    desk.clock.move_to(due)
    desk.round()
    desk.clock.move_to(desk.device.free_ns)
    assert desk.stage.in_flight == 2
    launched = len(desk.device.launches)
    desk.stage.poll()
    desk.stage.launch()
    assert len(desk.device.launches) == launched + 1
    desk.finish()


def test_a_vocoder_launches_between_two_retirements(models: Models) -> None:
    ears = Ears()
    core = VocoderCore(models.code2wav, CodecConfig(slots=2, frame_sizes=(1, 2, 4)))
    device = Device(core)
    r, frames = RequestId("r"), codes(models, 8, 0)
    core.open(r)
    for at in (0, 2):
        core.push(r, frames[at : at + 2])
        assert core.launch()
    for at in (4, 6):
        core.push(r, frames[at : at + 2])
    device.finish()
    device.finish()
    assert not device.running
    outputs = core.poll()
    assert len(outputs) == 1
    assert core.in_flight == 1
    assert core.launch()
    assert len(device.running) == 1
    outputs += core.poll()
    assert len(outputs) == 2
    for output in outputs:
        ears(output)
    core.cancel(r)
    device.rest(core, ears)


def test_a_vocoder_asks_to_be_polled_again_while_a_step_can_be_retired(models: Models) -> None:
    core = VocoderCore(models.code2wav, CodecConfig(slots=2, frame_sizes=(1, 2, 4)))
    device = Device(core)
    r, frames = RequestId("r"), codes(models, 4, 0)
    core.open(r)
    for at in (0, 2):
        core.push(r, frames[at : at + 2])
        core.launch()
    device.finish()
    device.finish()
    core.cancel(r)
    assert not core.poll()
    assert core.launch(), "the second step is to be retired"
    assert not core.poll()
    assert not core.launch()

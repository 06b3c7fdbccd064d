"""A desk whose stage runs on a simulated device, for tests of when steps are launched."""

from collections.abc import Callable
from dataclasses import replace

from stretto.models.qwen3_omni.load import Models
from stretto.stage.host.loop import Loop
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.scheduler.batch import Batch
from stretto.types import SamplingParams
from tests.prompts import make
from tests.solo import Options
from tests.stage.desk import CONFIG, Desk
from tests.stage.invariants import check_scheduler
from tests.stage.simulated import MS, Clock, Device, SimulatedWakeup
from tests.stage.stepping import idle, in_flight

STEP, PROMPT = 16 * MS, 25 * MS
LEAD = 2 * MS
SIZES = (1, 2, 4, 8, 16)


def lasts(batch: Batch) -> int:
    return STEP if batch.decode_only else PROMPT


class Timed(Desk):
    """A desk whose stage runs on a simulated device, driven by a loop that sleeps on its wakeup."""

    def __init__(
        self, models: Models, kind: str = "thinker", on: bool = True, tick: int = 0, config=CONFIG
    ) -> None:
        clock = Clock(tick=tick)
        super().__init__(models, kind, config, timer=LaunchTimer(SIZES, LEAD, on, clock))
        self.clock = clock
        self.device: Device = Device(self.clock, lasts)
        self.device.drive(self.stage.runner)
        self.wakeup = SimulatedWakeup(self.device)
        self.loop = Loop(self, self.wakeup, clock=self.clock)
        self.rounds = 0

    @property
    def due_ns(self) -> int | None:
        return self.stage.due_ns

    def handle(self, message: Callable[[], object], blob: bytes) -> None:
        """Its loop's messages are functions."""
        message()

    def round(self) -> bool:
        self.rounds += 1
        assert self.rounds < 2000, "no end in sight"
        did = self.loop.round()
        check_scheduler(self.stage.scheduler)
        return did

    def until_held(self) -> int:
        """Go on until a launch is held back; when it is due."""
        while self.round() or self.stage.due_ns is None:
            if in_flight(self.stage) == CONFIG.overlap_depth:
                self.loop.sleep()
        return self.stage.due_ns

    def go(self) -> None:
        """What a loop does, once, while there is something to wait for."""
        if not self.round() and not idle(self.stage):
            self.loop.sleep()

    def rest(self) -> None:
        """Until nothing more can be done without new input."""
        while (did := self.round()) or in_flight(self.stage):
            if not did:
                self.loop.sleep()

    def finish(self) -> None:
        while not idle(self.stage):
            self.go()

    def text(self, id: str, seed: int, tokens: int) -> None:
        """A question whose answer is so long."""
        self.think(
            id,
            make("text", self.models.config, seed=seed),
            options(seed, tokens),
            stop_ids=frozenset(),
        )


def options(seed: int, tokens: int) -> Options:
    sampling = SamplingParams(temperature=0.8 * (seed % 2), top_k=40, seed=seed)
    return replace(Options().seeded(seed), text=sampling, max_text_tokens=tokens)

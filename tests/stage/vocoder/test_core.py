"""The vocoder's stage: whatever streams share its steps, each gets the samples of one decode of its
own frames."""

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from stretto.errors import Busy, Gone, StageDead
from stretto.models.qwen3_omni.load import Models
from stretto.stage.request import Reason
from stretto.stage.vocoder import CodecConfig, VocoderCore, VocoderOutput
from stretto.types import RequestId
from tests.stage.stepping import idle, in_flight, poll_core, wait_for_device

SMALL = CodecConfig(
    slots=4, max_waiting=8, max_pending=40, frame_sizes=(1, 2, 4), stream_sizes=(1, 2, 4)
)


class Ears:
    """Collects streams and checks that their packets tile."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = defaultdict(list)
        self.ended: dict[str, Reason] = {}
        self.errors: dict[str, Exception] = {}

    def __call__(self, o: VocoderOutput) -> None:
        assert o.request not in self.ended
        assert o.start == sum(len(p) for p in self.parts[o.request])
        self.parts[o.request].append(o.samples)
        if o.reason is not None:
            self.ended[o.request] = o.reason
            if o.error is not None:
                self.errors[o.request] = o.error

    def sound(self, id: str) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.parts[id]])


class Device:
    """One that takes time: a step is back when it is finished here, the oldest first."""

    class Event:
        def __init__(self, copied: torch.cuda.Event | None) -> None:
            self.copied, self.fired = copied, False

        def query(self) -> bool:
            return self.fired

        def synchronize(self) -> None:
            if self.copied is not None:
                self.copied.synchronize()
            self.fired = True

    def __init__(self, stage: VocoderCore) -> None:
        self.running: deque[Device.Event] = deque()
        self._run = stage.run
        stage.run = self.run  # type: ignore[method-assign]

    def run(self, streams: int, size: int) -> tuple[torch.Tensor, Event]:
        wav, copied = self._run(streams, size)
        self.running.append(self.Event(copied))
        return wav, self.running[-1]

    def finish(self) -> None:
        self.running.popleft().synchronize()

    def rest(self, stage: VocoderCore, ears: Ears) -> None:
        """Until nothing is in flight."""
        while poll_core(stage, ears) or self.running:
            if self.running:
                self.finish()


def codes(models: Models, n: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, models.config.code2wav.codebook_size, (n, 16), generator=g)


def decoded(models: Models, frames: torch.Tensor) -> np.ndarray:
    return (
        models.code2wav.decode(frames.to(next(models.code2wav.parameters()).device)).cpu().numpy()
    )


def run(stage: VocoderCore, ears: Ears) -> None:
    while poll_core(stage, ears) or in_flight(stage):
        wait_for_device()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_ragged_streams_equal_whole_decodes(depth: int, seed: int, models: Models) -> None:
    rng = np.random.default_rng(seed)
    ears = Ears()
    stage = VocoderCore(models.code2wav, replace(SMALL, overlap_depth=depth))
    lengths = {str(i): int(rng.integers(1, 14)) for i in range(7)}  # more streams than slots
    frames = {id: codes(models, n, int(id)) for id, n in lengths.items()}
    fed = dict.fromkeys(frames, 0)
    for id in frames:
        stage.open(RequestId(id))
    while any(fed[id] < lengths[id] for id in frames):
        for id in frames:
            n = min(lengths[id] - fed[id], int(rng.integers(0, 5)))
            if n:
                last = Reason.STOP if fed[id] + n == lengths[id] and rng.random() < 0.5 else None
                stage.push(RequestId(id), frames[id][fed[id] : fed[id] + n].to(stage.device), last)
                fed[id] += n
                if fed[id] == lengths[id] and last is None:  # the end comes alone, later
                    poll_core(stage, ears)
                    stage.push(RequestId(id), frames[id][:0], Reason.LENGTH)
        poll_core(stage, ears)
    run(stage, ears)
    for id in frames:
        want = models.code2wav.decode(frames[id].to(stage.device)).cpu().numpy()
        np.testing.assert_allclose(ears.sound(id), want, atol=1e-5)
    assert set(ears.ended) == set(frames)
    assert idle(stage)


def test_cancelled_streams_leave_nothing_behind(models: Models) -> None:
    ears = Ears()
    stage = VocoderCore(models.code2wav, SMALL)
    for round in range(5):
        for i in range(6):
            stage.open(RequestId(f"{round}.{i}"))
            stage.push(RequestId(f"{round}.{i}"), codes(models, 5, i).to(stage.device))
        for _ in range(round):
            poll_core(stage, ears)
        sound = {k: len(v) for k, v in ears.parts.items()}
        for i in (0, 2, 5):
            assert stage.cancel(RequestId(f"{round}.{i}"))
            assert not stage.cancel(RequestId(f"{round}.{i}"))
        for i in (1, 3, 4):
            stage.push(RequestId(f"{round}.{i}"), codes(models, 0, 0), Reason.STOP)
        run(stage, ears)
        for i in (0, 2, 5):
            assert len(ears.parts[f"{round}.{i}"]) == sound.get(f"{round}.{i}", 0)
        for i in (1, 3, 4):
            want = models.code2wav.decode(codes(models, 5, i).to(stage.device)).cpu().numpy()
            np.testing.assert_allclose(ears.sound(f"{round}.{i}"), want, atol=1e-5)
        assert idle(stage)
    with pytest.raises(Gone):
        stage.push(RequestId("0.0"), codes(models, 1, 0))


def test_on_a_cpu_what_a_turn_computed_leaves_in_it(models: Models) -> None:
    """Else it would wait for the steps of all other stages in this process."""
    ears = Ears()
    stage = VocoderCore(models.code2wav, SMALL)
    if stage.device.type != "cpu":
        pytest.skip("a device computes beside the host")
    stage.open(RequestId("r"))
    stage.push(RequestId("r"), codes(models, 2, 0))
    assert poll_core(stage, ears)
    assert len(ears.sound("r"))
    assert in_flight(stage) == 0


def test_first_packets_go_first_and_small(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that has not sounded yet decides the size of the step; the others give what fits."""
    sizes: list[int] = []
    ears = Ears()
    stage = VocoderCore(models.code2wav, SMALL, clock=lambda: 0.0)
    step = models.code2wav.step

    def watched(state, codes, lengths, slots):
        sizes.append(codes.shape[2])
        return step(state, codes, lengths, slots)

    monkeypatch.setattr(models.code2wav, "step", watched)
    stage.open(RequestId("old"))
    stage.push(RequestId("old"), codes(models, 8, 0).to(stage.device))
    stage.set_deadline(RequestId("old"), 5.0)
    stage.open(RequestId("new"))
    stage.push(RequestId("new"), codes(models, 1, 1).to(stage.device))
    poll_core(stage, ears)
    assert sizes[0] == 1
    stage.set_deadline(RequestId("new"), 6.0)
    run(stage, ears)
    assert sizes[1] == 4
    for id in ("old", "new"):
        stage.push(RequestId(id), codes(models, 0, 0), Reason.STOP)
    poll_core(stage, ears)
    assert set(ears.ended) == {"old", "new"}


def test_urgent_streams_do_not_wait_for_others(models: Models) -> None:
    """Each goes in a step of its own size, and no step is larger than its limit."""
    taken: list[dict[str, int]] = []
    now = 10.0
    config = replace(SMALL, max_cells=8)
    stage = VocoderCore(models.code2wav, config, clock=lambda: now)
    schedule = stage.schedule

    def watched():
        batch = schedule()
        if batch is not None:
            taken.append({stream.request: n for stream, _, n in batch.parts})
        return batch

    stage.schedule = watched
    for id, frames, deadline in (
        ("far", 7, 99.0),
        ("near", 2, 10.05),
        ("also near", 1, 10.09),
        ("new", 1, None),
    ):
        stage.open(RequestId(id))
        stage.push(RequestId(id), codes(models, frames, 0), Reason.STOP)
        stage.set_deadline(RequestId(id), deadline)
    run(stage, Ears())
    # First the new one, which sets the size; then who runs dry; then the rest, alone, so it gets
    # four frames at a time.
    assert taken == [{"near": 1, "also near": 1, "new": 1}, {"near": 1}, {"far": 4}, {"far": 3}]
    assert idle(stage)
    taken.clear()
    for i in range(4):
        stage.open(RequestId(str(i)))
        stage.push(RequestId(str(i)), codes(models, 4, i), Reason.STOP)
        stage.set_deadline(RequestId(str(i)), 99.0)
    run(stage, Ears())
    assert taken == [dict.fromkeys("0123", 2)] * 2
    assert idle(stage)


def test_limits_are_errors_not_losses(models: Models) -> None:
    stage = VocoderCore(models.code2wav, SMALL)
    for i in range(8):
        stage.open(RequestId(str(i)))
    with pytest.raises(Busy):
        stage.open(RequestId("more"))
    stage.push(RequestId("0"), codes(models, 40, 0))
    with pytest.raises(Busy):
        stage.push(RequestId("0"), codes(models, 1, 0))


def test_an_empty_stream_ends(models: Models) -> None:
    ears = Ears()
    stage = VocoderCore(models.code2wav, SMALL)
    stage.open(RequestId("e"))
    stage.push(RequestId("e"), codes(models, 0, 0), Reason.STOP)
    poll_core(stage, ears)
    assert ears.ended == {"e": Reason.STOP}
    assert len(ears.sound("e")) == 0
    assert idle(stage)


def test_a_step_that_raises_fails_its_streams_and_the_stage_goes_on(models: Models) -> None:
    ears = Ears()
    stage = VocoderCore(models.code2wav, SMALL)
    run_step = stage.run

    def broken(*args):
        raise RuntimeError("injected")

    stage.run = broken
    stage.open(RequestId("a"))
    stage.push(RequestId("a"), codes(models, 3, 0))
    run(stage, ears)
    assert isinstance(ears.errors["a"], StageDead)
    stage.run = run_step
    stage.open(RequestId("b"))
    stage.push(RequestId("b"), codes(models, 3, 1).to(stage.device), Reason.STOP)
    run(stage, ears)
    np.testing.assert_allclose(
        ears.sound("b"),
        models.code2wav.decode(codes(models, 3, 1).to(stage.device)).cpu().numpy(),
        atol=1e-5,
    )
    assert idle(stage)


@pytest.mark.parametrize("slots", [1, 3, 8, 32, 64, 100, 128, 200])
def test_captured_shapes_hold_every_step(slots: int) -> None:
    """Half as many, or nearly; each step fits one, padded by little, and a stream's first packet by
    no frame."""
    full = CodecConfig(slots=slots)
    few = full.captured()
    assert len(few.shapes()) <= 0.6 * len(full.shapes()) or slots < 8
    widths = {n for n, _ in few.shapes()}
    assert max(widths) == slots
    for n in widths:
        sizes = few.sizes_for(n)
        assert sizes[0] == 1
        assert sizes[-1] == full.sizes_for(n)[-1], "as many frames at once as ever"
        for f in full.sizes_for(n):
            assert (min(s for s in sizes if s >= f) - f) * n <= few.spare_cells


@pytest.mark.parametrize("spare", [0, 3, 12])
def test_steps_come_in_the_shapes_that_there_are(
    spare: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is waiting; and padding changes no sample."""
    rng = np.random.default_rng(spare)
    config = replace(SMALL, spare_cells=spare, max_cells=12)
    ears, seen = Ears(), set()
    stage = VocoderCore(models.code2wav, config)
    real = stage.run

    def watched(streams, size):
        seen.add((streams, size))
        return real(streams, size)

    monkeypatch.setattr(stage, "run", watched)
    frames = {str(i): codes(models, int(rng.integers(1, 9)), i) for i in range(10)}
    for id, given in frames.items():
        while len(stage) > 6:
            poll_core(stage, ears)
        stage.open(RequestId(id))
        cut = int(rng.integers(0, len(given)))
        stage.push(RequestId(id), given[:cut])
        poll_core(stage, ears)
        stage.push(RequestId(id), given[cut:], Reason.STOP)
    run(stage, ears)
    assert seen <= set(config.shapes())
    assert len(seen) >= 3
    for id, given in frames.items():
        want = models.code2wav.decode(given.to(stage.device)).cpu().numpy()
        np.testing.assert_allclose(ears.sound(id), want, atol=1e-5)


def test_an_end_that_comes_alone_comes_behind_the_steps_in_flight(models: Models) -> None:
    """Two steps of a stream are on the device when its sender says that there are no more frames:
    their samples still leave, and the end with the last of them."""
    ears = Ears()
    stage = VocoderCore(models.code2wav, SMALL)
    device = Device(stage)
    r, frames = RequestId("r"), codes(models, 6, 0)
    stage.open(r)
    for at in (0, 2, 4):
        stage.push(r, frames[at : at + 2])
        poll_core(stage, ears)
        if at == 0:
            device.finish()
            assert poll_core(stage, ears)
    assert in_flight(stage) == 2
    stage.push(r, frames[:0], Reason.STOP)
    assert not poll_core(stage, ears)
    for left in (1, 0):
        assert not ears.ended
        device.finish()
        assert poll_core(stage, ears)
        assert in_flight(stage) == left
    assert ears.ended == {"r": Reason.STOP}
    np.testing.assert_allclose(ears.sound("r"), decoded(models, frames), atol=1e-5)
    assert idle(stage)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_device_takes_its_time_for(depth: int, seed: int, models: Models) -> None:
    """Streams that come, grow, end and are cancelled while steps of theirs are in flight: those
    that end are whole, nothing of the others comes after their end, and no slot is lost. Never more
    steps than there may be."""
    rng = np.random.default_rng(seed)
    ears = Ears()
    stage = VocoderCore(models.code2wav, replace(SMALL, slots=2, overlap_depth=depth))
    device = Device(stage)
    most, fed = 0, dict.fromkeys((str(i) for i in range(12)), 0)
    frames = {id: codes(models, int(rng.integers(1, 9)), int(id)) for id in fed}
    left, live, leaving = list(fed), list[str](), set[str]()
    while left or live:
        if left and len(live) < 5:
            live.append(left.pop(0))
            stage.open(RequestId(live[-1]))
        for id in list(live):
            if rng.random() < 0.05:
                leaving.add(id)
                sound = len(ears.parts[id])
                assert stage.cancel(RequestId(id))
                ears.parts[id] = ears.parts[id][:sound]
                live.remove(id)
            elif rng.random() < 0.5:
                n = min(len(frames[id]) - fed[id], int(rng.integers(0, 4)))
                whole = fed[id] + n == len(frames[id]) and rng.random() < 0.5
                stage.push(
                    RequestId(id), frames[id][fed[id] : fed[id] + n], Reason.STOP if whole else None
                )
                fed[id] += n
                if whole:
                    live.remove(id)
        poll_core(stage, ears)
        most = max(most, in_flight(stage))
        if device.running and rng.random() < 0.4:
            device.finish()
    device.rest(stage, ears)
    assert most == depth
    assert set(ears.ended) == set(frames) - leaving
    assert len(leaving) < 8
    for id in ears.ended:
        np.testing.assert_allclose(ears.sound(id), decoded(models, frames[id]), atol=1e-5)
    assert idle(stage)


def test_a_slot_is_free_when_the_last_step_that_writes_to_it_is_back(models: Models) -> None:
    ears = Ears()
    stage = VocoderCore(models.code2wav, replace(SMALL, slots=1))
    device = Device(stage)
    for id in ("gone", "next"):
        stage.open(RequestId(id))
        stage.push(RequestId(id), codes(models, 2, 0))
    poll_core(stage, ears)
    stage.push(RequestId("gone"), codes(models, 2, 1))
    poll_core(stage, ears)
    assert in_flight(stage) == 2
    assert stage.cancel(RequestId("gone"))
    device.finish()
    poll_core(stage, ears)
    assert in_flight(stage) == 1, "the next stream has no slot yet"
    device.finish()
    poll_core(stage, ears)
    assert in_flight(stage) == 1, "now it has"
    stage.push(RequestId("next"), codes(models, 0, 0), Reason.STOP)
    device.rest(stage, ears)
    np.testing.assert_allclose(ears.sound("next"), decoded(models, codes(models, 2, 0)), atol=1e-5)
    assert not ears.parts["gone"]
    assert idle(stage)


def test_a_step_that_fails_between_others_of_its_stream_fails_it_once(models: Models) -> None:
    ears = Ears()
    stage = VocoderCore(models.code2wav, replace(SMALL, slots=1, overlap_depth=3))
    device = Device(stage)
    works = stage.run

    def broken(*args):
        raise RuntimeError("injected")

    for id in ("a", "b"):
        stage.open(RequestId(id))
    for at, run_step in enumerate((works, broken, works)):
        stage.push(RequestId("a"), codes(models, 2, at))
        stage.run = run_step
        poll_core(stage, ears)
    assert in_flight(stage) == 3
    device.finish()
    poll_core(stage, ears)
    assert isinstance(ears.errors["a"], StageDead)
    sound = ears.sound("a")
    np.testing.assert_allclose(sound, decoded(models, codes(models, 2, 0)), atol=1e-5)
    stage.push(RequestId("b"), codes(models, 2, 1), Reason.STOP)
    poll_core(stage, ears)
    assert in_flight(stage) == 1, "the slot is still being written to"
    device.rest(stage, ears)
    assert len(ears.sound("a")) == len(sound)
    np.testing.assert_allclose(ears.sound("b"), decoded(models, codes(models, 2, 1)), atol=1e-5)
    assert idle(stage)

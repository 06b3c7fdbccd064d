"""The vocoder's activation and joins against plain PyTorch; a whole vocoder with them against one
decode without."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from stretto.layers import streaming
from stretto.layers.streaming import Push, Silence, Snake, Tail
from stretto.models.speech import vocoder as vocoding
from tests.kernels.triton import vocoders
from tests.kernels.triton.vocoders import (
    CONFIG,
    check_captured,
    play,
    random_codes,
    random_stream,
    small_vocoder,
)

kernels = pytest.importorskip("stretto.kernels.triton.snake")

noise = partial(vocoders.noise, scale=3.0)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def made(channels: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Snake:
    g = torch.Generator().manual_seed(channels)
    act = Snake(channels).to(dtype)
    act.alpha.data.copy_(torch.randn(channels, generator=g))
    act.beta.data.copy_(torch.randn(channels, generator=g).abs())
    act = act.to(device)
    act.prepare()
    return act


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Snake` and `Push` are the reference here, whatever is usable, and convolutions are not
    rounded to TF32."""
    monkeypatch.setattr(streaming, "usable", lambda x: False)
    monkeypatch.setattr(vocoding, "usable", lambda x: False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 33, 96), (3, 5, 7), (2, 31, 40), (1, 130, 32)], ids=str
)
def test_snake_equals_the_reference(shape: tuple[int, int, int], device: torch.device) -> None:
    act, x = made(shape[2], device), noise(*shape, seed=1).to(device)
    torch.testing.assert_close(kernels.snake(x, act.curve), act(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("largest", [10.0, 3000.0])
def test_snake_of_all_phases(largest: float, device: torch.device) -> None:
    """From a few waves to hundreds of them, with waves as large as what they ride on."""
    x = torch.linspace(-largest, largest, 32 * 1024, device=device).view(1, -1, 32)
    curve = torch.ones(2, 32, device=device)
    truth = x.double() + x.double().sin().square()
    error = (kernels.snake(x, curve).double() - truth).abs()
    assert (
        float((error - torch.finfo(torch.float32).eps * x.abs()).max()) < 5e-7
    )  # but for the rounding of the sum


@pytest.mark.filterwarnings("ignore:overflow")
def test_snake_stays_bounded_where_phases_mean_nothing(device: torch.device) -> None:
    x = torch.tensor([1e7, 1e9, 1e20, 3e38, -1e30], device=device).view(1, -1, 1)
    curve = torch.tensor([[1.0], [4.0]], device=device)
    wave = kernels.snake(torch.cat((x, x * 0), 1), curve)
    assert torch.isfinite(wave).all()
    assert torch.equal(wave[:, 5:], torch.zeros_like(x))
    torch.testing.assert_close(wave[:, :5], x, rtol=1e-6, atol=4.0)


def test_snake_takes_rows_as_they_lie(device: torch.device) -> None:
    act, x = made(24, device), noise(2, 24, 10, seed=2).to(device).transpose(1, 2)
    torch.testing.assert_close(kernels.snake(x, act.curve), act(x), rtol=0, atol=1e-6)
    assert kernels.snake(x[:, :0], act.curve).shape == (2, 0, 24)


def test_bfloat16_is_closer_to_the_truth_than_the_plain_way(device: torch.device) -> None:
    half = made(96, device, torch.bfloat16)
    exact = Snake(96).to(device)
    exact.alpha.data.copy_(half.alpha)
    exact.beta.data.copy_(half.beta)
    exact.prepare()
    x = noise(2, 40, 96, seed=3).to(device, torch.bfloat16)
    truth = exact(x.float())
    ours, plain = (
        float((y.float() - truth).norm()) for y in (kernels.snake(x, half.curve), half(x))
    )
    rounded = float((truth.bfloat16().float() - truth).norm())  # as close as bfloat16 can be
    assert ours < 1.001 * rounded
    assert plain > 1.5 * ours  # though most of either is the rounding of the result


class Held:
    """Tails of some slots, between others in one buffer, as in the vocoder's state."""

    def __init__(
        self,
        slots: int,
        rows: int,
        channels: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.flat = noise(slots, 16 + rows * channels + 5, seed=seed).to(device, dtype)
        self.tail = Tail(0, rows, channels, 1)
        self.view = self.flat[:, 16 : 16 + rows * channels].view(slots, rows, channels)

    def push(self, shift: torch.Tensor) -> Push:
        """With ends between those of other tails."""
        rows = torch.arange(self.tail.num_rows + 3, device=shift.device) - 2
        return Push([self.view], [(shift[:, None] + rows)[:, 2:-1, None]])


@BOTH
@pytest.mark.parametrize("way", ["bare", "snake", "silent"])
@pytest.mark.parametrize(
    ("rows", "channels", "time", "shifts"),
    [
        (6, 96, 4, [0, 4, 2]),  # the new tail is old in part
        (54, 40, 32, [32, 0, 16]),
        (18, 7, 33, [33, 20, 1]),
        (1, 33, 1, [1, 0, 1]),
        (70, 5, 3, [3, 1, 2]),  # longer than any that there is
    ],
)
def test_join_equals_the_reference(
    rows: int,
    channels: int,
    time: int,
    shifts: list[int],
    way: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    slots = len(shifts)
    ours, reference = (Held(slots, rows, channels, 5, dtype, device) for _ in range(2))
    x = noise(slots, time, channels, seed=6).to(device, dtype)
    act = None if way == "bare" else made(channels, device, dtype)
    silence = Silence(torch.tensor([-40, 3, 20], device=device), 20) if way == "silent" else None
    push = ours.push(torch.tensor(shifts, device=device))
    given = x.clone()
    wanted = reference.push(torch.tensor(shifts, device=device)).join(
        reference.tail, x, act, silence
    )
    rest = ours.flat.clone()
    found = kernels.join(
        ours.view,
        push.ends[0],
        x,
        None if act is None else act.curve,
        None if silence is None else silence.rows,
    )
    limit = 1e-6 if dtype == torch.float32 else (0.0 if way == "bare" else 0.2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    torch.testing.assert_close(ours.view, reference.view, rtol=0, atol=limit)
    assert torch.equal(x, given)
    assert torch.equal(found[:, :rows], rest[:, 16 : 16 + rows * channels].view_as(ours.view))
    for slot, shift in enumerate(shifts):  # what is kept are the very bits of the buffer
        assert torch.equal(ours.view[slot], found[slot, shift : shift + rows])
    if silence is not None:
        assert not found[1, rows : rows + 3].any()
        assert not found[2, rows : rows + 20].any()
    ours.view.copy_(rest[:, 16 : 16 + rows * channels].view_as(ours.view))
    assert torch.equal(ours.flat, rest)  # nothing beside the tails was touched


def test_joins_of_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the other size."""
    monkeypatch.setattr(kernels, "MANY_VALUES", 1)
    ours, reference = (Held(2, 18, 33, 7, torch.float32, device) for _ in range(2))
    x, act = noise(2, 300, 33, seed=8).to(device), made(33, device)
    silence, shifts = (
        Silence(torch.tensor([0, 140], device=device), 200),
        torch.tensor([300, 7], device=device),
    )
    wanted = reference.push(shifts).join(reference.tail, x, act, silence)
    found = kernels.join(ours.view, ours.push(shifts).ends[0], x, act.curve, silence.rows)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.view, reference.view, rtol=0, atol=1e-6)
    torch.testing.assert_close(kernels.snake(x, act.curve), act(x), rtol=0, atol=1e-6)


def pieces() -> list[tuple[int, list[int]]]:
    """Random ones of two streams, of which the first begins late."""
    rng = random.Random(7)
    return [
        (3, [0 if i < 2 else rng.choice((0, 1, 1, 2, 3)), rng.choice((0, 1, 1, 2, 3))])
        for i in range(20)
    ]


def test_a_stream_in_pieces_equals_one_decode_without_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_vocoder(CONFIG, device)
    streams = [random_stream(model, n, n) for n in (3, 6)]
    whole = [model.decode(s) for s in streams]
    state, slow = model.state(2, 3), model.state(2, 3)
    play(model, slow, streams, pieces())
    monkeypatch.setattr(streaming, "usable", lambda x: True)
    monkeypatch.setattr(Snake, "into", None)  # nobody takes the plain way
    found = play(model, state, streams, pieces())
    assert [len(f) for f in found] == [
        model.num_samples(len(s)) for s in streams
    ]  # all frames were played
    for mine, wanted in zip(found, whole, strict=True):
        assert 0.01 < float(wanted.abs().max()) < 1.0
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(state.tails, slow.tails, rtol=0, atol=1e-5)


def test_an_idle_slot_keeps_every_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_vocoder(CONFIG, device)
    state = model.state(2, 2)
    state.tails.copy_(noise(*state.tails.shape, seed=1))
    state.frames.fill_(5)
    before = state.tails.clone()
    monkeypatch.setattr(streaming, "usable", lambda x: True)
    model.step(state, random_codes(model, 2, 2, 2, seed=1), torch.tensor([2, 0], device=device))
    assert torch.equal(state.tails[1], before[1])
    assert not torch.equal(state.tails[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "channels", "time"), [(1, 1536, 4), (54, 768, 32), (54, 96, 1920), (6, 96, 7680)]
)
def test_real_sizes_over_and_over(
    rows: int, channels: int, time: int, device: torch.device
) -> None:
    """A thread that wrote a row of the tail before another had read it would show as different bits
    sometime."""
    slots, act = 32, made(channels, device, torch.bfloat16)
    held = Held(slots, rows, channels, 1, torch.bfloat16, device)
    g = torch.Generator().manual_seed(2)
    for i in range(50):
        x = noise(slots, time, channels, seed=i).to(device, torch.bfloat16)
        shift = torch.randint(0, time + 1, (slots,), generator=g).to(device)
        silence = Silence(torch.full((slots,), 3, device=device), 3)
        old, ends = held.view.clone(), held.push(shift).ends[0]
        found = kernels.join(held.view, ends, x, act.curve, silence.rows)
        assert torch.equal(found[:, :rows], old)
        assert torch.equal(found[:, rows + 3 :], kernels.snake(x, act.curve)[:, 3:])
        assert not found[:, rows : rows + 3].any()
        assert torch.equal(held.view, torch.gather(found, 1, ends.expand(-1, -1, channels)))


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "usable", lambda x: True)
    check_captured(small_vocoder(CONFIG, device))

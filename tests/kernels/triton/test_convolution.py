"""What stands around the vocoder's convolutions, against plain PyTorch; a whole vocoder with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.layers import streaming
from stretto.layers.streaming import (
    CausalConv,
    Joint,
    OverlapUpConv,
    Push,
    Silence,
    Snake,
    Tail,
    residual,
)
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.weights import build
from tests.kernels.triton.vocoders import (
    CONFIG,
    check_captured,
    noise,
    play,
    random_codes,
    random_stream,
    small_vocoder,
)

kernels = pytest.importorskip("stretto.kernels.triton.convolution")
snakes = pytest.importorskip("stretto.kernels.triton.snake")

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Layers are the reference here, whatever is usable, and convolutions are not rounded to
    TF32."""
    monkeypatch.setattr(streaming, "usable", lambda x: False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if device.type == "cpu":  # the interpreter takes as long as there are programs
        monkeypatch.setattr(snakes, "CHANNELS", 256)
        monkeypatch.setattr(kernels, "COPIED", 256)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative, of all values together."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


class Behind:
    """The next convolution: its activation, its tails with noise in them, and some rows before the
    beginning."""

    def __init__(
        self, slots: int, time: int, channels: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        act = Snake(channels)
        for i, p in enumerate(act.parameters()):
            p.data.copy_(noise(channels, seed=20 + i, scale=0.5))
        act.to(device, dtype).prepare()
        rows = 6
        self.held = noise(slots, rows, channels, seed=22).to(device, dtype)
        taken = torch.arange(slots, device=device) * 2 % (time + 1)  # the first slot is idle
        self.ends = (taken[:, None] + torch.arange(rows, device=device)).unsqueeze(2)
        self.silence = Silence(torch.arange(slots, device=device) * 5 - 2, time)
        self.joint = Joint(Tail(0, rows, channels, 1), act, self.silence)

    def push(self) -> Push:
        return Push([self.held], [self.ends])

    def check(self, x: torch.Tensor, buffer: torch.Tensor, held: torch.Tensor) -> None:
        """Is `buffer` what the kernels' own join makes of x, to the bit, and did `held` become the
        tail?"""
        curve, wanted = self.joint.act.curve, self.held.clone()
        assert torch.equal(buffer, snakes.join(wanted, self.ends, x, curve, self.silence.rows))
        assert torch.equal(held, wanted)
        assert torch.equal(held[0], self.held[0])


class Unit:
    """The layers of a residual unit, and inputs to its end."""

    def __init__(
        self, channels: int, dilation: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.act, self.conv = Snake(channels), CausalConv(channels, channels, 7, dilation)
        self.mix = CausalConv(channels, channels, 1)
        for i, layer in enumerate((self.act, self.conv, self.mix)):
            for j, p in enumerate(layer.parameters()):
                scale = 0.5 if p.dim() == 1 else p[0].numel() ** -0.5
                p.data.copy_(noise(*p.shape, seed=channels + 10 * i + j, scale=scale))
            layer.to(device, dtype)
        self.act.prepare()

    def inputs(self, slots: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and the buffer that its convolution reads."""
        like, channels = self.mix.conv.bias, self.mix.conv.bias.numel()
        x = noise(slots, time, channels, seed=time)
        return x.to(like), noise(slots, self.conv.reach + time, channels, seed=time + 1).to(like)

    def wide(self) -> Unit:
        """The same weights in float64."""
        other = Unit(
            self.mix.conv.bias.numel(), self.conv.dilation, self.mix.conv.bias.device, torch.float64
        )
        for mine, theirs in zip(self.layers(), other.layers(), strict=True):
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                q.data.copy_(p)
        other.act.prepare()
        return other

    def layers(self) -> tuple[torch.nn.Module, ...]:
        return self.act, self.conv, self.mix

    def run(
        self, x: torch.Tensor, buffer: torch.Tensor, behind: Behind | None = None
    ) -> torch.Tensor:
        behind = Behind(*x.shape, x.device, x.dtype) if behind is None else behind
        return residual(x, buffer, self.conv, self.act, self.mix, behind.push(), behind.joint)[0]


def finish(
    unit: Unit, x: torch.Tensor, y: torch.Tensor, behind: Behind
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows on the convolution, by kernels."""
    shift, mix = unit.conv.conv.bias, unit.mix.conv
    x, buffer = kernels.finish(
        x, y, shift, unit.act.curve, mix.weight[:, 0], mix.bias, behind.joint.after()
    )
    return x, buffer


@BOTH
@pytest.mark.parametrize(
    ("channels", "slots", "time"),
    [
        (96, 1, 1),
        (96, 3, 43),
        (96, 1, 64),
        (192, 2, 33),
        (192, 1, 5),
        (384, 3, 31),
        (768, 1, 7),
        (128, 5, 13),
    ],
)
def test_the_end_of_a_unit(
    channels: int, slots: int, time: int, dtype: torch.dtype, device: torch.device
) -> None:
    unit, behind = Unit(channels, 3, device, dtype), Behind(slots, time, channels, device, dtype)
    x, buffer = unit.inputs(slots, time)
    given = x.clone()
    truth = unit.wide().run(x.double(), buffer.double())
    found, after = finish(unit, x, unit.conv(buffer, biased=False), behind)
    assert found.shape == x.shape
    assert torch.equal(x, given)
    if dtype == torch.float32:
        assert error(found, truth) < 1e-6
    else:
        assert error(found, truth) < min(
            5e-3, error(unit.run(x, buffer), truth)
        )  # closer than the plain way
    held = behind.held.clone()
    snakes.advance(held, behind.ends, after)
    behind.check(found, after, held)


@BOTH
@pytest.mark.parametrize("tile", kernels.TILES, ids=lambda t: str(t.size))
@pytest.mark.parametrize("rows", [1, 131])
def test_products_in_tiles_of_every_size(
    rows: int,
    tile: object,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "pick", lambda rows, channels: tile)
    x, y = (noise(1, rows, 256, seed=i).to(device, dtype) for i in (1, 2))
    weight, bias = (
        noise(256, 256, seed=3, scale=1 / 16).to(device, dtype),
        noise(256, seed=4).to(device, dtype),
    )
    truth = x.double() + bias.double() + y.double() @ weight.double().T
    behind = Behind(1, rows, 256, device, dtype)
    found, after = kernels.add_product(x, y, weight, bias, behind.joint.after())
    assert error(found, truth) < (1e-6 if dtype == torch.float32 else 3e-3)
    held = behind.held.clone()
    snakes.advance(held, behind.ends, after)
    behind.check(found, after, held)


def test_small_steps_get_small_tiles() -> None:
    """One frame of one stream, of eight, and four frames of 32 streams, at 768 and 384 channels."""
    assert [kernels.pick(rows, 768).size for rows in (32, 256, 4096)] == [32, 32, 128]
    assert [kernels.pick(rows, 384).size for rows in (160, 1280, 20480)] == [32, 64, 128]


@pytest.mark.parametrize("shape", [(1, 1, 33), (2, 130, 96)], ids=str)
def test_snake_of_a_shifted_input(shape: tuple[int, int, int], device: torch.device) -> None:
    act = Unit(shape[2], 1, device, torch.float32).act
    x, shift = noise(*shape, seed=5).to(device), noise(shape[2], seed=6).to(device)
    torch.testing.assert_close(
        snakes.snake(x, act.curve, shift), snakes.snake(x + shift, act.curve), rtol=0, atol=1e-6
    )


@BOTH
@pytest.mark.parametrize(
    ("slots", "time", "outputs", "rate"),
    [(1, 1, 768, 8), (3, 5, 96, 3), (2, 33, 192, 4), (2, 34, 5, 3)],
)
def test_halves_add_up_to_the_very_bits(
    slots: int, time: int, outputs: int, rate: int, dtype: torch.dtype, device: torch.device
) -> None:
    y = noise(slots, 1 + time, 2 * rate * outputs, seed=7).to(device, dtype)
    early, late = y.chunk(2, 2)
    behind = Behind(slots, time * rate, outputs, device, dtype)
    found, after = kernels.add_halves(y, outputs, behind.joint.after())
    assert torch.equal(found, (early[:, 1:] + late[:, :-1]).view(slots, time * rate, outputs))
    held = behind.held.clone()
    snakes.advance(held, behind.ends, after)
    behind.check(found, after, held)


@BOTH
@pytest.mark.parametrize(
    ("slots", "time", "channels", "dilation"),
    [(1, 1, 7, 1), (2, 33, 64, 3), (3, 16, 100, 9), (1, 5, 768, 1)],
)
def test_windows_are_the_rows_of_the_buffer(
    slots: int, time: int, channels: int, dilation: int, dtype: torch.dtype, device: torch.device
) -> None:
    conv = CausalConv(channels, 1, 7, dilation)
    buffer = noise(slots, conv.reach + time, channels, seed=8).to(device, dtype)
    assert torch.equal(kernels.windows(buffer, 7, dilation), conv._windows(buffer))


@BOTH
@pytest.mark.parametrize(
    ("slots", "time", "channels", "dilation"),
    [(1, 1, 7, 1), (2, 129, 96, 1), (3, 16, 100, 3), (1, 7, 192, 9)],
)
def test_a_convolution_to_one_channel(
    slots: int, time: int, channels: int, dilation: int, dtype: torch.dtype, device: torch.device
) -> None:
    conv = CausalConv(channels, 1, 7, dilation)
    conv.conv.weight.data.copy_(noise(1, 7, channels, seed=11, scale=(7 * channels) ** -0.5))
    conv.conv.bias.data.fill_(0.3)
    buffer = noise(slots, conv.reach + time, channels, seed=12).to(device, dtype)
    conv.to(device, dtype)
    found = kernels.single(buffer, conv.conv.weight, conv.conv.bias, dilation)
    assert found.shape == (slots, time, 1)
    assert (
        error(found, conv.double()(buffer.double())) < 1e-6
    )  # in bfloat16 too: nothing is rounded on the way


@BOTH
def test_layers_choose_the_kernels(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they choose equals the plain way, the moved tail too; channels that do not fit take
    the plain way's end."""
    up, last = OverlapUpConv(64, 96, 3), CausalConv(64, 1, 7)
    for i, p in enumerate([*up.parameters(), *last.parameters()]):
        p.data.copy_(noise(*p.shape, seed=30 + i, scale=0.1))
    up.to(device, dtype).prepare()
    last.to(device, dtype)
    before = noise(2, 8, 64, seed=10).to(device, dtype)
    units = [Unit(96, 9, device, dtype), Unit(36, 9, device, dtype)]
    given = [u.inputs(2, 21) for u in units]

    def run() -> list[torch.Tensor]:
        first = Behind(2, 21, 96, device, dtype)
        found = [last(before), *up(before, first.push(), first.joint), first.held]
        for unit, (x, buffer) in zip(units, given, strict=True):
            behind = Behind(*x.shape, device, dtype)
            found += residual(x, buffer, unit.conv, unit.act, unit.mix, behind.push(), behind.joint)
            found.append(behind.held)
        return found

    wanted = run()
    monkeypatch.setattr(streaming, "usable", lambda x: True)
    calls: list[str] = []
    for name in ("finish", "windows", "add_halves", "single"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, n=name, k=kernel: (calls.append(n), k(*a))[1])
    found = run()
    assert calls == ["single", "add_halves", "windows", "finish", "windows"]
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.fixture(scope="module")
def vocoder(device: torch.device) -> Code2Wav:
    """Blocks of 384, 192 and 96 channels."""
    return small_vocoder(replace(CONFIG, upsample_rates=(2, 1, 2), decoder_dim=768), device)


def use_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(streaming, "usable", lambda x: True)
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "ENOUGH", 1)


@pytest.mark.parametrize("few_rows", [streaming.FEW_ROWS, 0], ids=["products", "convolutions"])
def test_streams_in_pieces_equal_one_decode_without_kernels(
    few_rows: int, vocoder: Code2Wav, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [random_stream(vocoder, n, n) for n in (2, 3)]
    whole = [vocoder.decode(s) for s in streams]
    monkeypatch.setattr(streaming, "FEW_ROWS", few_rows)
    use_kernels(monkeypatch, device)
    monkeypatch.setattr(Snake, "forward", None)  # every unit ends in the kernels
    found = play(vocoder, vocoder.state(2, 2), streams, [(2, [0, 2]), (2, [2, 1])])
    for mine, wanted in zip(found, whole, strict=True):
        assert 0.01 < float(wanted.abs().max()) < 1.0
        torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-6)


def test_a_step_in_bfloat16_is_no_further_from_the_truth_than_the_plain_way(
    vocoder: Code2Wav, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that are rounded for the truth, too. Over 96 samples: a few alone may fall either
    way."""
    half, exact = (
        build(lambda: Code2Wav(vocoder.config), device, dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    given, rounded = targets(vocoder, ""), targets(exact, "")
    for name, view in targets(half, "").items():
        view.copy_(given[name])
        rounded[name].copy_(view)
    half.prepare()
    exact.prepare()
    streams = [random_stream(vocoder, 4, i) for i in range(4)]
    truth, plain = (
        torch.cat(play(m, m.state(4, 4), streams, [(4, [4] * 4)])) for m in (exact, half)
    )
    use_kernels(monkeypatch, device)
    found = torch.cat(play(half, half.state(4, 4), streams, [(4, [4] * 4)]))
    assert error(plain, truth) < 0.1
    assert error(found, truth) < error(plain, truth)


def test_an_idle_slot_keeps_every_bit(
    vocoder: Code2Wav, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = vocoder.state(2, 1)
    state.tails.copy_(noise(*state.tails.shape, seed=1))
    state.frames.fill_(5)
    before = state.tails.clone()
    use_kernels(monkeypatch, device)
    vocoder.step(state, random_codes(vocoder, 2, 2, 1, seed=1), torch.tensor([1, 0], device=device))
    assert torch.equal(state.tails[1], before[1])
    assert not torch.equal(state.tails[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "rows"), [(768, 32), (384, 160), (192, 640), (96, 1920)])
@pytest.mark.parametrize(("slots", "frames"), [(1, 1), (8, 1), (3, 8), (32, 4)])
def test_real_sizes(
    slots: int, frames: int, channels: int, rows: int, device: torch.device
) -> None:
    """The end of a unit in bfloat16, each row against the truth, and the same bits twice."""
    unit = Unit(channels, 1, device, torch.bfloat16)
    x, y = (
        noise(slots, frames * rows, channels, seed=i).to(device, torch.bfloat16) for i in (1, 2)
    )
    behind = Behind(*x.shape, device, torch.bfloat16)
    found, after = finish(unit, x, y, behind)
    exact = unit.wide()
    truth = (x.double() + exact.mix(exact.act(y.double() + exact.conv.conv.bias))).float()
    worst = (found.float() - truth).norm(dim=2) / truth.norm(dim=2)
    assert float(worst.max()) < 1e-2
    held = behind.held.clone()
    snakes.advance(held, behind.ends, after)
    behind.check(found, after, held)
    again = finish(unit, x, y, behind)
    assert torch.equal(again[0], found)
    assert torch.equal(again[1][:, 6:], after[:, 6:])


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one(
    vocoder: Code2Wav, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, device)
    check_captured(vocoder)

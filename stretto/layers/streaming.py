"""Causal convolutions that run over a stream piece by piece, for many streams at once.

Every activation is laid out as rows: [slots, time, channels]. So are the tails, the last inputs of
a convolution that its next call still needs. With channels innermost the linear maps, norms and
1-tap convolutions are plain matrix products without a transpose, the 7-tap ones reach the library
as channels-last, and a tail is a run of whole rows.

One rule keeps slots independent: a convolution works on `[tail | input]`, and the new tail of a
slot are the rows that end where *its own* valid input ends. Padding behind that end is never kept,
and a slot with no valid input gets back exactly the rows it had, bit for bit. Nothing here branches
on a tensor's value or waits for the device.

Vocoders call this on the thread and stream that run their step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from stretto.kernels.triton import usable
from stretto.layers.targets import frozen

if TYPE_CHECKING:
    from stretto.kernels.triton.convolution import Next

FEW_ROWS = 256
"""Up to here a convolution is one matrix product over copied windows, which reads its weight once
and well; beyond, the copies (7 times the input) cost more than the library's convolution loses."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What one convolution keeps of its input per slot."""

    # place among the tails of the model
    index: int
    num_rows: int
    channels: int
    # rows of this input per frame
    rate: int


class TailLayout:
    """Hands out the tails while a model is built; then knows how to lay them out and where they
    end."""

    def __init__(self) -> None:
        self.tails: list[Tail] = []

    def add(self, num_rows: int, channels: int, rate: int) -> Tail:
        tail = Tail(len(self.tails), num_rows, channels, rate)
        self.tails.append(tail)
        return tail

    @property
    def width(self) -> int:
        """Values per slot."""
        return sum(t.num_rows * t.channels for t in self.tails)

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[slots, width] -> one view [slots, rows, channels] per tail. One buffer, so that a reset
        is one call."""
        parts = torch.split(flat, [t.num_rows * t.channels for t in self.tails], 1)
        return tuple(
            p.view(-1, t.num_rows, t.channels) for p, t in zip(parts, self.tails, strict=True)
        )

    def rates(self) -> list[int]:
        return [t.rate for t in self.tails for _ in range(t.num_rows)]

    def offsets(self) -> list[int]:
        return [row for t in self.tails for row in range(t.num_rows)]

    def split_ends(self, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[slots, all rows of all tails] -> one [slots, rows, 1] per tail."""
        return torch.split(ends.unsqueeze(-1), [t.num_rows for t in self.tails], 1)


@dataclass(slots=True)
class Silence:
    """First rows of an input that a convolution must read as zeros: rows before a stream's
    beginning, which exist only because all slots share one shape."""

    # [slots] int64: how many; none if it is below 1
    rows: torch.Tensor
    most: int
    _mask: torch.Tensor | None = field(default=None, init=False)

    def mask(self) -> torch.Tensor:
        """[slots, most, 1] bool"""
        if self._mask is None:
            row = torch.arange(self.most, device=self.rows.device)
            self._mask = (row < self.rows[:, None]).unsqueeze(2)
        return self._mask


@dataclass(slots=True)
class Push:
    """One step's view of the state: where each tail lies, and which rows of `[tail | input]`
    replace it."""

    tails: Sequence[torch.Tensor]
    ends: Sequence[torch.Tensor]

    def join(
        self, tail: Tail, x: torch.Tensor, act: Snake | None = None, silence: Silence | None = None
    ) -> torch.Tensor:
        """`[tail | act(x)]` as one buffer, with the tail moved on in the state."""
        stored, ends, rows = self.tails[tail.index], self.ends[tail.index], tail.num_rows
        if usable(x):
            from stretto.kernels.triton.snake import join

            curve = None if act is None else act.curve
            silent = None if silence is None else silence.rows
            return join(stored, ends, x, curve, silent)
        buffer = x.new_empty(x.shape[0], rows + x.shape[1], x.shape[2])
        buffer[:, :rows] = stored
        fresh = buffer[:, rows:]
        if act is None:
            fresh.copy_(x)
        else:
            act.into(x, fresh)
        if silence is not None:
            fresh[:, : silence.most].masked_fill_(silence.mask()[:, : x.shape[1]], 0)
        torch.gather(buffer, 1, ends.expand(-1, -1, x.shape[2]), out=stored)
        return buffer

    def advance(self, tail: Tail, buffer: torch.Tensor) -> None:
        """The rest of a join, by kernels, where `buffer` has its fresh rows already."""
        from stretto.kernels.triton.snake import advance

        advance(self.tails[tail.index], self.ends[tail.index], buffer)


@dataclass(frozen=True, slots=True)
class Joint:
    """What a join needs to know of the convolution behind it, for whoever makes the rows and can do
    it on the way."""

    tail: Tail
    act: Snake
    silence: Silence

    def after(self) -> Next:
        from stretto.kernels.triton.convolution import Next

        return Next(self.tail.num_rows, self.act.curve, self.silence.rows)


class Snake(nn.Module):
    """x + sin^2(e^alpha x) / (e^beta + 1e-9), per channel. Zero stays zero."""

    rate: torch.Tensor
    gain: torch.Tensor
    # [2, channels] float32: both again, not rounded to the weights' type, for the kernels
    curve: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = frozen(channels)
        self.beta = frozen(channels)
        self.register_buffer("rate", torch.empty(channels), persistent=False)
        self.register_buffer("gain", torch.empty(channels), persistent=False)
        self.register_buffer("curve", None, persistent=False)

    def prepare(self) -> None:
        self.curve = torch.stack((self.alpha.float().exp(), 1.0 / (self.beta.float().exp() + 1e-9)))
        self.rate.copy_(self.alpha.exp())
        self.gain.copy_(1.0 / (self.beta.exp() + 1e-9))

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        wave = (x * self.rate).sin_()
        torch.addcmul(x, wave.mul_(wave), self.gain, out=out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if usable(x):
            from stretto.kernels.triton.snake import snake

            return snake(x, self.curve)
        wave = (x * self.rate).sin_()
        return torch.addcmul(x, wave.mul_(wave), self.gain)


class Taps(nn.Module):
    """A convolution's weight and bias, the weight in the order its product wants it.

    The checkpoint's [a, b, taps] is a permuted view of what lies in memory."""

    def __init__(
        self, shape: tuple[int, int, int], order: tuple[int, int, int], channels: int
    ) -> None:
        super().__init__()
        self.order = order
        self.weight = frozen(*shape)
        self.bias = frozen(channels)

    def stored(self) -> torch.Tensor:
        """The weight in the checkpoint's order, without a copy."""
        return self.weight.permute(self.order)

    def own_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}conv.weight": self.stored().data, f"{prefix}conv.bias": self.bias.data}


class CausalConv(nn.Module):
    """A causal convolution over `[tail | x]` (see `Push.join`)."""

    def __init__(
        self, inputs: int, outputs: int, taps: int, dilation: int = 1, depthwise: bool = False
    ) -> None:
        super().__init__()
        self.taps = taps
        self.dilation = dilation
        self.reach = (taps - 1) * dilation
        self.groups = inputs if depthwise else 1
        # In memory [out, taps, in]: as the library's [out, in, taps] that is channels-last, like
        # the rows.
        self.conv = Taps((outputs, taps, inputs // self.groups), (0, 2, 1), outputs)

    def forward(self, buffer: torch.Tensor, biased: bool = True) -> torch.Tensor:
        """[slots, reach + time, in] -> [slots, time, out], without the bias if whoever comes next
        adds it: the library's convolutions add it by one more pass over the output. A single
        channel out may be float32."""
        bias = self.conv.bias if biased else None
        if bias is not None and bias.numel() == 1 and usable(buffer):
            from stretto.kernels.triton.convolution import single

            return single(buffer, self.conv.weight, bias, self.dilation)
        if self.taps == 1:
            return F.linear(buffer, self.conv.weight[:, 0], bias)
        if buffer.shape[1] - self.reach <= FEW_ROWS and self.groups == 1:
            return F.linear(self._windows(buffer), self.conv.weight.flatten(1), bias)
        # As a picture of height 1: the library takes channels-last pictures as they are, but would
        # transpose rows.
        picture, weight = buffer.transpose(1, 2).unsqueeze(2), self.conv.stored().unsqueeze(2)
        y = F.conv2d(picture, weight, bias, dilation=(1, self.dilation), groups=self.groups)
        return y.squeeze(2).transpose(1, 2)

    def _windows(self, buffer: torch.Tensor) -> torch.Tensor:
        """What each output row reads, side by side: [slots, time, taps * in]."""
        if usable(buffer):
            from stretto.kernels.triton.convolution import windows

            return windows(buffer, self.taps, self.dilation)
        slots, rows, channels = buffer.shape
        slot, row, channel = buffer.stride()
        shape = (slots, rows - self.reach, self.taps, channels)
        return buffer.as_strided(shape, (slot, row, row * self.dilation, channel)).flatten(2)


def residual(
    x: torch.Tensor,
    buffer: torch.Tensor,
    conv: CausalConv,
    act: Snake,
    mix: CausalConv,
    push: Push,
    joint: Joint,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + mix(act(conv(buffer))), and the next convolution's buffer with it. `mix` has one tap and
    as many channels out as in."""
    if usable(x):
        from stretto.kernels.triton.convolution import finish, fits

        if fits(x.shape[2]):
            y = conv(buffer, biased=False)
            weight = mix.conv.weight[:, 0]
            x, buffer = finish(
                x, y, conv.conv.bias, act.curve, weight, mix.conv.bias, joint.after()
            )
            push.advance(joint.tail, buffer)
            return x, buffer
    x = x + mix(act(conv(buffer)))
    return x, push.join(joint.tail, x, joint.act, joint.silence)


class UpConv(nn.Module):
    """A transposed convolution with as many taps as its stride: every input row becomes `rate` rows
    of its own."""

    bias: torch.Tensor

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.conv = Taps((rate, outputs, inputs), (2, 1, 0), outputs)
        self.register_buffer("bias", torch.empty(rate * outputs), persistent=False)

    def prepare(self) -> None:
        self.bias.view(-1, self.conv.bias.numel()).copy_(self.conv.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[slots, time, in] -> [slots, time * rate, out]"""
        y = F.linear(x, self.conv.weight.flatten(0, 1), self.bias)
        return y.view(y.shape[0], -1, self.conv.bias.numel())


class OverlapUpConv(nn.Module):
    """A transposed convolution with twice as many taps as its stride, trimmed by one stride on both
    sides.

    Output block m needs the input rows m and m + 1, so a stream's first input row gives no output
    yet. With a fixed shape it does: a block that belongs before the beginning, to be muted by
    whoever reads it. One product makes both halves of every row's contribution, and two neighbours
    are added; no output is made to be trimmed."""

    bias: torch.Tensor

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.conv = Taps((2 * rate, outputs, inputs), (2, 1, 0), outputs)
        self.register_buffer("bias", torch.empty(2 * rate * outputs), persistent=False)

    def prepare(self) -> None:
        # a sum of two contributions takes the bias once
        early, late = self.bias.view(2, -1, self.outputs)
        early.copy_(self.conv.bias)
        late.zero_()

    def forward(
        self, buffer: torch.Tensor, push: Push, joint: Joint
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[slots, 1 + time, in] -> [slots, time * rate, out], and the next convolution's buffer
        with it"""
        y = F.linear(buffer, self.conv.weight.flatten(0, 1), self.bias)
        if usable(y):
            from stretto.kernels.triton.convolution import add_halves

            x, buffer = add_halves(y, self.outputs, joint.after())
            push.advance(joint.tail, buffer)
            return x, buffer
        early, late = y.chunk(2, 2)
        x = (early[:, 1:] + late[:, :-1]).view(y.shape[0], -1, self.outputs)
        return x, push.join(joint.tail, x, joint.act, joint.silence)

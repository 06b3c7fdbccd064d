"""One vector of a voice: log-mel frames of a clip, through an ECAPA-TDNN. Whole clips, in
float32."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from stretto.layers.targets import frozen
from stretto.layers.upload import to_device
from stretto.models.parts import Parts
from stretto.models.qwen3_tts.config import SAMPLE_RATE, SpeakerConfig

SIZE, HOP, FLOOR = 1024, 256, 1e-5
SHORTEST = 5 * HOP
"""Samples that the reflected edges need."""


@cache
def mel_filters(bins: int) -> torch.Tensor:
    """[bins, SIZE / 2 + 1]: Slaney's scale, linear below 1 kHz, each filter of the same area."""
    step, high = math.log(6.4) / 27, SAMPLE_RATE / 2
    edges = torch.linspace(0, 15 + math.log(high / 1000) / step, bins + 2, dtype=torch.float64)
    edges = torch.where(edges < 15, edges * 200 / 3, 1000 * torch.exp(step * (edges - 15)))
    hz = torch.linspace(0, high, SIZE // 2 + 1, dtype=torch.float64)
    low, middle, top = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (hz - low) / (middle - low), (top - hz) / (top - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (top - low)).float()


def log_mel(samples: torch.Tensor, bins: int) -> torch.Tensor:
    """Mono samples [n] -> [bins, n // HOP]"""
    edge = (SIZE - HOP) // 2
    padded = F.pad(samples[None, None], (edge, edge), mode="reflect")[0, 0]
    window = torch.hann_window(SIZE, device=samples.device)
    spectrum = torch.stft(padded, SIZE, HOP, SIZE, window, center=False, return_complex=True)
    power = torch.view_as_real(spectrum).pow(2).sum(-1)
    filters = to_device(mel_filters(bins).numpy(), samples.device, torch.float32)
    return (filters @ torch.sqrt(power + 1e-9)).clamp(min=FLOOR).log()


class Conv(nn.Module):
    """As long as its input: the edges are reflected."""

    def __init__(self, inputs: int, outputs: int, taps: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.dilation = dilation
        self.sides = (taps - 1) * dilation
        self.weight = frozen(outputs, inputs, taps)
        self.bias = frozen(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[channels, time]"""
        x = x[None]
        if self.sides:
            x = F.pad(x, (self.sides // 2, self.sides - self.sides // 2), mode="reflect")
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation)[0]


class Tdnn(nn.Module):
    def __init__(self, inputs: int, outputs: int, taps: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, taps, dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x))


class Res2Net(nn.Module):
    """The input in parts, each of which (but the first) also hears the one before it."""

    def __init__(self, channels: int, scale: int, taps: int, dilation: int) -> None:
        super().__init__()
        part = channels // scale
        self.scale = scale
        self.blocks = nn.ModuleList(Tdnn(part, part, taps, dilation) for _ in range(scale - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = x.chunk(self.scale)
        made: list[torch.Tensor] = []
        for part, block in zip(rest, self.blocks, strict=True):
            made.append(block(part + made[-1] if made else part))
        return torch.cat((first, *made))


class Squeeze(nn.Module):
    """Channels weighted by what the whole clip says of them."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels, inner)
        self.conv2 = Conv(inner, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.conv2(F.relu(self.conv1(x.mean(1, keepdim=True)))))


class Block(nn.Module):
    def __init__(
        self, inputs: int, channels: int, c: SpeakerConfig, taps: int, dilation: int
    ) -> None:
        super().__init__()
        self.tdnn1 = Tdnn(inputs, channels)
        self.tdnn2 = Tdnn(channels, channels)
        self.res2net_block = Res2Net(channels, c.scale, taps, dilation)
        self.se_block = Squeeze(channels, c.squeeze_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return out


class Pool(nn.Module):
    """Mean and deviation of each channel over the clip, by attention."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.tdnn = Tdnn(3 * channels, inner)
        self.conv = Conv(inner, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even = torch.full_like(x, 1 / x.shape[1])
        context = [s[:, None].expand_as(x) for s in _moments(x, even)]
        weights = self.conv(torch.tanh(self.tdnn(torch.cat((x, *context))))).softmax(1)
        return torch.cat(_moments(x, weights))


def _moments(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = (weights * x).sum(1)
    return mean, (weights * (x - mean[:, None]) ** 2).sum(1).clamp(1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    def __init__(self, c: SpeakerConfig) -> None:
        super().__init__()
        self.config = c
        ch = c.channels
        blocks: list[nn.Module] = [Tdnn(c.mel_bins, ch[0], c.kernels[0], c.dilations[0])]
        for i in range(1, len(ch) - 1):
            blocks.append(Block(ch[i - 1], ch[i], c, c.kernels[i], c.dilations[i]))
        self.blocks = nn.ModuleList(blocks)
        self.mfa = Tdnn(ch[-1], ch[-1], c.kernels[-1], c.dilations[-1])
        self.asp = Pool(ch[-1], c.attention_channels)
        self.fc = Conv(2 * ch[-1], c.size)

    def run(self, samples: torch.Tensor) -> Parts[torch.Tensor]:
        """Mono samples [n], at least SHORTEST -> [size], used as it is."""
        first, *blocks = self.blocks
        x, made = first(log_mel(samples, self.config.mel_bins)), []
        for block in blocks:
            yield
            x = block(x)
            made.append(x)
        yield
        out: torch.Tensor = self.fc(self.asp(self.mfa(torch.cat(made)))[:, None])[:, 0]
        return out

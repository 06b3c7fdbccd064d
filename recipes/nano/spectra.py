"""Spectra and the spectral loss of the codec. Called by `codec.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from recipes.nano.audio import RATE


def mel_bank(fft: int, bins: int) -> Tensor:
    """Triangles over the bins of a spectrum, evenly spaced in mel."""
    mel, top = (
        np.linspace(0.0, 2595 * np.log10(1 + RATE / 2 / 700), bins + 2),
        np.linspace(0, RATE / 2, fft // 2 + 1),
    )
    points = 700 * (10 ** (mel / 2595) - 1)
    up = (top[None] - points[:-2, None]) / (points[1:-1] - points[:-2])[:, None]
    down = (points[2:, None] - top[None]) / (points[2:] - points[1:-1])[:, None]
    return torch.tensor(np.maximum(0, np.minimum(up, down)), dtype=torch.float32)


class Spectrum(nn.Module):
    window: Tensor
    bank: Tensor

    def __init__(self, fft: int, hop: int, mels: int) -> None:
        super().__init__()
        self.fft, self.hop = fft, hop
        self.register_buffer("window", torch.hann_window(fft), persistent=False)
        self.register_buffer("bank", mel_bank(fft, mels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, samples] -> magnitudes [B, bins, time]."""
        return torch.stft(x, self.fft, self.hop, self.fft, self.window, center=True,
            pad_mode="constant",
                          return_complex=True).abs()  # fmt: skip

    def mel(self, magnitude: Tensor, floor: float) -> Tensor:
        return torch.log((self.bank @ magnitude).clamp_min(floor))


class SpectralLoss(nn.Module):
    """Log-mel at six resolutions; log magnitude and spectral convergence at the three longest."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((2048, 128), (1024, 96), (512, 48), (256, 24), (128, 12), (64, 6))
        self.spectra = nn.ModuleList(Spectrum(fft, fft // 4, mels) for fft, mels in sizes)

    def forward(self, said: Tensor, wanted: Tensor) -> Tensor:
        mel = line = torch.zeros((), device=said.device)
        for i, s in enumerate(self.spectra):
            a = s(said)
            with torch.no_grad():
                b = s(wanted)
                target = s.mel(b, 1e-4)
            mel = mel + (s.mel(a, 1e-4) - target).abs().mean()
            if i < 3:
                log = (torch.log(a.clamp_min(1e-3)) - torch.log(b.clamp_min(1e-3))).abs().mean()
                line = line + 0.5 * log + 0.5 * (a - b).norm() / b.norm().clamp_min(1e-3)
        return 1.5 * mel / len(self.spectra) + line / 3

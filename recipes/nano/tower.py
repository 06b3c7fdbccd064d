"""The audio encoder as a trainable module in shapes that never change, with the parameter names of
`transformers`.

Clips are cut or padded to one width; rows behind a clip's end are not attended to and mean nothing.
Called by `listen.py`; a test compares it with the engine's encoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.qwen3_omni.audio_encoder import sinusoid
from stretto.models.qwen3_omni.config import AudioConfig


class Attention(nn.Module):
    def __init__(self, c: AudioConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            p(x).view(b, t, self.heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y: Tensor = self.out_proj(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, d)
        )
        return y


class Layer(nn.Module):
    def __init__(self, c: AudioConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_attn = Attention(c)
        self.self_attn_layer_norm, self.final_layer_norm = (
            nn.LayerNorm(c.hidden_size),
            nn.LayerNorm(c.hidden_size),
        )
        self.fc1, self.fc2 = (
            nn.Linear(c.hidden_size, c.ffn_size),
            nn.Linear(c.ffn_size, c.hidden_size),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + F.dropout(
            self.self_attn(self.self_attn_layer_norm(x), mask), self.dropout, self.training
        )
        inner = self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return x + F.dropout(inner, self.dropout, self.training)


class Tower(nn.Module):
    def __init__(self, c: AudioConfig, dropout: float = 0.1) -> None:
        super().__init__()
        self.config = c
        channels, hidden = c.conv_channels, c.hidden_size
        self.conv2d1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv_out = nn.Linear(channels * c.conv_bins, hidden, bias=False)
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c.num_layers))
        self.ln_post = nn.LayerNorm(hidden)
        self.proj1, self.proj2 = nn.Linear(hidden, hidden), nn.Linear(hidden, c.output_size)
        for layer in self.layers:
            for out in (layer.self_attn.out_proj, layer.fc2):
                nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * c.num_layers))

    def forward(self, mel: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Mel [B, bins, chunks * 100], zero behind `frames` [B] -> rows [B, chunks * 13, out] and
        how many are real."""
        b, bins, width = mel.shape
        size = self.config.chunk_frames
        x = mel.view(b, bins, width // size, size).transpose(1, 2).reshape(-1, 1, bins, size)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = F.gelu(conv(x))
        n, c, high, t = x.shape
        x = self.conv_out(x.permute(0, 3, 1, 2).reshape(n, t, c * high))
        x = (x + sinusoid(t, x.shape[-1], x.device).to(x.dtype)).view(b, -1, x.shape[-1])
        counts = rows_of(frames, size)
        mask = (torch.arange(x.shape[1], device=x.device) < counts[:, None].clamp_min(1))[
            :, None, None
        ]
        for layer in self.layers:
            x = layer(x, mask)
        y: Tensor = self.proj2(F.gelu(self.proj1(self.ln_post(x))))
        return y, counts


def rows_of(frames: Tensor, chunk: int) -> Tensor:
    """Rows that so many mel frames become."""
    tail = frames % chunk
    for _ in range(3):
        tail = (tail + 1) // 2
    return frames // chunk * 13 + tail

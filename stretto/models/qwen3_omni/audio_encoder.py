"""The audio encoder: log-mel frames in, thinker rows out, window by window.

Owns the convolution front (one second at a time) and the transformer (one 8-second attention window
at a time). Windows do not see each other, so a clip may be encoded as it is needed, or as it is
spoken. The thinker stage calls all of it on its own thread, on the current stream; nothing here
waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from stretto.layers.linear import Linear
from stretto.models.qwen3_omni.config import AudioConfig, conv_length

ReplayWindows = Callable[[Sequence[torch.Tensor]], list[torch.Tensor] | None]
"""`WindowGraphs.run`: windows [t, hidden] -> [t, out] each by a captured pass; None if none
fits."""

# Launch sizes. At the released size the first convolution makes 3 MB (bf16) per chunk, so 64 chunks
# peak near 400 MB with the activation's copy; 8 windows are what the largest captured graph takes.
# Other requests wait for one.
CONV_BATCH = 64
CONV_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Of the convolutions' batches on a GPU, filled up with empty chunks: the first use of a size takes
its library a tenth of a second, for which whoever spoke would wait. So there are few, and each is
used once at start."""
WINDOW_BATCH = 8
WINDOW_BATCH_CPU = 4


class Qkv(Linear):
    """q, k and v as one product; the checkpoint has three."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 3 * hidden_size, bias=True)

    def own_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        for kind, parameter in self.named_parameters():
            for name, part in zip(
                ("q_proj", "k_proj", "v_proj"), parameter.data.chunk(3), strict=True
            ):
                views[f"{prefix}{name}.{kind}"] = part
        return views


class Attention(nn.Module):
    """Bidirectional attention inside each window of a batch."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Qkv(config.hidden_size)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        w, t, d = x.shape
        q, k, v = self.qkv(x).view(w, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: torch.Tensor = self.out_proj(mixed.transpose(1, 2).reshape(w, t, d))
        return out


class Layer(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = Linear(config.hidden_size, config.ffn_size, bias=True)
        self.fc2 = Linear(config.ffn_size, config.hidden_size, bias=True)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        out: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class AudioEncoder(nn.Module):
    """Weights only."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        channels, hidden = config.conv_channels, config.hidden_size
        self.conv2d1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.conv_out = Linear(channels * config.conv_bins, hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.ln_post = nn.LayerNorm(hidden)
        self.proj1 = Linear(hidden, hidden, bias=True)
        self.proj2 = Linear(hidden, config.output_size, bias=True)
        self.requires_grad_(False)

    def convolve(self, chunks: torch.Tensor, frames: int | None = None) -> torch.Tensor:
        """[n, bins, frames] -> [n, conv_length(frames), hidden]. Positions count from 0 in every
        chunk. Where only some `frames` are there, each convolution sees zeros behind them, as at
        the end of a shorter chunk."""
        weight = self.conv_out.weight
        x = chunks.to(weight.device, weight.dtype, non_blocking=True)[:, None]
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = F.gelu(conv(x))
            if frames is not None:
                frames = (frames + 1) // 2
                x[..., frames:] = 0
        n, c, bins, t = x.shape
        rows: torch.Tensor = self.conv_out(x.permute(0, 3, 1, 2).reshape(n, t, c * bins))
        return rows + sinusoid(t, rows.shape[2], rows.device).to(rows.dtype)

    def front(
        self,
        chunks: torch.Tensor,
        lengths: Sequence[int],
        padded: bool = True,
        few_sizes: bool = False,
    ) -> list[torch.Tensor]:
        """The rows of each chunk: [n, bins, chunk_frames], zeros behind `lengths`, -> n x
        [conv_length, hidden].

        Bias and activation make the padding visible to the last row. A clip that is shorter than a
        chunk is one alone that is not `padded` to it: nothing is seen behind its frames.
        `few_sizes`: batches are filled up to `CONV_SIZES`."""
        c = self.config
        assert chunks.shape[1] == c.num_mel_bins, (
            f"expected {c.num_mel_bins} bins, got {tuple(chunks.shape)}"
        )
        assert padded or len(chunks) == 1, "a clip that is shorter than a chunk goes alone"
        rows: list[torch.Tensor] = []
        for part in torch.split(chunks, CONV_BATCH):
            n = len(part)
            empty = 0
            if few_sizes:
                empty = next(size for size in CONV_SIZES if size >= n) - n
            rows += self.convolve(
                F.pad(part, (0, 0, 0, 0, 0, empty)), None if padded else lengths[0]
            )[:n]
        return [row[: conv_length(n)] for row, n in zip(rows, lengths, strict=True)]

    def warm(self) -> None:
        """Use every size of the convolutions once, the largest first. At start, on the current
        stream."""
        c, weight = self.config, self.conv_out.weight
        for size in reversed(CONV_SIZES):
            self.convolve(weight.new_zeros(size, c.num_mel_bins, c.chunk_frames))

    def transform(self, rows: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """[windows, t, hidden] -> [windows, t, out]. Rows behind a window's length are padding: not
        attended to, and meaningless in the result. Shapes depend on (windows, t) alone."""
        mask = None
        if lengths is not None:
            keys = torch.arange(rows.shape[1], device=rows.device)
            # A window of length 0 (a padded batch) sees one meaningless row; with none, some
            # kernels make NaN.
            mask = (keys < lengths.clamp(min=1)[:, None])[:, None, None]
        for layer in self.layers:
            rows = layer(rows, mask)
        out: torch.Tensor = self.proj2(F.gelu(self.proj1(self.ln_post(rows))))
        return out

    def window(self, rows: torch.Tensor) -> torch.Tensor:
        """One attention window, alone: [t, hidden] -> [t, out]."""
        return self.transform(rows[None])[0]

    def windows(
        self, rows: Sequence[torch.Tensor], replay: ReplayWindows | None = None
    ) -> list[torch.Tensor]:
        """Several windows in one launch, of any lengths and from any requests; by `replay` if they
        fit."""
        captured = None if replay is None else replay(rows)
        if captured is not None:
            return captured
        lengths = [len(r) for r in rows]
        if len(set(lengths)) == 1:
            return list(self.transform(torch.stack(list(rows))))
        padded = pad_sequence(list(rows), batch_first=True)
        out = self.transform(padded, torch.tensor(lengths).to(padded.device, non_blocking=True))
        return [o[:n] for o, n in zip(out, lengths, strict=True)]

    def encode(self, mel: torch.Tensor, replay: ReplayWindows | None = None) -> torch.Tensor:
        """A whole clip: normalised mel [bins, frames] -> [audio_tokens(frames), out]. No frames, no
        rows."""
        c, frames = self.config, mel.shape[1]
        windows = [mel[:, at : at + c.window_frames] for at in range(0, frames, c.window_frames)]
        outs = [self.proj2.weight.new_empty(0, c.output_size)]
        for at in range(0, len(windows), self.batch):
            outs += self.encode_windows(
                windows[at : at + self.batch], frames >= c.chunk_frames, replay
            )
        return torch.cat(outs)

    @property
    def batch(self) -> int:
        """Windows that are worth a launch of their own; other requests wait for it."""
        return WINDOW_BATCH_CPU if self.proj2.weight.device.type == "cpu" else WINDOW_BATCH

    def encode_windows(
        self,
        mels: Sequence[torch.Tensor],
        padded: bool = True,
        replay: ReplayWindows | None = None,
    ) -> list[torch.Tensor]:
        """Windows of any clips in one launch: normalised mel [bins, frames] each ->
        [audio_tokens(frames), out]. One that is all of a clip shorter than a convolution chunk goes
        alone, and is not `padded` to one. With `replay`, as on a GPU, convolutions come in few
        sizes."""
        c = self.config
        width = c.chunk_frames
        chunks, lengths, per = [], [], []
        for mel in mels:
            bins, n = mel.shape
            assert bins == c.num_mel_bins, (
                f"expected mel of [{c.num_mel_bins}, frames], got {tuple(mel.shape)}"
            )
            count = -(-n // width)
            chunks.append(F.pad(mel, (0, -n % width)).reshape(bins, count, width).transpose(0, 1))
            lengths += [min(width, n - i) for i in range(0, n, width)]
            per.append(count)
        rows = iter(self.front(torch.cat(chunks), lengths, padded, few_sizes=replay is not None))
        return self.windows([torch.cat(list(islice(rows, count))) for count in per], replay)


def sinusoid(length: int, hidden_size: int, device: torch.device) -> torch.Tensor:
    """Fixed position rows [sin | cos], float32. Computed where needed: a handful of rows, and no
    buffer that a module built without storage could lose."""
    half = hidden_size // 2
    step = math.log(10_000) / (half - 1)
    rate = torch.exp(-step * torch.arange(half, device=device, dtype=torch.float32))
    angle = torch.arange(length, device=device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)

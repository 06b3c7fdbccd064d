"""The audio encoder: log-mel frames in, thinker rows out, for whole clips and for speech that is still arriving.

Owns the convolution front (one second at a time), the transformer (one 8-second attention window at a time) and
`AudioStream`, the state of one utterance that is encoded while it is spoken. The thinker stage calls all of it on
its own thread, on the current stream; nothing here waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from stretto.layers.linear import Linear
from stretto.models.qwen3_omni.config import AudioConfig, conv_length
from stretto.models.qwen3_omni.parts import Parts, run_through
from stretto.prompt.mel import RANGE, normalise
from stretto.prompt.prompt import Array

if TYPE_CHECKING:
    from stretto.models.qwen3_omni.audio_graphs import WindowGraphs

# Launch sizes. At the released size the first convolution makes 3 MB (bf16) per chunk, so 64 chunks peak near
# 400 MB with the activation's copy; 32 windows are 3,328 tokens, enough to fill a device. Other requests wait for one.
CONV_BATCH = 64
WINDOW_BATCH = 32
WINDOW_BATCH_CPU = 4


class Qkv(Linear):
    """q, k and v as one product; the checkpoint has three."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 3 * hidden_size, bias=True)

    def own_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        for kind, parameter in self.named_parameters():
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parameter.data.chunk(3), strict=True):
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
    """Weights only; everything that belongs to one utterance is in `AudioStream`."""

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
        self.graphs: WindowGraphs | None = None  # set where there are any, when the weights are in place
        self.requires_grad_(False)

    def convolve(self, chunks: torch.Tensor) -> torch.Tensor:
        """[n, bins, frames] -> [n, conv_length(frames), hidden]. Positions count from 0 in every chunk."""
        weight = self.conv_out.weight
        x = chunks.to(weight.device, weight.dtype, non_blocking=True)[:, None]
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = F.gelu(conv(x))
        n, c, bins, t = x.shape
        rows: torch.Tensor = self.conv_out(x.permute(0, 3, 1, 2).reshape(n, t, c * bins))
        return rows + sinusoid(t, rows.shape[2], rows.device).to(rows.dtype)

    def front(self, chunks: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The rows of each chunk: [n, bins, frames], zero-padded behind `lengths`, -> n x [conv_length, hidden].

        The padded width matters: bias and activation make the padding visible to the last row. It is a full chunk,
        except for a clip that is shorter than one, which is not padded at all."""
        bins = self.config.num_mel_bins
        assert chunks.shape[1] == bins, f"expected chunks of [n, {bins}, frames], got {tuple(chunks.shape)}"
        rows = [row for part in torch.split(chunks, CONV_BATCH) for row in self.convolve(part)]
        return [row[: conv_length(n)] for row, n in zip(rows, lengths, strict=True)]

    def transform(self, rows: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """[windows, t, hidden] -> [windows, t, out]. Rows behind a window's length are padding: not attended to,
        and meaningless in the result. Shapes depend on (windows, t) alone."""
        mask = None
        if lengths is not None:
            keys = torch.arange(rows.shape[1], device=rows.device)
            # A window of length 0 (a padded batch) sees one meaningless row; with none, some kernels make NaN.
            mask = (keys < lengths.clamp(min=1)[:, None])[:, None, None]
        for layer in self.layers:
            rows = layer(rows, mask)
        out: torch.Tensor = self.proj2(F.gelu(self.proj1(self.ln_post(rows))))
        return out

    def window(self, rows: torch.Tensor) -> torch.Tensor:
        """One attention window, alone: [t, hidden] -> [t, out]."""
        return self.transform(rows[None])[0]

    def windows(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Several windows in one launch, of any lengths and from any requests."""
        captured = None if self.graphs is None else self.graphs.run(rows)
        if captured is not None:
            return captured
        lengths = [len(r) for r in rows]
        if len(set(lengths)) == 1:
            return list(self.transform(torch.stack(list(rows))))
        padded = pad_sequence(list(rows), batch_first=True)
        out = self.transform(padded, torch.tensor(lengths).to(padded.device, non_blocking=True))
        return [o[:n] for o, n in zip(out, lengths, strict=True)]

    def encode(self, mel: torch.Tensor) -> torch.Tensor:
        """A whole clip: normalised mel [bins, frames] -> [audio_tokens(frames), out]. No frames, no rows."""
        return run_through(self.encoding(mel))

    def encoding(self, mel: torch.Tensor) -> Parts[torch.Tensor]:
        """`encode` in parts, each of a batch of windows."""
        c = self.config
        bins, frames = mel.shape
        assert bins == c.num_mel_bins, f"expected mel of [{c.num_mel_bins}, frames], got {tuple(mel.shape)}"
        outs = [self.proj2.weight.new_empty(0, c.output_size)]
        batch = c.window_frames * (WINDOW_BATCH_CPU if outs[0].device.type == "cpu" else WINDOW_BATCH)
        for at in range(0, frames, batch):
            if at:
                yield
            part = mel[:, at : at + batch]
            n, width = part.shape[1], min(frames, c.chunk_frames)
            lengths = [min(width, n - i) for i in range(0, n, width)]
            chunks = F.pad(part, (0, -n % width)).view(-1, len(lengths), width).transpose(0, 1)
            rows, per = self.front(chunks, lengths), c.chunks_per_window
            outs += self.windows([torch.cat(rows[i : i + per]) for i in range(0, len(rows), per)])
        return torch.cat(outs)


def sinusoid(length: int, hidden_size: int, device: torch.device) -> torch.Tensor:
    """Fixed position rows [sin | cos], float32. Computed where needed: a handful of rows, and no buffer that a
    module built without storage could lose."""
    half = hidden_size // 2
    step = math.log(10_000) / (half - 1)
    rate = torch.exp(-step * torch.arange(half, device=device, dtype=torch.float32))
    angle = torch.arange(length, device=device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)


@dataclass(frozen=True, slots=True, eq=False)
class WindowUpdate:
    """Rows of one attention window. They replace what was reported for the same index before.

    A window is complete when its eight seconds are, but a louder sound later may still change it, so only the
    updates of `finish` are final. With them, every window not named there is final as it stands."""

    index: int
    rows: torch.Tensor  # [tokens, out]
    final: bool


@dataclass(slots=True, eq=False)
class _Chunk:
    log_mel: Array  # [bins, frames], not yet clamped
    low: float  # its smallest value
    width: int  # frames after zero padding
    rows: torch.Tensor | None = None  # convolution output, while the window is open
    peak: float = -math.inf  # the maximum `rows` was made with

    def padded(self, peak: float) -> Array:
        values = np.zeros((len(self.log_mel), self.width), np.float32)
        values[:, : self.log_mel.shape[1]] = normalise(self.log_mel, peak)
        return values

    def stale(self, peak: float) -> bool:
        return self.rows is None or changes(self.low, self.peak, peak)


@dataclass(slots=True, eq=False)
class _Window:
    chunks: list[_Chunk] = field(default_factory=list)
    encoded: bool = False
    peak: float = -math.inf  # the maximum it was last encoded with

    def stale(self, peak: float) -> bool:
        return not self.encoded or any(changes(c.low, self.peak, peak) for c in self.chunks)


def changes(low: float, old: float, new: float) -> bool:
    """Whether a maximum that grew from `old` to `new` alters any value of a chunk whose smallest is `low`."""
    return new > old and low < float(np.float32(new) - np.float32(RANGE))


class AudioStream:
    """One utterance, encoded while it arrives; when finished, its windows equal `encode` of the whole clip.

    Mel values are clamped to eight below the clip's maximum, which is known only at the end. So the stream keeps
    the unclamped values, encodes with the maximum so far, and encodes again what a later, louder sound changes.
    That is looked at when a second of audio is complete, so a slowly rising voice costs one pass a second at most.

    Memory: 4 bytes x bins per frame on the host (51 kB per second of audio at 128 bins and 100 frames/s) until the
    stream is dropped, and on the device the convolution rows of the open window only: at most 8 x 13 rows (266 kB
    in bf16 at the released size). Rows of encoded windows belong to whoever took the update."""

    __slots__ = ("_fill", "_tail", "config", "encoder", "finished", "news", "peak", "windows")

    def __init__(self, encoder: AudioEncoder) -> None:
        self.encoder = encoder
        self.config = encoder.config
        self.windows: list[_Window] = []  # the last one may be open
        self.peak = -math.inf  # largest value so far
        self.news = False  # a chunk was completed (or the stream finished) since the last `advance`
        self.finished = False
        self._tail = np.empty((self.config.num_mel_bins, self.config.chunk_frames), np.float32)
        self._fill = 0  # frames in _tail: the second that is not complete

    def push(self, log_mel: Array | torch.Tensor) -> list[WindowUpdate]:
        """Take log10 mel frames [bins, n] (on the host), and report the windows they complete or change."""
        self.feed(log_mel)
        return advance(self.encoder, [self])[0]

    def finish(self) -> list[WindowUpdate]:
        """The audio is complete: report the open window, and those the final maximum changes."""
        self.seal()
        return advance(self.encoder, [self])[0]

    def feed(self, log_mel: Array | torch.Tensor) -> None:
        """Take frames without running anything; `advance` does that for several streams in one launch."""
        frames: Array = log_mel.numpy() if isinstance(log_mel, torch.Tensor) else log_mel
        bins, size = self._tail.shape
        assert frames.shape[:-1] == (bins,), f"expected [{bins}, n] log-mel frames, got {frames.shape}"
        assert not self.finished, "frames after the end of the utterance"
        if frames.shape[1] == 0:
            return
        self.peak = max(self.peak, float(frames.max()))
        at = 0
        while at < frames.shape[1]:
            part = frames[:, at : at + size - self._fill]
            self._tail[:, self._fill : self._fill + part.shape[1]] = part
            self._fill += part.shape[1]
            at += part.shape[1]
            if self._fill == size:
                self._cut(size)

    def seal(self) -> None:
        """No more frames. The tail waits for this, because a clip shorter than a chunk is not padded to one."""
        assert not self.finished, "finished twice"
        if self._fill:
            self._cut(self.config.chunk_frames if self.windows else self._fill)
        self.finished = self.news = True

    def _cut(self, width: int) -> None:
        """The frames in the tail become a chunk of the open window."""
        log_mel = self._tail[:, : self._fill].copy()
        if not self.windows or len(self.windows[-1].chunks) == self.config.chunks_per_window:
            self.windows.append(_Window())
        self.windows[-1].chunks.append(_Chunk(log_mel, float(log_mel.min()), width))
        self._fill = 0
        self.news = True

    def due(self) -> list[int]:
        """Windows that are complete and not (or no longer rightly) encoded."""
        full = self.config.chunks_per_window
        return [
            i
            for i, w in enumerate(self.windows)
            if self.news and (self.finished or len(w.chunks) == full) and w.stale(self.peak)
        ]

    def pending(self) -> list[_Chunk]:
        """Chunks whose window is not complete yet: their convolutions need not wait for it."""
        last = self.windows[-1:]
        return [c for w in last if self.news and not w.encoded for c in w.chunks]

    def settle(self, index: int, rows: torch.Tensor) -> WindowUpdate:
        window = self.windows[index]
        window.encoded, window.peak = True, self.peak
        for c in window.chunks:
            c.rows = None
        return WindowUpdate(index, rows, self.finished)


def advance(encoder: AudioEncoder, streams: Sequence[AudioStream]) -> list[list[WindowUpdate]]:
    """Encode what is due in any of the streams, together; one list of updates per stream."""
    updates: list[list[WindowUpdate]] = [[] for _ in streams]
    due = [(n, s, i) for n, s in enumerate(streams) for i in s.due()]
    for at in range(0, len(due), WINDOW_BATCH):
        batch = due[at : at + WINDOW_BATCH]
        rows = _front(encoder, ((c, s.peak) for _, s, i in batch for c in s.windows[i].chunks))
        sizes = [len(s.windows[i].chunks) for _, s, i in batch]
        ends = np.cumsum(sizes)
        whole = [torch.cat(rows[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        for (n, s, i), out in zip(batch, encoder.windows(whole), strict=True):
            updates[n].append(s.settle(i, out))
    _front(encoder, ((c, s.peak) for s in streams for c in s.pending()))
    for s in streams:
        s.news = False
    return updates


def _front(encoder: AudioEncoder, chunks: Iterable[tuple[_Chunk, float]]) -> list[torch.Tensor]:
    """The convolution rows of all these chunks; those that have none made with their maximum are computed."""
    chunks = list(chunks)
    stale = [(c, peak) for c, peak in chunks if c.stale(peak)]
    # One launch, and one more for each clip shorter than a chunk, which has a width of its own.
    for width in sorted({c.width for c, _ in stale}):
        group = [(c, peak) for c, peak in stale if c.width == width]
        mel = torch.from_numpy(np.stack([c.padded(peak) for c, peak in group]))
        rows = encoder.front(mel, [c.log_mel.shape[1] for c, _ in group])
        for (c, peak), r in zip(group, rows, strict=True):
            # A copy: the view would keep the whole launch's output alive as long as one window is open.
            c.rows, c.peak = r.clone(), peak
    return [c.rows for c, _ in chunks if c.rows is not None]

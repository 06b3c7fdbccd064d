"""Codec frames to waveform, exactly and piece by piece, for many streams at once.

Owns the vocoder's weights (`Vocoder`, immutable once prepared; a family adds how codes become
rows). What a stream remembers between two steps (`VocoderState`) is an attention window and
convolution tails, instead of decoded-again context. However a stream's frames are cut into steps,
its samples are those of one decode of the whole stream.

The vocoder's stage calls `step` with static tensors on its own thread and stream; all shapes depend
on (streams, frames) alone and nothing waits for the device, so a step can be captured in a CUDA
graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stretto.errors import Bug
from stretto.kernels.reference.norm import rms_norm
from stretto.kernels.reference.rope import rotate
from stretto.kernels.triton import usable
from stretto.layers.linear import FusedLinear, Linear
from stretto.layers.mlp import DenseMLP
from stretto.layers.streaming import (
    CausalConv,
    Joint,
    OverlapUpConv,
    Push,
    Silence,
    Snake,
    TailLayout,
    UpConv,
    residual,
)
from stretto.layers.targets import frozen
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder_state import Part, VocoderState
from stretto.types import Span

MAX_FRAMES = 25
"""Default limit of frames per step: two seconds, and with the released window of 72 a ring of 96
columns."""


@dataclass(slots=True)
class Timing:
    """Where a step's frames lie in the window; the same for every layer."""

    places: torch.Tensor  # [streams] int64: where each stream lies in the window
    columns: torch.Tensor  # [slots * frames] flat column that each frame is written to
    bias: torch.Tensor  # [slots, 1, frames, columns] added to the attention scores
    cos: torch.Tensor  # [slots * frames, head_dim]
    sin: torch.Tensor


@dataclass(slots=True)
class Moment:
    """What a step's frames need to know of their time, where kernels work the rest out by
    themselves."""

    slots: torch.Tensor  # [slots] int64: of the state; -1: padding
    frames: torch.Tensor  # [slots] int64: before the step
    lengths: torch.Tensor  # [slots] int64
    turn: torch.Tensor  # [slots * frames, head_dim] float32: cosines, then sines
    reach: int  # sliding window


class Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = frozen(channels)


class Norm(nn.Module):
    def __init__(self, channels: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = frozen(channels)
        self.bias = frozen(channels) if bias else None


class Attention(nn.Module):
    def __init__(self, c: VocoderConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.head_dim = c.head_dim
        width = c.num_heads * c.head_dim
        self.qkv = FusedLinear(c.hidden_size, {"q_proj": width, "k_proj": width, "v_proj": width})
        self.o_proj = Linear(width, c.hidden_size)

    def forward(self, x: torch.Tensor, window: torch.Tensor, timing: Timing) -> torch.Tensor:
        """x [slots, frames, hidden]; window [2, 1 + slots, columns, heads, head_dim], written in
        place."""
        slots, frames, _ = x.shape
        qkv = self.qkv(x).view(slots * frames, 3 * self.heads, self.head_dim)
        q, k = rotate(qkv[:, : 2 * self.heads], timing.cos, timing.sin).chunk(2, 1)
        keys, values = window.flatten(1, 2)
        keys.index_copy_(0, timing.columns, k)
        values.index_copy_(0, timing.columns, qkv[:, 2 * self.heads :])
        past_k, past_v = window.index_select(1, timing.places).transpose(2, 3)
        q = q.view(slots, frames, self.heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, past_k, past_v, attn_mask=timing.bias)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def fused(self, x: torch.Tensor, window: torch.Tensor, m: Moment) -> torch.Tensor:
        """x [slots * frames, hidden]"""
        from stretto.kernels.triton import wave

        y = wave.attend(
            wave.product(x, self.qkv.weight), m.turn, window, m.slots, m.frames, m.lengths, m.reach
        )
        return wave.product(y, self.o_proj.weight)


class Layer(nn.Module):
    def __init__(self, c: VocoderConfig) -> None:
        super().__init__()
        self.eps = c.rms_eps
        self.self_attn = Attention(c)
        self.mlp = DenseMLP(c.hidden_size, c.ffn_size)
        self.input_layernorm = Norm(c.hidden_size)
        self.post_attention_layernorm = Norm(c.hidden_size)
        self.self_attn_layer_scale = Scale(c.hidden_size)
        self.mlp_layer_scale = Scale(c.hidden_size)

    def forward(self, x: torch.Tensor, window: torch.Tensor, timing: Timing) -> torch.Tensor:
        y = self.self_attn(rms_norm(x, self.input_layernorm.weight, self.eps), window, timing)
        x = torch.addcmul(x, self.self_attn_layer_scale.scale, y)
        y = self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps))
        return torch.addcmul(x, self.mlp_layer_scale.scale, y)

    def fused(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        window: torch.Tensor,
        m: Moment,
        then: torch.Tensor,
        last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From x and its norm to the result and the norm (weight `then`) that follows. The last x
        is not wanted."""
        from stretto.kernels.triton import wave

        y = self.self_attn.fused(normed, window, m)
        between = self.post_attention_layernorm.weight, self.eps
        x, normed = wave.settle(x, self.self_attn_layer_scale.scale, y, between)
        y = wave.product(wave.gated(normed, self.mlp.gate_up.weight), self.mlp.down_proj.weight)
        return wave.settle(x, self.mlp_layer_scale.scale, y, (then, self.eps), keep=not last)


class Transformer(nn.Module):
    def __init__(self, c: VocoderConfig) -> None:
        super().__init__()
        self.eps = c.rms_eps
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = Norm(c.hidden_size)

    def forward(self, x: torch.Tensor, window: torch.Tensor, timing: Timing) -> torch.Tensor:
        for layer, part in zip(self.layers, window, strict=True):
            x = layer(x, part, timing)
        return rms_norm(x, self.norm.weight, self.eps)

    def first_norm(self) -> tuple[torch.Tensor, float]:
        first = self.layers[0]
        assert isinstance(first, Layer)
        return first.input_layernorm.weight, self.eps

    def fused(
        self, x: torch.Tensor, normed: torch.Tensor, window: torch.Tensor, m: Moment
    ) -> torch.Tensor:
        """`normed` is `first_norm` of x; both [slots * frames, hidden]."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        norms = [layer.input_layernorm.weight for layer in layers[1:]] + [self.norm.weight]
        for i, (layer, then) in enumerate(zip(layers, norms, strict=True)):
            x, normed = layer.fused(x, normed, window[i], m, then, last=i == len(layers) - 1)
        return normed


class ConvNeXt(nn.Module):
    # [7, channels]: the depthwise weight, for kernels that have channels side by side
    taps: torch.Tensor

    def __init__(self, channels: int, layout: TailLayout, rate: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, depthwise=True)
        self.tail = layout.add(self.dwconv.reach, channels, rate)
        self.norm = Norm(channels, bias=True)
        self.pwconv1 = Linear(channels, 4 * channels, bias=True)
        self.pwconv2 = Linear(4 * channels, channels, bias=True)
        self.gamma = frozen(channels)
        self.register_buffer("taps", None, persistent=False)

    def prepare(self) -> None:
        self.taps = self.dwconv.conv.weight.squeeze(2).T.contiguous()

    def forward(self, x: torch.Tensor, push: Push) -> torch.Tensor:
        y, bias = push.join(self.tail, x), self.norm.bias
        assert bias is not None
        if usable(x):
            from stretto.kernels.triton import wave

            y = wave.depthwise(y, self.taps, self.dwconv.conv.bias, (self.norm.weight, bias, 1e-6))
            return wave.add_scaled(x, self.gamma, self.pwconv2(F.gelu(self.pwconv1(y))))
        y = F.layer_norm(self.dwconv(y), y.shape[-1:], self.norm.weight, bias, 1e-6)
        return torch.addcmul(x, self.gamma, self.pwconv2(F.gelu(self.pwconv1(y))))


class UpStage(nn.ModuleList):
    """Upsample by `ratio`, then one ConvNeXt block; `rows` counts the output rows per frame."""

    def __init__(self, channels: int, ratio: int, layout: TailLayout, rows: int) -> None:
        super().__init__([UpConv(channels, channels, ratio), ConvNeXt(channels, layout, rows)])

    def forward(self, x: torch.Tensor, push: Push) -> torch.Tensor:
        up, convnext = self
        out: torch.Tensor = convnext(up(x), push)
        return out


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int, layout: TailLayout, rate: int) -> None:
        super().__init__()
        self.act1 = Snake(channels)
        self.act2 = Snake(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation)
        self.conv2 = CausalConv(channels, channels, 1)
        self.tail = layout.add(self.conv1.reach, channels, rate)

    def forward(
        self, x: torch.Tensor, buffer: torch.Tensor, push: Push, joint: Joint
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and what its convolution reads of it -> the same for the next one, joined for it."""
        return residual(x, buffer, self.conv1, self.act2, self.conv2, push, joint)


class DecoderBlock(nn.Module):
    """Upsample by `rate`, then three residual units. `rows` counts its output rows per frame,
    `drop` how many of them lie before a stream's beginning."""

    def __init__(self, inputs: int, rate: int, layout: TailLayout, rows: int, drop: int) -> None:
        super().__init__()
        outputs = inputs // 2
        self.rows = rows
        self.drop = drop
        self.tail = layout.add(1, inputs, rows // rate)
        units = [ResidualUnit(outputs, d, layout, rows) for d in (1, 3, 9)]
        self.block = nn.ModuleList([Snake(inputs), OverlapUpConv(inputs, outputs, rate), *units])

    @property
    def act(self) -> Snake:
        act = self.block[0]
        assert isinstance(act, Snake)
        return act

    def forward(
        self, buffer: torch.Tensor, push: Push, silence: Silence, joint: Joint
    ) -> torch.Tensor:
        """Its own buffer -> that of the convolution behind it. `silence` is that of its output."""
        _, up, *units = self.block
        inner = [
            Joint(unit.tail, unit.act1, silence) for unit in units if isinstance(unit, ResidualUnit)
        ]
        x, buffer = up(buffer, push, inner[0])
        for unit, behind in zip(units, [*inner[1:], joint], strict=True):
            x, buffer = unit(x, buffer, push, behind)
        return buffer


class Vocoder(nn.Module):
    """The vocoder's weights, but for what makes rows of codes (`_transform`). Fill them
    (`layers.targets`), call `prepare` once, then only read."""

    code_offset: torch.Tensor  # of each codebook in a table of all
    inv_freq: torch.Tensor
    tail_rates: torch.Tensor
    tail_offsets: torch.Tensor
    block_rates: torch.Tensor  # [blocks, 1] output rows per frame
    block_drops: torch.Tensor  # [blocks, 1] output rows before a stream's beginning

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__()
        self.config = c = config
        self.layout = TailLayout()
        self.pre_transformer = self.make_transformer(c)

        rows, stages = 1, []
        for ratio in c.upsampling_ratios:
            rows *= ratio
            stages.append(UpStage(c.latent, ratio, self.layout, rows))
        self.upsample = nn.ModuleList(stages)

        first = CausalConv(c.latent, c.decoder_dim, 7)
        self.first_tail = self.layout.add(first.reach, c.latent, rows)
        channels, drop, blocks = c.decoder_dim, 0, []
        for rate in c.upsample_rates:
            rows, drop = rows * rate, (drop * rate + rate) * c.drops_first
            blocks.append(DecoderBlock(channels, rate, self.layout, rows, drop))
            channels //= 2
        last = CausalConv(channels, 1, 7)
        self.last_tail = self.layout.add(last.reach, channels, rows)
        self.decoder = nn.ModuleList([first, *blocks, Snake(channels), last])

        self.ready = False
        for name in (
            "code_offset",
            "inv_freq",
            "tail_rates",
            "tail_offsets",
            "block_rates",
            "block_drops",
        ):
            self.register_buffer(name, None, persistent=False)

    def make_transformer(self, config: VocoderConfig) -> Transformer:
        return Transformer(config)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute what follows from the weights and the config, once the weights are filled, on
        their device and of their dtype (a later cast would round the rotary frequencies too)."""
        c, device = self.config, self.weight.device
        self.code_offset = torch.arange(c.num_quantizers, device=device)[:, None] * c.codebook_size
        steps = torch.arange(0, c.head_dim, 2, device=device, dtype=torch.float32)
        self.inv_freq = 1.0 / c.rope_theta ** (steps / c.head_dim)
        self.tail_rates = torch.tensor(self.layout.rates(), device=device)
        self.tail_offsets = torch.tensor(self.layout.offsets(), device=device)
        blocks = self._blocks()
        self.block_rates = torch.tensor([[b.rows] for b in blocks], device=device)
        self.block_drops = torch.tensor([[b.drop] for b in blocks], device=device)
        for m in self.modules():
            if isinstance(m, ConvNeXt | Snake | UpConv | OverlapUpConv):
                m.prepare()
        self.ready = True

    @property
    def weight(self) -> torch.Tensor:
        """One of them, to tell device and type by."""
        return self.pre_transformer.norm.weight

    def state(self, slots: int, max_frames: int = MAX_FRAMES) -> VocoderState:
        """Fresh memory for so many streams, on the weights' device and in their dtype. On the meta
        device, where it is only measured, `prepare` is not needed: its arithmetic there costs
        seconds of imports."""
        if not self.ready and not self.weight.is_meta:
            raise Bug("vocoder: prepare() was not called after the weights were filled")
        if slots < 1 or max_frames < 1:
            raise ValueError(
                f"a state needs slots and frames, got slots={slots}, max_frames={max_frames}"
            )
        c, weight = self.config, self.weight
        # A multiple of 8, because the GPU's attention kernels read the mask in aligned rows.
        columns = -(-(c.window - 1 + max_frames) // 8) * 8
        with torch.inference_mode(
            False
        ):  # an inference tensor could not be written outside of that mode
            window = weight.new_zeros(c.num_layers, 2, 1 + slots, columns, c.num_heads, c.head_dim)
            tails = weight.new_zeros(slots + 1, self.layout.width)
            frames = torch.zeros(slots + 1, dtype=torch.int64, device=weight.device)
        return VocoderState(frames, window, tails, max_frames)

    @torch.no_grad()
    def step(
        self,
        state: VocoderState,
        codes: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take `lengths[i]` frames of `codes[i]` for the stream in slot `slots[i]` (without
        `slots`, for all of them in order); 0 leaves a stream as it is.

        codes [streams, quantizers, frames] integers, lengths [streams] integers, slots as
        `VocoderState.part` takes them -> float32 [streams, frames * samples_per_frame] in [-1, 1].
        `valid` says which samples of a row are the stream's; the others mean nothing. Codes out of
        range are read as the nearest code, since an index error on a GPU ends the process."""
        part = state.part(slots)
        streams, quantizers, frames = codes.shape
        assert (streams, quantizers) == (len(part.slots), self.config.num_quantizers), (
            f"codes {tuple(codes.shape)}"
        )
        assert 1 <= frames <= state.max_frames, (
            f"{frames} frames in a step of at most {state.max_frames}"
        )
        lengths = lengths.long().clamp(0, frames)
        ends = torch.addcmul(self.tail_offsets, lengths[:, None], self.tail_rates)
        push = Push(self.layout.split(part.tails), self.layout.split_ends(ends))

        x = self._transform(part, codes, lengths, push)
        for stage in self.upsample:
            x = stage(x, push)
        wav = self._decode(x, push, part.frames)
        state.put(part, lengths)
        return wav

    def valid(self, before: int, length: int) -> Span:
        """Which samples of a step's row belong to a stream that had `before` frames and gave
        `length` more."""
        rate, drop = self.config.samples_per_frame, self.config.samples_dropped
        stop = length * rate
        return Span(min(stop, max(0, drop - before * rate)), stop)

    def num_samples(self, frames: int) -> int:
        """Samples that a stream of so many frames makes in all."""
        return max(0, frames * self.config.samples_per_frame - self.config.samples_dropped)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """All samples of a whole stream: codes [frames, quantizers] -> float32
        [num_samples(frames)]."""
        return VocoderStream(self).push(codes)

    def _transform(
        self, part: Part, codes: torch.Tensor, lengths: torch.Tensor, push: Push
    ) -> torch.Tensor:
        """Codes [slots, groups, frames] through the transformer: [slots, frames, latent]."""
        raise NotImplementedError

    def table_rows(self, codes: torch.Tensor) -> torch.Tensor:
        """Where codes lie in a table of all codebooks, one after another."""
        return codes.clamp(0, self.config.codebook_size - 1) + self.code_offset

    def fits(self, part: Part, frames: int) -> bool:
        """Are there kernels for the transformer over so many frames?"""
        if not usable(self.weight):
            return False
        from stretto.kernels.triton import wave

        return wave.fits(frames, part.window.shape[3])

    def timing(self, part: Part, lengths: torch.Tensor, frames: int, dtype: torch.dtype) -> Timing:
        device, places = lengths.device, 1 + part.slots
        columns = part.window.shape[3]
        frame = torch.arange(frames, device=device)
        position = part.frames[:, None] + frame  # [slots, frames]
        written = torch.where(
            frame < lengths[:, None], places[:, None] * columns + position % columns, 0
        )

        # After this step's writes, a column holds the latest position below `end` that falls on it.
        # Columns not yet written come out negative, and what a padding query sees does not matter
        # as long as it stays finite: hence the lowest finite number and not -inf.
        end = (part.frames + lengths)[:, None]
        # [slots, columns]
        stored = end - 1 - (end - 1 - torch.arange(columns, device=device)) % columns
        age = position[:, :, None] - stored[:, None]
        seen = (stored[:, None] >= 0) & (age >= 0) & (age < self.config.window)
        bias = torch.full(
            seen.shape, torch.finfo(dtype).min, device=device, dtype=dtype
        ).masked_fill_(seen, 0)

        angle = position.reshape(-1, 1).float() * self.inv_freq
        angle = torch.cat((angle, angle), -1)
        return Timing(
            places, written.flatten(), bias[:, None], angle.cos().to(dtype), angle.sin().to(dtype)
        )

    def _blocks(self) -> list[DecoderBlock]:
        return [m for m in self.decoder if isinstance(m, DecoderBlock)]

    def _silent(self, before: torch.Tensor) -> torch.Tensor:
        """How many of a step's first rows lie before a stream's beginning, given the frames before:
        [blocks, slots].

        Output row i of a step has the absolute index before * rate - drop + i, and the negative
        ones do."""
        return torch.addcmul(self.block_drops, self.block_rates, before, value=-1)

    def _decode(self, x: torch.Tensor, push: Push, before: torch.Tensor) -> torch.Tensor:
        first, *_, act, last = self.decoder
        assert isinstance(act, Snake)
        blocks = self._blocks()
        silences = [
            Silence(rows, block.drop)
            for block, rows in zip(blocks, self._silent(before), strict=True)
        ]
        behind = [*((b.tail, b.act) for b in blocks[1:]), (self.last_tail, act)]
        x = first(push.join(self.first_tail, x))
        buffer = push.join(blocks[0].tail, x, blocks[0].act)
        for block, silence, (tail, curve) in zip(blocks, silences, behind, strict=True):
            buffer = block(buffer, push, silence, Joint(tail, curve, silence))
        wav = last(buffer)
        out: torch.Tensor = wav.squeeze(2).float().clamp(-1.0, 1.0)
        return out


class VocoderStream:
    """One stream on a slot of its own state or of a shared one (whose other slots stand still
    meanwhile)."""

    def __init__(self, model: Vocoder, state: VocoderState | None = None, slot: int = 0) -> None:
        self.model = model
        self.state = model.state(1) if state is None else state
        self.slot = slot
        self.frames = 0
        self.state.reset(slot)

    def push(self, codes: torch.Tensor) -> torch.Tensor:
        """Take codes [n, quantizers], any n; give every sample they settle, float32 on the model's
        device."""
        parts = (
            [self._step(part) for part in torch.split(codes, self.state.max_frames)]
            if len(codes)
            else []
        )
        return torch.cat(parts) if parts else torch.empty(0, device=self.state.frames.device)

    def _step(self, part: torch.Tensor) -> torch.Tensor:
        device, n = self.state.frames.device, len(part)
        codes = part.T[None].to(device)
        wav = self.model.step(
            self.state,
            codes,
            torch.full((1,), n, device=device),
            torch.full((1,), self.slot, device=device),
        )
        span = self.model.valid(self.frames, n)
        self.frames += n
        return wav[0, span.start : span.stop]

"""Qwen3-TTS's codec decoder: the shared vocoder behind split residual codebooks and a convolution.

The codebooks are folded into one table when the weights are there, in float32."""

from __future__ import annotations

import torch
from torch import nn

from stretto.kernels.reference.norm import rms_norm
from stretto.layers.linear import Linear
from stretto.layers.streaming import CausalConv, Push
from stretto.layers.targets import frozen
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder import Moment, Transformer, Vocoder
from stretto.models.speech.vocoder_state import Part


class Codebook(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.cluster_usage = frozen(size, dtype=torch.float32)
        self.embedding_sum = frozen(size, dim, dtype=torch.float32)

    def rows(self) -> torch.Tensor:
        return self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class Projection(nn.Module):
    """A convolution of one tap."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = frozen(outputs, inputs, 1, dtype=torch.float32)


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Quantizer(nn.Module):
    """Some of the codebooks, and one projection behind them (the other is for encoding)."""

    def __init__(self, c: VocoderConfig, books: int) -> None:
        super().__init__()
        half = c.table_size // 2
        self.input_proj = Projection(c.table_size, half)
        self.output_proj = Projection(half, c.table_size)
        self.vq = Layers([Book(c.codebook_size, half) for _ in range(books)])

    def tables(self) -> list[torch.Tensor]:
        books = [book for book in self.vq.layers if isinstance(book, Book)]
        return [book._codebook.rows() @ self.output_proj.weight[:, :, 0].T for book in books]


class Book(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, dim)


class SplitQuantizer(nn.Module):
    def __init__(self, c: VocoderConfig) -> None:
        super().__init__()
        self.rvq_first = Quantizer(c, 1)
        self.rvq_rest = Quantizer(c, c.num_quantizers - 1)


class CodecTransformer(Transformer):
    def __init__(self, c: VocoderConfig) -> None:
        super().__init__(c)
        self.input_proj = Linear(c.latent, c.hidden_size, bias=True)
        self.output_proj = Linear(c.hidden_size, c.latent, bias=True)


class CodecDecoder(Vocoder):
    quantizer: SplitQuantizer | None
    pre_transformer: CodecTransformer
    table: torch.Tensor  # [groups * codes, table size]: what each code adds

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__(config)
        self.quantizer = SplitQuantizer(config)
        self.pre_conv = CausalConv(config.table_size, config.latent, 3)
        self.conv_tail = self.layout.add(self.pre_conv.reach, config.table_size, 1)
        self.register_buffer("table", None, persistent=False)

    def make_transformer(self, config: VocoderConfig) -> CodecTransformer:
        return CodecTransformer(config)

    @torch.no_grad()
    def prepare(self) -> None:
        super().prepare()
        assert self.quantizer is not None
        parts = [*self.quantizer.rvq_first.tables(), *self.quantizer.rvq_rest.tables()]
        self.table = torch.cat(parts).to(self.weight.dtype)
        self.quantizer = None

    def _transform(
        self, part: Part, codes: torch.Tensor, lengths: torch.Tensor, push: Push
    ) -> torch.Tensor:
        slots, _, frames = codes.shape
        inner, c = self.pre_transformer, self.config
        x = self.table[self.table_rows(codes)].sum(1)
        x = inner.input_proj(self.pre_conv(push.join(self.conv_tail, x)))
        if self.fits(part, frames):
            weight, eps = inner.first_norm()
            moment = Moment(part.slots, part.frames, lengths, self._turn(part, frames), c.window)
            flat = x.reshape(slots * frames, -1)
            x = inner.fused(flat, rms_norm(flat, weight, eps), part.window, moment).view(
                slots, frames, -1
            )
        else:
            x = inner(x, part.window, self.timing(part, lengths, frames, x.dtype))
        out: torch.Tensor = inner.output_proj(x)
        return out

    def _turn(self, part: Part, frames: int) -> torch.Tensor:
        """How far each frame's queries and keys are turned: cosines, then sines."""
        position = part.frames[:, None] + torch.arange(frames, device=part.frames.device)
        angle = position.reshape(-1, 1).float() * self.inv_freq
        return torch.cat((angle.cos(), angle.sin()), 1)

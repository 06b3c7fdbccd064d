"""Sound to codes: the codec's encoder (Mimi's), for the reference of a cloned voice. Whole clips,
in float32.

Its attention looks back over the whole clip: the window that the configuration names is not applied
by the model's own package either. `run` is a generator that yields after each part
(`models/parts.py`); the enroller's stage runs it between the turns of others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stretto.kernels.reference.rope import rotate
from stretto.layers.linear import Linear
from stretto.layers.targets import frozen
from stretto.models.parts import Parts
from stretto.models.qwen3_tts.config import EncoderConfig

DOWN = 2
"""Rows of the transformer per frame."""


class Weights(nn.Module):
    def __init__(self, inputs: int, outputs: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = frozen(outputs, inputs, taps)
        self.bias = frozen(outputs) if bias else None


class Conv(nn.Module):
    """Causal: padded in front, and behind by as much as the last window lacks."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        taps: int,
        stride: int = 1,
        bias: bool = True,
        padding: str = "constant",
    ) -> None:
        super().__init__()
        self.front = taps - stride
        self.stride = stride
        self.padding = padding
        self.conv = Weights(inputs, outputs, taps, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[channels, time]"""
        x = F.pad(x[None], (self.front, -x.shape[-1] % self.stride), mode=self.padding)
        return F.conv1d(x, self.conv.weight, self.conv.bias, stride=self.stride)[0]


class Residual(nn.Module):
    def __init__(self, width: int, inner: int, taps: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [nn.Identity(), Conv(width, inner, taps), nn.Identity(), Conv(inner, width, 1)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, narrow, _, widen = self.block
        out: torch.Tensor = x + widen(F.elu(narrow(F.elu(x))))
        return out


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = frozen(size)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = frozen(size)
        self.bias = frozen(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        d = c.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(d, d) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).view(len(x), self.heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(y[0].transpose(0, 1).flatten(1))
        return out


class Mlp(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.fc1 = Linear(c.hidden_size, c.ffn_size)
        self.fc2 = Linear(c.ffn_size, c.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Layer(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        d = c.hidden_size
        self.self_attn = Attention(c)
        self.mlp = Mlp(c)
        self.input_layernorm = Norm(d, c.norm_eps)
        self.post_attention_layernorm = Norm(d, c.norm_eps)
        self.self_attn_layer_scale = Scale(d)
        self.mlp_layer_scale = Scale(d)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn_layer_scale.scale * self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp_layer_scale.scale * self.mlp(
            self.post_attention_layernorm(x)
        )
        return out


class Codebook(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.cluster_usage = frozen(size)
        self.initialized = frozen(1)
        self.embed_sum = frozen(size, dim)

    def rows(self) -> torch.Tensor:
        return self.embed_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class Book(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.codebook = Codebook(size, dim)


class Quantizer(nn.Module):
    def __init__(self, c: EncoderConfig, books: int) -> None:
        super().__init__()
        self.input_proj = Weights(c.hidden_size, c.inner_size, 1, bias=False)
        self.output_proj = Weights(c.inner_size, c.hidden_size, 1, bias=False)
        self.layers = nn.ModuleList(Book(c.codebook_size, c.codebook_dim) for _ in range(books))

    def codes(self, x: torch.Tensor, books: int) -> list[torch.Tensor]:
        """The nearest entry of each codebook to what those before it leave; x [channels, time]."""
        rest = (self.input_proj.weight[:, :, 0] @ x).T
        found = []
        for book in list(self.layers)[:books]:
            assert isinstance(book, Book)
            table = book.codebook.rows()
            found.append(torch.cdist(rest[None], table[None])[0].argmin(-1))
            rest = rest - table[found[-1]]
        return found


class Quantizers(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.semantic_residual_vector_quantizer = Quantizer(c, 1)
        self.acoustic_residual_vector_quantizer = Quantizer(c, c.num_quantizers - 1)


class CodecEncoder(nn.Module):
    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.config = c
        width, layers = c.filters, [Conv(1, c.filters, c.kernel)]
        stack: list[nn.Module] = [*layers]
        for ratio in reversed(c.ratios):
            inner = width // c.compress
            stack += [
                Residual(width, inner, c.residual_kernel),
                nn.ELU(),
                Conv(width, 2 * width, 2 * ratio, ratio),
            ]
            width *= 2
        stack += [nn.ELU(), Conv(width, c.hidden_size, c.last_kernel)]
        self.encoder = Stack(stack)
        self.encoder_transformer = Stack([Layer(c) for _ in range(c.num_layers)])
        width = c.hidden_size
        self.downsample = Conv(width, width, 2 * DOWN, DOWN, bias=False, padding="replicate")
        self.quantizer = Quantizers(c)

    def run(self, samples: torch.Tensor, per_frame: int) -> Parts[torch.Tensor]:
        """Mono samples [n] -> codes [frames, groups] int64, on their device."""
        c, x = self.config, samples[None]
        for layer in self.encoder.layers:
            x = layer(x)
            yield
        x = x.T
        cos, sin = self._angles(len(x), x.device)
        for layer in self.encoder_transformer.layers:
            x = layer(x, cos, sin)
            yield
        x = self.downsample(x.T)
        q = self.quantizer
        codes = q.semantic_residual_vector_quantizer.codes(x, 1)
        yield
        codes += q.acoustic_residual_vector_quantizer.codes(x, c.used - 1)
        return torch.stack(codes, 1)[: -(-len(samples) // per_frame)]

    def _angles(self, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.config.hidden_size // self.config.num_heads
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        angle = torch.arange(rows, device=device)[:, None] / self.config.rope_theta**steps
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

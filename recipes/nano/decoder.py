"""Trainable decoders of the thinker, the talker and the code predictor, with the parameter names of
`transformers`.

They compute what the released architecture computes, in shapes that never change, so that a
training step can be one CUDA graph: rows hold several examples side by side (`segments` says which
attends to which), and every expert runs on every row, the router's choice being a weight that is
mostly zero. Positions are one number per row: without pictures the three axes of the released
rotary embedding are equal. Called by `thinker.py` and `talker.py`; a test compares them with
`transformers`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.layers.config import DecoderConfig

NEVER = -1e4  # a score that no key has


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """Cosines and sines of every position."""

    table: Tensor

    def __init__(self, head_dim: int, theta: float, positions: int) -> None:
        super().__init__()
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.arange(positions).float()[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] -> two of [B, 1, T, head_dim]."""
        return self.table[0][positions][:, None], self.table[1][positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim, c.rms_eps), Norm(self.dim, c.rms_eps)
        # whether to keep what head 0 asks for and is offered, for a loss on where it looks
        self.watched = False
        self.seen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        v = self.v_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        q = rotate(
            self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2), *rope
        ).to(v.dtype)
        k = rotate(
            self.k_norm(self.k_proj(x).view(b, t, self.kv, self.dim)).transpose(1, 2), *rope
        ).to(v.dtype)
        if self.watched:
            self.seen = q[:, 0], k[:, 0]
        k, v = (self._shared(r) for r in (k, v))
        if mask is not None and x.device.type == "cpu":
            # in products of matrices: half the time of torch's kernel and its backward on a CPU
            y = (q @ k.transpose(2, 3) * self.dim**-0.5).masked_fill(~mask, NEVER).softmax(-1)
            y = y.to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out

    def _shared(self, x: Tensor) -> Tensor:
        """Keys or values, once for each query head that uses them."""
        b, kv, t, dim = x.shape
        return x[:, :, None].expand(b, kv, self.heads // kv, t, dim).reshape(b, self.heads, t, dim)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(nn.Module):
    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Rows [N, H] through all experts, summed by `weights` [N, E]."""
        if x.device.type == "cpu":
            return self._chosen(x, weights)
        count, hidden, inner = self.down_proj.shape
        gate, up = (
            F.linear(x, self.gate_up_proj.view(-1, hidden))
            .view(-1, count, 2 * inner)
            .chunk(2, dim=-1)
        )
        y = F.silu(gate) * up * weights[..., None].to(up.dtype)
        return F.linear(
            y.reshape(-1, count * inner), self.down_proj.permute(1, 0, 2).reshape(hidden, -1)
        )

    def _chosen(self, x: Tensor, weights: Tensor) -> Tensor:
        """The same through the chosen experts only: their numbers change from step to step, which
        a graph does not allow and a CPU does not mind."""
        found: Tensor | None = None
        for number, (into, out) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            (at,) = weights[:, number].nonzero(as_tuple=True)
            gate, up = F.linear(x[at], into).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, out) * weights[at, number, None].to(gate.dtype)
            if found is None:
                found = torch.zeros(len(x), y.shape[1], dtype=y.dtype)
            found = found.index_add(0, at, y)
        assert found is not None
        return found


class Router(nn.Module):
    def __init__(self, count: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden))
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the experts [N, E], zero for those not chosen; and how uneven the choice is
        (1: even)."""
        chances = F.linear(x, self.weight).float().softmax(dim=-1)
        best, which = chances.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(chances).scatter(1, which, best / best.sum(dim=-1, keepdim=True))
        load = (weights.detach() > 0).float().mean(dim=0) * len(self.weight) / self.top_k
        return weights, (load * chances.mean(dim=0)).sum()


class Moe(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        m = c.moe
        assert m is not None
        assert m.norm_topk
        self.gate = Router(m.num_experts, c.hidden_size, m.top_k)
        self.experts = Experts(m.num_experts, c.hidden_size, m.expert_size)
        self.shared = m.shared_size is not None
        if m.shared_size is not None:
            self.shared_expert = Mlp(c.hidden_size, m.shared_size)
            self.shared_expert_gate = nn.Linear(c.hidden_size, 1, bias=False)
        self.unevenness = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, self.unevenness = self.gate(rows)
        y = self.experts(rows, weights)
        if self.shared:
            y = y + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return y.view_as(x)


class Layer(nn.Module):
    def __init__(self, c: DecoderConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_attn = Attention(c)
        self.mlp = Moe(c) if c.moe is not None else Mlp(c.hidden_size, c.dense_size or 0)
        self.input_layernorm = Norm(c.hidden_size, c.rms_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self._drop(self.self_attn(self.input_layernorm(x), rope, mask))
        return x + self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Layers and final norm; embeddings belong to who calls."""

    def __init__(self, c: DecoderConfig, positions: int = 1024, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c.num_layers))
        self.norm = Norm(c.hidden_size, c.rms_eps)
        self.rotary = Rotary(c.head_dim, c.rope_theta, positions)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        rope = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rope, mask)
        y: Tensor = self.norm(x)
        return y

    def unevenness(self) -> Tensor:
        """Mean over the layers of how uneven the experts' load was in the last forward."""
        return torch.stack([layer.mlp.unevenness for layer in self.layers]).mean()


def segment_mask(segments: Tensor) -> Tensor:
    """[B, T] numbers of examples -> [B, 1, T, T]: a row sees earlier rows of its own example."""
    t = segments.shape[1]
    causal = torch.ones(t, t, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def initialize(module: nn.Module, layers: int, std: float = 0.02) -> None:
    """Small normal weights; what writes to the residual stream is smaller, by depth."""
    for name, p in module.named_parameters():
        if p.ndim < 2:
            continue
        narrow = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        nn.init.normal_(p, std=std / (2 * layers) ** 0.5 if narrow else std)

"""Runs of prefill attention on pools of their own."""

from __future__ import annotations

import torch

from stretto.kernels.reference.paged import Paging
from stretto.layers.config import DecoderConfig, MoeConfig
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.decoder_layer import AfterLayer
from stretto.layers.prefill import Ragged
from stretto.stage.runner.rows import DeviceRows

Span = tuple[int, int, int]  # row, start, stop


def config(
    moe: MoeConfig | None,
    hidden: int = 48,
    heads: int = 4,
    kv: int = 2,
    dim: int = 16,
    layers: int = 2,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=8,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        rms_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(dim // 4, dim // 8, dim // 8) if dim < 128 else (24, 20, 20),
        max_positions=4096,
        dense_size=40 if moe is None else None,
        moe=moe,
    )


def build(c: DecoderConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Decoder:
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        decoder = Decoder(c)
        torch.set_default_dtype(before)
    g = torch.Generator(device).manual_seed(seed)
    for name, p in decoder.named_parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5, generator=g)
        else:
            p.data.copy_(
                torch.empty(p.shape, device=device, dtype=dtype).normal_(
                    0, p.shape[-1] ** -0.5, generator=g
                )
            )
        assert name
    for name, b in decoder.named_buffers():
        if name.endswith("_scale"):  # of float8 weights
            b.uniform_(0.5, 1.5, generator=g)
    decoder.prepare(device)
    return decoder


class Bed:
    """A decoder, its cache with scattered tables, and rows of input by sequence."""

    def __init__(
        self,
        c: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        length: int,
        block: int = 8,
    ) -> None:
        self.decoder = build(c, device, dtype)
        width = -(-length // block)
        self.cache = self.decoder.cache(rows * width + 1, block, device, dtype)
        self.rows = DeviceRows(rows, width, 4, self.cache)
        free = torch.randperm(rows * width, generator=torch.Generator().manual_seed(1)).tolist()
        for row in range(rows):
            self.rows.put_blocks([(row, 0, free[row * width : (row + 1) * width])])
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(rows, length, c.hidden_size, generator=g).to(device, dtype)
        self.positions = torch.randint(0, 200, (3, rows, length), generator=g).float().to(device)

    def inputs(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor, Paging]:
        x = torch.cat([self.x[r, a:b] for r, a, b in spans])
        positions = torch.cat([self.positions[:, r, a:b] for r, a, b in spans], 1)
        return x, positions, self.rows.mixed_paging(spans)

    def plain(self, spans: list[Span], after: AfterLayer | None = None) -> torch.Tensor:
        """Layer by layer in plain PyTorch, whatever the decoder itself would choose."""
        x, positions, paging = self.inputs(spans)
        cos, sin = self.decoder.rope(positions, x.dtype)
        attention = PagedPass(self.cache, paging)
        for i, layer in enumerate(self.decoder.layers):
            x = layer(x, cos, sin, attention)
            x = x if after is None else after(i, x)
        return self.decoder.norm(x)

    def fast(self, spans: list[Span], after: AfterLayer | None = None) -> torch.Tensor:
        x, positions, paging = self.inputs(spans)
        cos, sin = self.decoder.rope(positions, x.dtype)
        return self.decoder.prefill(x, cos, sin, self.cache, Ragged.of(paging), after)

"""The vision encoder: flattened patches of images and video frames in, thinker rows and DeepStack
rows out.

Attention never leaves a frame (one temporal patch), so the frames of a video may be encoded
together or one by one as they arrive, with the same result. Called by the thinker stage on its own
thread, on the current stream; grids are known on the host, so nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch
import torch.nn.functional as F
from torch import nn

from stretto.kernels.triton import usable
from stretto.layers.linear import Embedding, Linear
from stretto.layers.upload import to_device
from stretto.models.parts import Parts, run_through
from stretto.models.qwen3_omni.config import VisionConfig
from stretto.preprocess.prompt import Array

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6

# Frames go through the blocks in slabs of at most so many patches (a larger frame goes alone),
# which bounds the activations whatever the length of a video, and the time that others wait. At the
# released size one patch costs about a gigaflop: a slab takes an H200 some 10 ms. In bf16 it peaks
# near 40 kB: the largest image (12.8 megapixels, 50,176 patches) takes 2 GB.
SLAB_PATCHES = 4096
SLAB_PATCHES_CPU = 256

# Attention of a larger frame is cut by pairs of patches: 10 ms there, as much of a core with a tiny
# model. All else of it is cut on a CPU only, by rows, which must be whole merge blocks.
PAIRS = 1 << 30
PAIRS_CPU = 1 << 20
# queries that attention on a CPU takes at once: a part of a tile costs nearly as much
TILE_CPU = 32
ROWS_CPU = 1024

Grid = tuple[int, int, int]  # t, h, w in patches
Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [patches, 1, head_dim / 2], float32
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of q, k, v [patches, heads, head_dim] -> [patches, hidden]: it knows which patches see
each other."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionRows:
    main: torch.Tensor  # [patches / merge**2, out]
    # as main: level l is added to the thinker's hidden state after its layer l
    deep: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class PartSize:
    """How much of a frame larger than a slab is done at a time."""

    patches: int  # embedded
    # in all else but attention: a GPU does all of them at once, launches being what it waits for
    rows: int
    queries: int  # of attention, each to all patches

    @classmethod
    def of(cls, frame: int, max_patches: int, cpu: bool) -> PartSize:
        if not cpu:
            return cls(max_patches, frame, max(1, PAIRS // frame))
        return cls(max_patches, ROWS_CPU, max(1, PAIRS_CPU // frame // TILE_CPU) * TILE_CPU)


class PatchEmbed(nn.Module):
    """A convolution over exactly one patch is a product with the flattened patch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: torch.Tensor, rope: Rope, mix: Mix) -> torch.Tensor:
        out: torch.Tensor = self.proj(mix(*self.project(x, rope)))
        return out

    def project(
        self, x: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = self.qkv(x).view(len(x), 3, self.num_heads, -1)
        if usable(x):
            from stretto.kernels.triton.vision import rotate_qk

            rotate_qk(qkv, *rope)
            q, k, v = qkv.unbind(1)
        else:
            q, k, v = qkv.unbind(1)
            q, k = rotate(q, rope), rotate(k, rope)
        return q, k, v


class Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.ffn_size, bias=True)
        self.linear_fc2 = Linear(config.ffn_size, config.hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = Attention(config)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor, rope: Rope, mix: Mix) -> torch.Tensor:
        return self.finish(x, self.attn(self.norm1(x), rope, mix))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + attended
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out

    def in_parts(self, x: torch.Tensor, rope: Rope, size: PartSize) -> Parts[torch.Tensor]:
        """One frame, whose patches all see each other."""
        q, k, v = yield from by_rows(
            lambda x, *r: self.attn.project(self.norm1(x), r), size.rows, x, *rope
        )
        yield
        (mixed,) = yield from by_rows(lambda q: (attend(q, k, v, 1),), size.queries, q)
        yield
        (x,) = yield from by_rows(
            lambda x, m: (self.finish(x, self.attn.proj(m)),), size.rows, x, mixed
        )
        return x


class Merger(nn.Module):
    """merge x merge neighbours become one row. The DeepStack mergers normalise them joined, the
    last one singly."""

    def __init__(self, config: VisionConfig, norm_joined: bool) -> None:
        super().__init__()
        self.joined_size = config.hidden_size * config.merge**2
        self.norm_joined = norm_joined
        self.ln_q = nn.LayerNorm(
            self.joined_size if norm_joined else config.hidden_size, eps=NORM_EPS
        )
        self.mlp = nn.Sequential(
            Linear(self.joined_size, self.joined_size, bias=True),
            nn.GELU(),
            Linear(self.joined_size, config.output_size, bias=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_joined:
            x = self.ln_q(x.view(-1, self.joined_size))
        else:
            x = self.ln_q(x).view(-1, self.joined_size)
        out: torch.Tensor = self.mlp(x)
        return out


ReplayFrame = Callable[[torch.Tensor, Rope], VisionRows | None]
"""`FrameGraphs.run`: one frame as `VisionEncoder.embed` makes it, by a captured pass; None if none
fits."""


class VisionEncoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = Embedding(config.num_positions, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.merger = Merger(config, norm_joined=False)
        self.merger_list = nn.ModuleList(
            Merger(config, norm_joined=True) for _ in config.deepstack_layers
        )
        self.requires_grad_(False)

    def encode(
        self, patches: torch.Tensor, grids: Sequence[Grid], replay: ReplayFrame | None = None
    ) -> VisionRows:
        """Images and videos one after the other: [sum of t*h*w, patch values], in merge-block
        order.

        Frames of equal size that follow each other are attended in one launch, so sort by size if
        you can."""
        sizes = [t * h * w for t, h, w in grids]
        assert len(patches) == sum(sizes), f"{len(patches)} patches for grids of {sum(sizes)}"
        return run_through(self.encoding(torch.split(patches, sizes), grids, replay))

    def encoding(
        self,
        pictures: Sequence[torch.Tensor | Array],
        grids: Sequence[Grid],
        replay: ReplayFrame | None = None,
    ) -> Parts[VisionRows]:
        """`encode` in parts: slabs of frames, or parts of one that is larger than a slab.
        `pictures`: the patches of each image or video, here or on the host, from where they are
        taken as they are needed. A frame that is alone in its slab is encoded by `replay` if it
        fits."""
        merge = self.config.merge
        assert all(
            t > 0 and h > 0 and w > 0 and h % merge == 0 and w % merge == 0 for t, h, w in grids
        ), f"grids must be multiples of {merge}, got {list(grids)}"
        frames = [(h, w) for t, h, w in grids for _ in range(t)]
        if not frames:
            empty = self.pos_embed.weight.new_empty(0, self.config.output_size)
            return VisionRows(empty, (empty,) * len(self.merger_list))
        cpu = self.pos_embed.weight.device.type == "cpu"
        max_patches = SLAB_PATCHES_CPU if cpu else SLAB_PATCHES
        patches = (
            p[i * h * w : (i + 1) * h * w]
            for p, (t, h, w) in zip(pictures, grids, strict=True)
            for i in range(t)
        )
        parts: list[VisionRows] = []
        for slab in slabs(frames, max_patches):
            if parts:
                yield
            frame, *more = islice(patches, len(slab))
            if len(frame) > max_patches:
                size = PartSize.of(len(frame), max_patches, cpu)
                parts.append((yield from self._encode_large(frame, slab[0], size)))
            else:
                x = [self._upload(p) for p in (frame, *more)]
                parts.append(self._encode(torch.cat(x) if more else x[0], slab, replay))
        if len(parts) == 1:
            return parts[0]
        deep = tuple(torch.cat(level) for level in zip(*(p.deep for p in parts), strict=True))
        return VisionRows(torch.cat([p.main for p in parts]), deep)

    def _upload(self, patches: torch.Tensor | Array) -> torch.Tensor:
        weight = self.patch_embed.proj.weight
        if isinstance(patches, torch.Tensor):
            return patches.to(weight.device, weight.dtype, non_blocking=True)
        return to_device(patches, weight.device, torch.float32).to(weight.dtype)

    def _encode(
        self,
        patches: torch.Tensor,
        frames: Sequence[tuple[int, int]],
        replay: ReplayFrame | None,
    ) -> VisionRows:
        x, rope = self.embed(patches, frames)
        # Several frames go together instead: each launch serves all of them, so the device is what
        # takes the time.
        captured = replay(x, rope) if replay is not None and len(frames) == 1 else None
        if captured is not None:
            return captured
        runs = [(len(list(same)), n) for n, same in groupby(h * w for h, w in frames)]
        return self.transform(x, rope, lambda q, k, v: attend_runs(q, k, v, runs))

    def _encode_large(
        self, patches: torch.Tensor | Array, frame: tuple[int, int], size: PartSize
    ) -> Parts[VisionRows]:
        """A frame of more patches than a slab has."""
        (x,) = yield from by_rows(
            lambda p: (self.patch_embed(self._upload(p)),), size.patches, patches
        )
        yield
        places = self._positions(*frame)
        yield
        x, rope = x + places, self._rope(*frame)
        deep: list[torch.Tensor] = []
        for i, block in enumerate(self.blocks):
            yield
            assert isinstance(block, Block)
            x = yield from block.in_parts(x, rope, size)
            if (merger := self._merger_after(i)) is not None:
                yield
                deep += yield from by_rows(lambda x, merger=merger: (merger(x),), size.rows, x)
        yield
        (main,) = yield from by_rows(lambda x: (self.merger(x),), size.rows, x)
        return VisionRows(main, tuple(deep))

    def embed(
        self, patches: torch.Tensor, frames: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, Rope]:
        """What the blocks start from, for frames of (height, width): rows [patches, hidden] and
        their turns."""
        weight = self.patch_embed.proj.weight
        x = self.patch_embed(patches.to(weight.device, weight.dtype, non_blocking=True))
        places = {size: self._positions(*size) for size in set(frames)}
        ropes = {size: self._rope(*size) for size in set(frames)}
        x = x + torch.cat([places[f] for f in frames])
        return x, (
            torch.cat([ropes[f][0] for f in frames]),
            torch.cat([ropes[f][1] for f in frames]),
        )

    def transform(self, x: torch.Tensor, rope: Rope, mix: Mix) -> VisionRows:
        """The blocks and all mergers. Shapes depend on the number of rows alone."""
        deep: list[torch.Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, rope, mix)
            if (merger := self._merger_after(i)) is not None:
                deep.append(merger(x))
        return VisionRows(self.merger(x), tuple(deep))

    def _merger_after(self, block: int) -> nn.Module | None:
        """What makes a level of the deep rows of a block's output, if anything does."""
        layers = self.config.deepstack_layers
        return self.merger_list[layers.index(block)] if block in layers else None

    def _positions(self, height: int, width: int) -> torch.Tensor:
        """The learned square table, resampled (bilinear, corners on corners) to the grid, in patch
        order."""
        table = self.pos_embed.weight
        side = round(self.config.num_positions**0.5)
        rows = lerp(table.float().view(side, side, -1), height)
        grid = lerp(rows.transpose(0, 1), width).transpose(0, 1)
        return block_order(grid, self.config.merge).to(table.dtype)

    def _rope(self, height: int, width: int) -> Rope:
        """Half of the frequencies turn with the row, half with the column. Float32 whatever the
        model's dtype."""
        device = self.pos_embed.weight.device
        quarter = self.config.hidden_size // self.config.num_heads // 4
        rate = ROPE_THETA ** -(torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
        down = torch.arange(height, device=device)[:, None, None] * rate
        across = torch.arange(width, device=device)[None, :, None] * rate
        shape = (height, width, quarter)
        angle = block_order(
            torch.cat([down.expand(shape), across.expand(shape)], -1), self.config.merge
        )[:, None]
        return angle.cos(), angle.sin()


def by_rows(
    work: Callable[..., Sequence[torch.Tensor]], rows: int, *inputs: torch.Tensor | Array
) -> Parts[tuple[torch.Tensor, ...]]:
    """What `work` makes of all rows, so many in each part."""
    done: list[Sequence[torch.Tensor]] = []
    for at in range(0, len(inputs[0]), rows):
        if done:
            yield
        done.append(work(*(g[at : at + rows] for g in inputs)))
    return tuple(made[0] if len(made) == 1 else torch.cat(made) for made in zip(*done, strict=True))


def attend_runs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Frames of any sizes; `runs`: how many frames of how many patches follow each other."""
    mixed, at = [], 0
    for frames, n in runs:
        run = slice(at, at + frames * n)
        mixed.append(attend(q[run], k[run], v[run], frames))
        at = run.stop
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Full attention inside each of `frames` equal frames: [patches, heads, head_dim] -> [patches,
    hidden].

    Without a mask, the fastest fused kernels apply (flash on CPU and for bf16 on CUDA,
    memory-efficient for float32 on CUDA). They never hold the scores: those of the largest image,
    50k x 50k in 16 heads, would take 80 GB. `mask` is added to the scores."""
    rows = len(q)
    q, k, v = (x.reshape(frames, len(x) // frames, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(rows, -1)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """[patches, heads, head_dim], turned in float32."""
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def lerp(table: torch.Tensor, size: int) -> torch.Tensor:
    """Resample the first dimension to `size` entries, linearly; the first and last stay where they
    are."""
    last = len(table) - 1
    at = torch.arange(size, device=table.device, dtype=torch.float32) * (last / max(size - 1, 1))
    low = at.floor().long().clamp(max=last)
    high = (low + 1).clamp(max=last)
    part = (at - low).view(-1, *[1] * (table.dim() - 1))
    return table[low] * (1 - part) + table[high] * part


def block_order(grid: torch.Tensor, merge: int) -> torch.Tensor:
    """[h, w, d] -> [h*w, d] in the order of patches: merge x merge blocks by rows, and by rows
    inside a block."""
    h, w, d = grid.shape
    return grid.reshape(h // merge, merge, w // merge, merge, d).transpose(1, 2).reshape(h * w, d)


def slabs(frames: Sequence[tuple[int, int]], max_patches: int) -> Iterator[list[tuple[int, int]]]:
    """Consecutive frames in groups of at most so many patches, at least one frame each."""
    slab: list[tuple[int, int]] = []
    size = 0
    for h, w in frames:
        if slab and size + h * w > max_patches:
            yield slab
            slab, size = [], 0
        slab.append((h, w))
        size += h * w
    if slab:
        yield slab

"""The vision encoder against transformers, together and frame by frame."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch

from stretto.layers.targets import targets
from stretto.models.qwen3_omni import vision_encoder
from stretto.models.qwen3_omni.config import OmniConfig, VisionConfig
from stretto.models.qwen3_omni.vision_encoder import Grid, VisionEncoder, VisionRows, slabs
from tests.models.qwen3_omni.pictures import (
    EXACT,
    PATCH,
    PREFIX,
    adopt,
    assert_rows,
    random_patches,
    reference,
)


@pytest.fixture(scope="module")
def encoder(tiny_config: OmniConfig, oracle: Any) -> VisionEncoder:
    return adopt(oracle.thinker.visual, tiny_config.thinker.vision)


def join(parts: list[VisionRows]) -> VisionRows:
    deep = tuple(torch.cat(level) for level in zip(*(p.deep for p in parts), strict=True))
    return VisionRows(torch.cat([p.main for p in parts]), deep)


@pytest.mark.parametrize(
    "grids",
    [
        [(1, 2, 2)],
        [(1, 8, 8)],
        [(1, 16, 16)],
        [(1, 26, 4)],
        [(1, 2, 30)],
        [(1, 14, 22)],
        [(4, 6, 10)],
        [(1, 4, 8), (1, 8, 4), (3, 4, 8), (1, 6, 6), (1, 4, 8), (2, 10, 2)],
    ],
    ids=str,
)
def test_equals_transformers(encoder: VisionEncoder, oracle: Any, grids: list[Grid]) -> None:
    patches = random_patches(grids, seed=len(grids))
    theirs = reference(oracle.thinker.visual, patches, grids)
    ours = encoder.encode(patches, grids)
    assert len(ours.main) == len(patches) // encoder.config.merge**2
    assert len(ours.deep) == len(encoder.config.deepstack_layers)
    assert_rows(ours, theirs)


def test_small_activations_equal_transformers(tiny_config: OmniConfig, oracle: Any) -> None:
    """With a residual stream near zero, the norms' epsilon and the kind of GELU show."""
    tower = deepcopy(oracle.thinker.visual)
    for name, weight in tower.named_parameters():
        if (
            name.startswith(("patch_embed", "pos_embed"))
            or ".attn.proj." in name
            or ".linear_fc2." in name
        ):
            weight.data *= 0.01
    grids: list[Grid] = [(1, 6, 10), (2, 4, 4)]
    patches = random_patches(grids, seed=9)
    ours = adopt(tower, tiny_config.thinker.vision).encode(patches, grids)
    assert_rows(ours, reference(tower, patches, grids))


def test_deepstack_levels_differ(encoder: VisionEncoder) -> None:
    rows = encoder.encode(random_patches([(1, 6, 6)]), [(1, 6, 6)])
    levels = [rows.main, *rows.deep]
    for i, one in enumerate(levels):
        for other in levels[:i]:
            assert (one - other).abs().max() > 0.1


def test_images_together_equal_alone(encoder: VisionEncoder) -> None:
    grids: list[Grid] = [(1, 4, 6), (1, 6, 4), (1, 8, 8), (1, 4, 6), (1, 2, 12)]
    patches = random_patches(grids, seed=3)
    parts = torch.split(patches, [t * h * w for t, h, w in grids])
    alone = join([encoder.encode(p, [g]) for p, g in zip(parts, grids, strict=True)])
    assert_rows(encoder.encode(patches, grids), alone)


def test_video_frames_one_by_one_equal_the_whole(encoder: VisionEncoder) -> None:
    grid = (5, 6, 8)
    patches = random_patches([grid], seed=4)
    singly = join([encoder.encode(frame, [(1, 6, 8)]) for frame in torch.split(patches, 48)])
    assert_rows(encoder.encode(patches, [grid]), singly)


def test_a_frame_sees_only_itself(encoder: VisionEncoder) -> None:
    patches = random_patches([(3, 4, 4)], seed=5)
    changed = patches.clone()
    changed[16:32] += 1
    before, after = (
        encoder.encode(patches, [(3, 4, 4)]).main,
        encoder.encode(changed, [(3, 4, 4)]).main,
    )
    assert (before[4:8] - after[4:8]).abs().amax(1).min() > 1e-3
    torch.testing.assert_close(before[:4], after[:4], **EXACT)
    torch.testing.assert_close(before[8:], after[8:], **EXACT)


def test_slabs_hold_whole_frames_and_change_nothing(
    encoder: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[Grid] = [(7, 4, 4), (1, 8, 8), (2, 2, 4)]
    patches = random_patches(grids, seed=6)
    expected = encoder.encode(patches, grids)
    for name in ("SLAB_PATCHES", "SLAB_PATCHES_CPU"):
        monkeypatch.setattr(vision_encoder, name, 40)
    for name in ("PAIRS", "PAIRS_CPU"):
        monkeypatch.setattr(vision_encoder, name, 64 * 24)
    monkeypatch.setattr(vision_encoder, "TILE_CPU", 8)
    monkeypatch.setattr(vision_encoder, "ROWS_CPU", 16)
    frames = [(h, w) for t, h, w in grids for _ in range(t)]
    groups = list(slabs(frames, 40))
    assert [f for g in groups for f in g] == frames
    assert [sum(h * w for h, w in g) for g in groups] == [32, 32, 32, 16, 64, 16]
    ours = encoder.encode(patches, grids)
    assert_rows(ours, expected)
    # Six slabs, one of which is a large frame. Its patches are embedded 40 at a time, its places
    # are two more parts, and three times 24 queries look at all in each block. The rest, twice a
    # block and once a merger, is done at once on a GPU and 16 patches at a time on a CPU. So often
    # can others have a turn.
    parts = encoder.encoding(patches.split([112, 64, 16]), grids)
    rest = 4 if encoder.pos_embed.weight.device.type == "cpu" else 1
    large = 2 + 2 + (3 + 2 * rest) * len(encoder.blocks) + rest * (len(encoder.merger_list) + 1)
    assert 1 + sum(1 for _ in parts) == len(groups) - 1 + large


def test_no_part_of_a_large_picture_is_long(
    encoder: VisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose listeners wait for each part: the rows that a layer is given in it, and the
    pairs of patches that look at each other, do not grow with the picture."""
    monkeypatch.setattr(vision_encoder, "PAIRS_CPU", 1 << 13)
    monkeypatch.setattr(vision_encoder, "TILE_CPU", 8)
    monkeypatch.setattr(vision_encoder, "ROWS_CPU", 64)
    ours, attend = deepcopy(encoder).cpu(), vision_encoder.attend
    rows: Counter[torch.nn.Module] = Counter()
    pairs: list[int] = []

    def watch(layer: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        rows[layer] += given[0][..., 0].numel()

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: int) -> torch.Tensor:
        pairs.append(len(q) * len(k))
        return attend(q, k, v, frames)

    for layer in ours.modules():
        if isinstance(layer, vision_encoder.Linear | torch.nn.LayerNorm):
            layer.register_forward_pre_hook(watch)
    monkeypatch.setattr(vision_encoder, "attend", watched)
    grid = (1, 18, 20)
    patches = random_patches([grid], seed=8)
    parts, seen = ours.encoding([patches], [grid]), None
    most_rows = most_pairs = 0
    while seen is None:
        try:
            next(parts)
        except StopIteration as end:
            seen = end.value
        most_rows, most_pairs = max(most_rows, *rows.values(), 0), max(most_pairs, sum(pairs))
        rows.clear()
        pairs.clear()
    assert most_rows == 64
    assert most_pairs == 16 * 360  # of 8192, in whole tiles
    whole = encoder.encode(patches, [grid])
    assert_rows(seen, VisionRows(whole.main.cpu(), tuple(rows.cpu() for rows in whole.deep)))


def test_nothing_in_nothing_out(encoder: VisionEncoder) -> None:
    rows = encoder.encode(torch.empty(0, PATCH), [])
    assert rows.main.shape == (0, encoder.config.output_size)
    assert [d.shape for d in rows.deep] == [rows.main.shape] * len(encoder.config.deepstack_layers)


def test_grids_that_do_not_fit_are_named(encoder: VisionEncoder) -> None:
    with pytest.raises(AssertionError, match="multiples of 2"):
        encoder.encode(random_patches([(1, 3, 4)]), [(1, 3, 4)])
    with pytest.raises(AssertionError, match="16 patches for grids of 24"):
        encoder.encode(random_patches([(1, 4, 4)]), [(1, 4, 6)])


def copy(encoder: VisionEncoder, device: torch.device | str, dtype: torch.dtype) -> VisionEncoder:
    module = VisionEncoder(encoder.config)
    module.load_state_dict(encoder.state_dict())
    return module.to(device, dtype)


def assert_near(rows: VisionRows, exact: VisionRows, tolerance: float) -> None:
    for a, b in zip((rows.main, *rows.deep), (exact.main, *exact.deep), strict=True):
        a, b = a.float().cpu(), b.cpu()
        assert (a - b).norm() / b.norm() < tolerance


def test_bf16_stays_near_float32(encoder: VisionEncoder, device: torch.device) -> None:
    grids: list[Grid] = [(1, 10, 14), (2, 4, 4)]
    patches = random_patches(grids, seed=7)
    rounded = copy(encoder, device, torch.bfloat16).encode(patches, grids)
    assert {x.dtype for x in (rounded.main, *rounded.deep)} == {torch.bfloat16}
    assert_near(rounded, encoder.encode(patches, grids), 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str
)
def test_cuda_equals_cpu_and_never_waits(
    encoder: VisionEncoder, dtype: torch.dtype, tolerance: float
) -> None:
    grids: list[Grid] = [(1, 10, 14), (2, 4, 4), (1, 16, 6)]
    patches = random_patches(grids, seed=8)
    module = copy(encoder, "cuda", dtype)
    module.encode(patches, grids)  # the first run may load kernels, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = module.encode(patches, grids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_near(rows, copy(encoder, "cpu", torch.float32).encode(patches, grids), tolerance)


def test_names_and_shapes_at_released_size() -> None:
    released = VisionConfig(
        hidden_size=1152,
        num_layers=27,
        num_heads=16,
        ffn_size=4304,
        patch_size=16,
        temporal_patch=2,
        merge=2,
        channels=3,
        output_size=2048,
        num_positions=2304,
        deepstack_layers=(8, 16, 24),
    )
    d, joined = 1152, 4608
    expected: dict[str, tuple[int, ...]] = {"pos_embed.weight": (2304, d)}
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj": (d, 3, 2, 16, 16)}
    for i in range(27):
        at = f"blocks.{i}."
        shapes |= {
            f"{at}attn.qkv": (3 * d, d),
            f"{at}attn.proj": (d, d),
            f"{at}norm1": (d,),
            f"{at}norm2": (d,),
        }
        shapes |= {f"{at}mlp.linear_fc1": (4304, d), f"{at}mlp.linear_fc2": (d, 4304)}
    for at, norm in (("merger.", d), *((f"merger_list.{i}.", joined) for i in range(3))):
        shapes |= {
            f"{at}ln_q": (norm,),
            f"{at}mlp.0": (joined, joined),
            f"{at}mlp.2": (2048, joined),
        }
    for name, shape in shapes.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    with torch.device("meta"):
        found = targets(VisionEncoder(released), PREFIX)
    assert {name: tuple(view.shape) for name, view in found.items()} == {
        PREFIX + n: s for n, s in expected.items()
    }

"""One frame in static buffers: the same rows as without, whatever was there before."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.patches import fit
from stretto.models.qwen3_omni.thinker import MediaRows
from stretto.models.qwen3_omni.vision_encoder import (
    Grid,
    ReplayFrame,
    Rope,
    VisionEncoder,
    VisionRows,
)
from stretto.models.qwen3_omni.vision_graphs import SIZES, FrameGraphs
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import build
from stretto.preprocess.prompt import Patches, Prompt
from stretto.testing.qwen3_omni import released_config
from tests.media import encode_media
from tests.models.qwen3_omni.pictures import adopt, assert_rows, random_patches, reference
from tests.prompts import Maker

SMALL = (16, 48, 96)
FRAMES = [
    (2, 2),
    (2, 4),
    (4, 4),
    (2, 10),
    (10, 2),
    (6, 6),
    (6, 8),
    (2, 24),
    (14, 6),
    (8, 12),
    (2, 48),
]
"""One group of patches, odd numbers of groups, and sizes on and next to the edges of the graphs."""


def encode_frame(
    encoder: VisionEncoder,
    patches: torch.Tensor,
    height: int,
    width: int,
    replay: ReplayFrame | None = None,
) -> VisionRows:
    return encoder.encode(patches, [(1, height, width)], replay)


class Recorded:
    """A captured pass on the CPU: as a graph does, each replay writes where the first one did."""

    def __init__(self, graphs: FrameGraphs, size: int) -> None:
        self.graphs, self.size, self.replays = graphs, size, 0
        self.out = graphs.forward(size)

    def replay(self) -> None:
        self.replays += 1
        self.out.copy_(self.graphs.forward(self.size))


def recorded(
    encoder: VisionEncoder, sizes: tuple[int, ...] = SMALL
) -> tuple[FrameGraphs, dict[int, Recorded]]:
    graphs = FrameGraphs(encoder, sizes)
    passes = {size: Recorded(graphs, size) for size in sizes}
    graphs.graphs = {size: (one, one.out) for size, one in passes.items()}  # type: ignore[misc]
    return graphs, passes


def replays(passes: dict[int, Recorded]) -> list[int]:
    return [one.replays for one in passes.values()]


@pytest.fixture
def encoder(tiny_config: OmniConfig, oracle: Any) -> VisionEncoder:
    return adopt(oracle.thinker.visual, tiny_config.thinker.vision)


def frame(encoder: VisionEncoder, h: int, w: int, seed: int = 0) -> tuple[torch.Tensor, Rope]:
    return encoder.embed(random_patches([(1, h, w)], seed), [(h, w)])


def cut(out: torch.Tensor, count: int) -> VisionRows:
    main, *deep = out[:, : count // 4].unbind()
    return VisionRows(main, tuple(deep))


# ---- the padded pass


@pytest.mark.parametrize("left", [0.0, 1e6, math.inf, math.nan])
@pytest.mark.parametrize("size", [96, 112])
def test_padded_frames_are_as_alone(encoder: VisionEncoder, size: int, left: float) -> None:
    """Over static buffers with anything in them, as it is captured."""
    graphs = FrameGraphs(encoder, (size,))
    for h, w in FRAMES:
        graphs.rows.fill_(left)
        graphs.turns.fill_(left)
        graphs.fill(*frame(encoder, h, w), size)
        assert_rows(
            cut(graphs.forward(size), h * w),
            encoder.encode(random_patches([(1, h, w)]), [(1, h, w)]),
        )


def test_padding_has_no_say(encoder: VisionEncoder) -> None:
    """Rows behind the end may be any numbers."""
    graphs = FrameGraphs(encoder, (48,))
    graphs.fill(*frame(encoder, 2, 10), 48)
    before = cut(graphs.forward(48), 20)
    graphs.rows[20:] = 100 * torch.randn(
        28, graphs.rows.shape[1], generator=torch.Generator().manual_seed(1)
    )
    graphs.turns[:, 20:] = 1
    assert_rows(cut(graphs.forward(48), 20), before)
    graphs.count.fill_(24)  # were they counted, it would show
    assert (cut(graphs.forward(48), 20).main - before.main).abs().max() > 1e-2


def test_a_frame_must_fit(encoder: VisionEncoder) -> None:
    graphs = FrameGraphs(encoder, (16, 48))
    with pytest.raises(AssertionError, match="20 patches for a graph of 16"):
        graphs.fill(*frame(encoder, 2, 10), 16)
    with pytest.raises(AssertionError, match="whole groups of 4"):
        FrameGraphs(encoder, (16, 18))


# ---- chosen and replayed


def test_frames_equal_the_plain_way_and_transformers(encoder: VisionEncoder, oracle: Any) -> None:
    """Large and small in turns; each result outlives the replays after it."""
    frames = [f for pair in zip(FRAMES, FRAMES[::-1], strict=True) for f in pair]
    plain = [
        encode_frame(encoder, random_patches([(1, h, w)], i), h, w)
        for i, (h, w) in enumerate(frames)
    ]
    graphs, passes = recorded(encoder)
    found = [
        encode_frame(encoder, random_patches([(1, h, w)], i), h, w, graphs.run)
        for i, (h, w) in enumerate(frames)
    ]
    for i, (h, w) in enumerate(frames):
        assert_rows(found[i], plain[i])
        assert_rows(
            found[i], reference(oracle.thinker.visual, random_patches([(1, h, w)], i), [(1, h, w)])
        )
    assert replays(passes) == [6, 10, 6]  # by the edges: 4 to 16, to 48, to 96 patches


def test_an_image_of_no_numbers_spoils_only_itself(encoder: VisionEncoder) -> None:
    expected = encode_frame(encoder, random_patches([(1, 2, 10)]), 2, 10)
    graphs, passes = recorded(encoder)
    bad = encode_frame(
        encoder, torch.full_like(random_patches([(1, 6, 8)]), math.nan), 6, 8, graphs.run
    )
    assert all(x.isnan().all() for x in (bad.main, *bad.deep))
    assert_rows(encode_frame(encoder, random_patches([(1, 2, 10)]), 2, 10, graphs.run), expected)
    assert replays(passes) == [0, 2, 0]


@pytest.mark.parametrize(
    "grids",
    [[(1, 10, 10)], [(2, 4, 4)], [(1, 4, 4), (1, 2, 6)], [(1, 4, 4), (1, 10, 10)]],
    ids=["larger than any graph", "video", "images", "images, one too large"],
)
def test_the_rest_goes_the_plain_way(encoder: VisionEncoder, grids: list[Grid]) -> None:
    expected = encoder.encode(random_patches(grids), grids)
    graphs, passes = recorded(encoder)
    assert_rows(encoder.encode(random_patches(grids), grids, graphs.run), expected)
    assert replays(passes) == [0, 0, 0]


def test_without_captured_graphs_nothing_fits(encoder: VisionEncoder) -> None:
    assert FrameGraphs(encoder).run(*frame(encoder, 2, 2)) is None


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        *[
            (224, 224, 256),
            (256, 256, 256),
            (384, 384, 576),
            (448, 448, 832),
            (512, 512, 1024),
            (640, 480, 1280),
        ],
        *[
            (480, 640, 1280),
            (640, 640, 2048),
            (800, 600, 2048),
            (1024, 768, None),
            (1280, 720, None),
        ],
    ],
)
def test_usual_sizes_have_graphs(width: int, height: int, size: int | None) -> None:
    h, w = fit(height, width, 32, 3136, 12_845_056)
    patches = h * w // 16**2
    assert next((s for s in SIZES if s >= patches), None) == size
    assert size is None or patches > 0.75 * size
    assert all(a < b and b % 16 == 0 for a, b in pairwise((0, *SIZES)))


# ---- through the thinker


def scene(config: OmniConfig, images: list[tuple[int, int]], video: Grid) -> Prompt:
    m = Maker(config, seed=3)
    pictures = [m.image(h, w) for h, w in images]
    m.turn("user", *pictures, m.words(2), m.video(*video, 1.0), m.words(3))
    return m.prompt()


def assert_media(ours: MediaRows | None, theirs: MediaRows | None) -> None:
    assert ours is not None
    assert theirs is not None
    for name in ("places", "rows", "visual_places", "deep"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0.0, atol=1e-5)


@torch.inference_mode()
def test_images_and_videos_of_a_prompt(models: Models) -> None:
    """One image, or a video of one frame, by its graph, beside what is not; and after a prompt of
    no numbers."""
    thinker, config = models.thinker, models.config
    scenes = [
        (scene(config, [(6, 8)], (3, 4, 4)), [0, 1, 0]),
        (scene(config, [(4, 4), (2, 10)], (1, 8, 12)), [0, 0, 1]),
        (scene(config, [(2, 2)], (1, 2, 10)), [1, 1, 0]),
        (scene(config, [(12, 10)], (2, 2, 2)), [0, 0, 0]),
    ]
    expected = [encode_media(thinker, prompt) for prompt, _ in scenes]
    graphs, passes = recorded(thinker.visual)
    spoilt = Prompt(
        scenes[0][0].ids,
        images=tuple(
            Patches.of(np.full_like(p.values, np.nan), p.grid) for p in scenes[0][0].images
        ),
        videos=scenes[0][0].videos,
    )
    assert (media := encode_media(thinker, spoilt, graphs.run)) is not None
    assert media.rows.isnan().any()
    for (prompt, want), plain in zip(scenes, expected, strict=True):
        before = replays(passes)
        assert_media(encode_media(thinker, prompt, graphs.run), plain)
        assert [now - then for now, then in zip(replays(passes), before, strict=True)] == want


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str
)
@torch.inference_mode()
def test_replays_equal_the_plain_way(dtype: torch.dtype, tolerance: float) -> None:
    """At the released width and four blocks; one image of no numbers among them, and never waiting
    for the device."""
    config = replace(
        parse(released_config()).thinker.vision, num_layers=4, deepstack_layers=(0, 1, 2)
    )
    encoder = build(lambda: VisionEncoder(config), "cuda", dtype)
    fill_dummy(encoder, 0, "thinker.visual.")
    frames = [(28, 28), (2, 2), (16, 16), (30, 40), (10, 26), (40, 46), (50, 50)]
    inputs = [random_patches([(1, h, w)], i).to("cuda", dtype) for i, (h, w) in enumerate(frames)]
    stream = torch.cuda.Stream()
    want = [encode_frame(encoder, p, h, w) for p, (h, w) in zip(inputs, frames, strict=True)]
    graphs = FrameGraphs(encoder)
    graphs.capture(stream)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        encode_frame(encoder, torch.full_like(inputs[5], math.nan), *frames[5], graphs.run)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [
                encode_frame(encoder, p, h, w, graphs.run)
                for p, (h, w) in zip(inputs, frames, strict=True)
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert graphs.run(*encoder.embed(inputs[-1], frames[-1:])) is None
        for ours, theirs in zip(found, want, strict=True):
            for a, b in zip((ours.main, *ours.deep), (theirs.main, *theirs.deep), strict=True):
                assert a.shape == b.shape
                assert float((a - b).float().norm() / b.float().norm()) < tolerance
    stream.synchronize()

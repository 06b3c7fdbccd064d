"""The audio encoder against transformers, whole and window by window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stretto.layers.targets import targets
from stretto.models.qwen3_omni import audio_encoder
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.config import AudioConfig, OmniConfig, audio_tokens, conv_length
from stretto.preprocess.mel import normalise
from stretto.preprocess.prompt import Array

PREFIX = "thinker.audio_tower."
EXACT = {"rtol": 0.0, "atol": 1e-5}  # of rows around 1; seen: 2e-6
LENGTHS = [
    1,
    2,
    7,
    8,
    9,
    60,
    99,
    100,
    101,
    108,
    160,
    200,
    799,
    800,
    801,
    899,
    900,
    1599,
    1600,
    1601,
    1650,
    2000,
]


@pytest.fixture(scope="module", autouse=True)
def _full_precision() -> Iterator[None]:
    """Convolutions on CUDA round float32 to 10 bits unless told not to."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def encoder(tiny_config: OmniConfig, oracle: Any, device: torch.device) -> AudioEncoder:
    ours = AudioEncoder(tiny_config.thinker.audio).to(device)
    theirs = {
        PREFIX + name: value for name, value in oracle.thinker.audio_tower.state_dict().items()
    }
    places = targets(ours, PREFIX)
    assert places.keys() == theirs.keys()
    for name, place in places.items():
        place.copy_(theirs[name])
    return ours


def random_mel(frames: int, seed: int = 0) -> torch.Tensor:
    return 0.5 * torch.randn(128, frames, generator=torch.Generator().manual_seed(seed))


def speech(frames: int, seed: int = 0) -> Array:
    """Log mel with silence, loudness that comes and goes, and rare bursts."""
    rng = np.random.default_rng(seed)
    loud = np.repeat(
        rng.choice([-7.0, -4.0, -2.0, 0.0], frames // 40 + 1, p=[0.3, 0.3, 0.3, 0.1]), 40
    )[:frames]
    values = loud + rng.normal(size=(128, frames))
    values[rng.random((128, frames)) < 0.01] += 3
    return np.maximum(values, -10).astype(np.float32)


def reference(oracle: Any, features: torch.Tensor) -> torch.Tensor:
    tower = oracle.thinker.audio_tower
    with torch.no_grad():
        out = tower(
            features.to(tower.device),
            feature_lens=torch.tensor([features.shape[1]], device=tower.device),
        )
    rows: torch.Tensor = out.last_hidden_state.cpu()
    return rows


def random_rows(encoder: AudioEncoder, *shape: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(
        *shape, encoder.config.hidden_size, generator=torch.Generator().manual_seed(seed)
    )
    return rows.to(encoder.conv_out.weight.device)


def whole(encoder: AudioEncoder, log_mel: Array) -> torch.Tensor:
    return encoder.encode(torch.from_numpy(normalise(log_mel, float(log_mel.max())))).cpu()


@pytest.mark.parametrize("frames", LENGTHS)
def test_whole_clip_equals_transformers(encoder: AudioEncoder, oracle: Any, frames: int) -> None:
    clip = random_mel(frames, seed=frames)
    ours = encoder.encode(clip).cpu()
    assert len(ours) == audio_tokens(frames)
    torch.testing.assert_close(ours, reference(oracle, clip), **EXACT)


def test_no_frames_no_rows(encoder: AudioEncoder) -> None:
    assert encoder.encode(torch.empty(128, 0)).shape == (0, encoder.config.output_size)


def test_wrong_number_of_bins_is_named(encoder: AudioEncoder) -> None:
    with pytest.raises(AssertionError, match="128"):
        encoder.encode(torch.zeros(80, 10))


def test_front_trims_to_lengths_and_sees_the_padded_width(encoder: AudioEncoder) -> None:
    chunk = random_mel(60)
    padded = torch.nn.functional.pad(chunk, (0, 40))
    short, long = encoder.front(padded[None].expand(2, -1, -1), [60, 100])
    assert (len(short), len(long)) == (conv_length(60), 13)
    (alone,) = encoder.front(padded[None], [60], padded=False)
    assert (short - alone)[-1].abs().max() > 1e-2, (
        "padding must matter, or the tail rule is not tested"
    )
    torch.testing.assert_close(short[:-1], alone[:-1], **EXACT)


def test_convolutions_come_in_few_sizes(encoder: AudioEncoder) -> None:
    """Where a size's first use takes long (a GPU), no clip and no group of windows brings one that
    was not used at start; what fills a batch up changes nothing."""
    clips = [random_mel(n, seed=n) for n in (1, 8, 60, 99, 100, 399, 500, 1650)]
    several = [clips[-1][:, at : at + 800] for at in (0, 800, 1600)] * 2
    want = [encoder.encode(clip) for clip in clips], encoder.encode_windows(several)
    seen: list[tuple[int, ...]] = []
    handle = encoder.conv2d1.register_forward_pre_hook(
        lambda module, given: seen.append(tuple(given[0].shape))
    )
    graphs = WindowGraphs(encoder)
    try:
        with torch.inference_mode():
            encoder.warm()
            warmed = set(seen)
            seen.clear()
            got = (
                [encoder.encode(clip, graphs.run) for clip in clips],
                encoder.encode_windows(several, replay=graphs.run),
            )
    finally:
        handle.remove()
    assert len(warmed) == 7
    assert set(seen) <= warmed
    assert {size for size, *_ in seen} == {1, 4, 8, 32, 64}
    for ours, theirs in zip(got[0] + got[1], want[0] + want[1], strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_windows_batched_equal_alone(encoder: AudioEncoder) -> None:
    rows = [random_rows(encoder, n, seed=i) for i, n in enumerate((104, 1, 57, 104, 13, 90))]
    for ours, alone in zip(encoder.windows(rows), rows, strict=True):
        torch.testing.assert_close(ours, encoder.window(alone), **EXACT)
    equal = [rows[0], rows[3]]
    for ours, alone in zip(encoder.windows(equal), equal, strict=True):
        torch.testing.assert_close(ours, encoder.window(alone), **EXACT)


def test_empty_windows_of_a_padded_batch_disturb_nobody(encoder: AudioEncoder) -> None:
    rows = random_rows(encoder, 3, 20)
    out = encoder.transform(rows, torch.tensor([20, 0, 7], device=rows.device))
    assert out.isfinite().all()
    torch.testing.assert_close(out[2, :7], encoder.window(rows[2, :7]), **EXACT)


def test_launch_sizes_do_not_matter(encoder: AudioEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    log_mel = speech(2750, seed=5)
    expected = whole(encoder, log_mel)
    monkeypatch.setattr(audio_encoder, "WINDOW_BATCH", 2)
    monkeypatch.setattr(audio_encoder, "WINDOW_BATCH_CPU", 2)
    monkeypatch.setattr(audio_encoder, "CONV_BATCH", 3)
    torch.testing.assert_close(whole(encoder, log_mel), expected, **EXACT)


@pytest.mark.parametrize("frames", LENGTHS)
def test_windows_alone_equal_the_whole_clip(encoder: AudioEncoder, frames: int) -> None:
    """One by one, and among those of another clip."""
    clip, other = random_mel(frames), random_mel(1650, seed=1)
    size = encoder.config.window_frames
    windows = [clip[:, at : at + size] for at in range(0, frames, size)]
    padded, expected = frames >= encoder.config.chunk_frames, encoder.encode(clip)
    alone = [encoder.encode_windows([w], padded)[0] for w in windows]
    torch.testing.assert_close(torch.cat(alone), expected, **EXACT)
    if padded:
        beside = [other[:, :size], *windows, other[:, 2 * size :]]
        torch.testing.assert_close(
            torch.cat(encoder.encode_windows(beside)[1:-1]), expected, **EXACT
        )


def copy(encoder: AudioEncoder, device: torch.device | str, dtype: torch.dtype) -> AudioEncoder:
    module = AudioEncoder(encoder.config)
    module.load_state_dict(encoder.state_dict())
    return module.to(device, dtype)


def test_bf16_stays_near_float32(encoder: AudioEncoder, device: torch.device) -> None:
    log_mel = speech(950, seed=12)
    exact = whole(encoder, log_mel)
    rounded = whole(copy(encoder, device, torch.bfloat16), log_mel)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str
)
def test_cuda_equals_cpu_and_never_waits(
    encoder: AudioEncoder, dtype: torch.dtype, tolerance: float
) -> None:
    log_mel = speech(1650, seed=13)
    expected = whole(copy(encoder, "cpu", torch.float32), log_mel)
    module = copy(encoder, "cuda", dtype)
    features = torch.from_numpy(normalise(log_mel, float(log_mel.max()))).cuda()
    module.encode(features)  # the first run may load kernels, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = module.encode(features)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (rows.cpu().float() - expected).norm() / expected.norm() < tolerance


def test_names_and_shapes_at_released_size() -> None:
    released = AudioConfig(
        num_mel_bins=128,
        hidden_size=1280,
        num_layers=32,
        num_heads=20,
        ffn_size=5120,
        conv_channels=480,
        output_size=2048,
        chunk_frames=100,
        window_frames=800,
    )
    d = 1280
    expected: dict[str, tuple[int, ...]] = {"conv_out.weight": (d, 7680)}
    shapes = {"ln_post": (d,), "proj1": (d, d), "proj2": (2048, d)}
    shapes |= {f"conv2d{i}": (480, 1 if i == 1 else 480, 3, 3) for i in (1, 2, 3)}
    for i in range(32):
        at = f"layers.{i}."
        shapes |= {f"{at}self_attn.{x}_proj": (d, d) for x in ("q", "k", "v", "out")}
        shapes |= {f"{at}fc1": (5120, d), f"{at}fc2": (d, 5120)}
        shapes |= {f"{at}self_attn_layer_norm": (d,), f"{at}final_layer_norm": (d,)}
    for name, shape in shapes.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    with torch.device("meta"):
        found = targets(AudioEncoder(released), PREFIX)
    assert {name: tuple(view.shape) for name, view in found.items()} == {
        PREFIX + n: s for n, s in expected.items()
    }

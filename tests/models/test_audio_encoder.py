"""The audio encoder against transformers, whole and incremental."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.layers.targets import targets
from stretto.models.qwen3_omni import audio_encoder
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder, AudioStream, WindowUpdate, advance
from stretto.models.qwen3_omni.config import AudioConfig, OmniConfig, audio_tokens, conv_length
from stretto.prompt.mel import MelStream, mel, normalise
from stretto.prompt.prompt import Array

PREFIX = "thinker.audio_tower."
EXACT = {"rtol": 0.0, "atol": 1e-5}  # of rows around 1; seen: 2e-6
LENGTHS = [1, 2, 7, 8, 9, 60, 99, 100, 101, 108, 160, 200, 799, 800, 801, 899, 900, 1599, 1600, 1601, 1650, 2000]


@pytest.fixture(scope="module", autouse=True)
def _full_precision() -> Iterator[None]:
    """Convolutions on CUDA round float32 to 10 bits unless told not to."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def encoder(tiny_config: OmniConfig, oracle: Any, device: torch.device) -> AudioEncoder:
    ours = AudioEncoder(tiny_config.thinker.audio).to(device)
    theirs = {PREFIX + name: value for name, value in oracle.thinker.audio_tower.state_dict().items()}
    places = targets(ours, PREFIX)
    assert places.keys() == theirs.keys()
    for name, place in places.items():
        place.copy_(theirs[name])
    return ours


def random_mel(frames: int, seed: int = 0) -> torch.Tensor:
    return 0.5 * torch.randn(128, frames, generator=torch.Generator().manual_seed(seed))


def speech(frames: int, seed: int = 0) -> Array:
    """Log mel with silence, loudness that comes and goes, and rare bursts: the maximum grows now and then."""
    rng = np.random.default_rng(seed)
    loud = np.repeat(rng.choice([-7.0, -4.0, -2.0, 0.0], frames // 40 + 1, p=[0.3, 0.3, 0.3, 0.1]), 40)[:frames]
    values = loud + rng.normal(size=(128, frames))
    values[rng.random((128, frames)) < 0.01] += 3
    return np.maximum(values, -10).astype(np.float32)


def flat(frames: int, low: float, high: float, seed: int = 0) -> Array:
    """Log mel that reaches exactly `low` and `high`, and stays between, in every chunk."""
    values = np.random.default_rng(seed).uniform(low, high, (128, frames)).astype(np.float32)
    values[0, ::50], values[1, ::50] = low, high
    return values


def reference(oracle: Any, features: torch.Tensor) -> torch.Tensor:
    tower = oracle.thinker.audio_tower
    with torch.no_grad():
        out = tower(features.to(tower.device), feature_lens=torch.tensor([features.shape[1]], device=tower.device))
    rows: torch.Tensor = out.last_hidden_state.cpu()
    return rows


def random_rows(encoder: AudioEncoder, *shape: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(*shape, encoder.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return rows.to(encoder.conv_out.weight.device)


def whole(encoder: AudioEncoder, log_mel: Array) -> torch.Tensor:
    return encoder.encode(torch.from_numpy(normalise(log_mel, float(log_mel.max())))).cpu()


def joined(updates: list[WindowUpdate]) -> torch.Tensor:
    """What a consumer ends up with: the last report of each window, in order."""
    last = {u.index: u.rows for u in updates}
    assert sorted(last) == list(range(len(last)))
    return torch.cat([last[i] for i in range(len(last))]).cpu()


def stream_all(encoder: AudioEncoder, log_mel: Array, sizes: list[int]) -> list[WindowUpdate]:
    """Push in pieces of these sizes, over and over."""
    stream, updates, at, turn = AudioStream(encoder), [], 0, 0
    while at < log_mel.shape[1]:
        size = sizes[turn % len(sizes)]
        updates += stream.push(log_mel[:, at : at + size])
        at, turn = at + size, turn + 1
    return updates + stream.finish()


@pytest.mark.parametrize("frames", LENGTHS)
def test_whole_clip_equals_transformers(encoder: AudioEncoder, oracle: Any, frames: int) -> None:
    clip = random_mel(frames, seed=frames)
    ours = encoder.encode(clip).cpu()
    assert len(ours) == audio_tokens(frames)
    torch.testing.assert_close(ours, reference(oracle, clip), **EXACT)


def test_no_frames_no_rows(encoder: AudioEncoder) -> None:
    assert encoder.encode(torch.empty(128, 0)).shape == (0, encoder.config.output_size)
    stream = AudioStream(encoder)
    assert stream.push(np.empty((128, 0), np.float32)) == []
    assert stream.finish() == []


def test_wrong_number_of_bins_is_named(encoder: AudioEncoder) -> None:
    with pytest.raises(AssertionError, match="128"):
        encoder.encode(torch.zeros(80, 10))
    with pytest.raises(AssertionError, match="128"):
        AudioStream(encoder).push(np.zeros((80, 10), np.float32))


def test_front_trims_to_lengths_and_sees_the_padded_width(encoder: AudioEncoder) -> None:
    chunk = random_mel(60)
    padded = torch.nn.functional.pad(chunk, (0, 40))
    short, long = encoder.front(padded[None].expand(2, -1, -1), [60, 100])
    assert (len(short), len(long)) == (conv_length(60), 13)
    (alone,) = encoder.front(chunk[None], [60])
    assert (short - alone)[-1].abs().max() > 1e-2, "padding must matter, or the tail rule is not tested"
    torch.testing.assert_close(short[:-1], alone[:-1], **EXACT)


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
    monkeypatch.setattr(audio_encoder, "CONV_BATCH", 3)
    torch.testing.assert_close(whole(encoder, log_mel), expected, **EXACT)
    torch.testing.assert_close(joined(stream_all(encoder, log_mel, [2750])), expected, **EXACT)


@pytest.mark.parametrize("frames", LENGTHS)
def test_stream_equals_whole_clip(encoder: AudioEncoder, frames: int) -> None:
    log_mel = speech(frames, seed=frames)
    rng = np.random.default_rng(frames)
    expected = whole(encoder, log_mel)
    for sizes in ([frames], [37], [*rng.integers(0, 300, 50).tolist(), 1]):
        torch.testing.assert_close(joined(stream_all(encoder, log_mel, sizes)), expected, **EXACT)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    frames=st.integers(1, 2000),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=6),
)
def test_stream_equals_whole_clip_for_any_pushes(
    encoder: AudioEncoder, frames: int, seed: int, sizes: list[int]
) -> None:
    log_mel = speech(frames, seed)
    torch.testing.assert_close(joined(stream_all(encoder, log_mel, sizes)), whole(encoder, log_mel), **EXACT)


def test_window_is_reported_when_its_last_second_is_complete(encoder: AudioEncoder) -> None:
    log_mel = flat(820, -3, 1)
    stream = AudioStream(encoder)
    assert stream.push(log_mel[:, :799]) == []
    (first,) = stream.push(log_mel[:, 799:801])
    assert (first.index, first.final, len(first.rows)) == (0, False, 104)
    assert stream.push(log_mel[:, 801:]) == []
    (last,) = stream.finish()
    assert (last.index, last.final, len(last.rows)) == (1, True, audio_tokens(20))
    torch.testing.assert_close(joined([first, last]), whole(encoder, log_mel), **EXACT)


def test_nothing_is_left_to_report_when_the_clip_ends_with_a_window(encoder: AudioEncoder) -> None:
    stream = AudioStream(encoder)
    assert [u.index for u in stream.push(flat(800, -3, 1))] == [0]
    assert stream.finish() == []


def test_late_burst_redoes_only_the_windows_it_changes(encoder: AudioEncoder) -> None:
    # Peak -1 puts the floor at -9, below everything; the burst of 3 raises it to -5.
    log_mel = np.concatenate([flat(800, -6, -1, 1), flat(800, -4, -1, 2), flat(800, -5.5, -1, 3)], axis=1)
    burst = flat(100, -2, 3, 4)
    stream = AudioStream(encoder)
    before = stream.push(log_mel)
    assert [(u.index, u.final) for u in before] == [(0, False), (1, False), (2, False)]
    after = stream.push(burst)
    assert [(u.index, u.final) for u in after] == [(0, False), (2, False)]
    assert (after[0].rows - before[0].rows).abs().max() > 1e-3
    end = stream.finish()
    assert [(u.index, u.final) for u in end] == [(3, True)]
    clip = np.concatenate([log_mel, burst], axis=1)
    torch.testing.assert_close(joined(before + after + end), whole(encoder, clip), **EXACT)


def test_burst_in_the_last_incomplete_second_is_settled_at_finish(encoder: AudioEncoder) -> None:
    clip = np.concatenate([flat(800, -6, -1), flat(30, -2, 3)], axis=1)
    stream = AudioStream(encoder)
    updates = stream.push(clip[:, :800])
    assert stream.push(clip[:, 800:]) == []
    end = stream.finish()
    assert [(u.index, u.final) for u in end] == [(0, True), (1, True)]
    torch.testing.assert_close(joined(updates + end), whole(encoder, clip), **EXACT)


def test_burst_above_all_values_changes_nothing(encoder: AudioEncoder) -> None:
    clip = np.concatenate([flat(1600, -4, -1), flat(100, -2, 3)], axis=1)
    stream = AudioStream(encoder)
    updates = stream.push(clip[:, :1600])
    assert stream.push(clip[:, 1600:]) == []
    end = stream.finish()
    assert [u.index for u in end] == [2]
    torch.testing.assert_close(joined(updates + end), whole(encoder, clip), **EXACT)


def test_floor_exactly_at_the_lowest_value_changes_nothing(encoder: AudioEncoder) -> None:
    stream = AudioStream(encoder)
    stream.push(flat(800, -5, -1))
    assert stream.push(flat(100, -2, 3)) == []
    assert [u.index for u in stream.push(flat(100, -2, 3.001))] == [0]


def test_each_second_is_convolved_once(encoder: AudioEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    convolve = AudioEncoder.convolve

    def counted(self: AudioEncoder, chunks: torch.Tensor) -> torch.Tensor:
        seen.append(len(chunks))
        return convolve(self, chunks)

    monkeypatch.setattr(AudioEncoder, "convolve", counted)
    stream_all(encoder, flat(1730, -3, 1), [40])
    assert seen == [1] * 18

    seen.clear()
    stream_all(encoder, flat(99, -3, 1), [40])
    assert seen == [1], "a lone tail must wait for the end of the clip"


def test_convolution_rows_are_kept_for_the_open_window_only(encoder: AudioEncoder) -> None:
    stream = AudioStream(encoder)
    stream.push(flat(1130, -3, 1))
    kept = [[c.rows is not None for c in w.chunks] for w in stream.windows]
    assert kept == [[False] * 8, [True] * 3]
    stream.finish()
    assert all(c.rows is None for w in stream.windows for c in w.chunks)


def test_streams_advance_together_as_alone(encoder: AudioEncoder) -> None:
    clips = [speech(n, seed=n) for n in (1650, 45, 820, 2000, 100, 63)]
    alone = [stream_all(encoder, clip, [400]) for clip in clips]
    streams = [AudioStream(encoder) for _ in clips]
    together: list[list[WindowUpdate]] = [[] for _ in clips]
    for at in range(0, 2400, 400):
        for clip, stream in zip(clips, streams, strict=True):
            if at < clip.shape[1]:
                stream.feed(clip[:, at : at + 400])
            elif not stream.finished:
                stream.seal()
        for mine, new in zip(together, advance(encoder, streams), strict=True):
            mine += new
    for one, many, stream in zip(alone, together, streams, strict=True):
        assert stream.finished
        assert [(u.index, u.final) for u in one] == [(u.index, u.final) for u in many]
        torch.testing.assert_close(joined(many), joined(one), **EXACT)


def test_the_stream_keeps_its_own_copy(encoder: AudioEncoder) -> None:
    log_mel = speech(450, seed=9)
    expected, buffer = whole(encoder, log_mel), np.empty((128, 90), np.float32)
    stream = AudioStream(encoder)
    for at in range(0, 450, 90):
        buffer[:] = log_mel[:, at : at + 90]
        stream.push(torch.from_numpy(buffer))
    torch.testing.assert_close(joined(stream.finish()), expected, **EXACT)


def test_frames_after_the_end_are_refused(encoder: AudioEncoder) -> None:
    stream = AudioStream(encoder)
    stream.finish()
    with pytest.raises(AssertionError, match="after the end"):
        stream.push(flat(10, -1, 1))
    with pytest.raises(AssertionError, match="twice"):
        stream.finish()


def test_samples_to_rows(encoder: AudioEncoder, oracle: Any) -> None:
    """From sound to rows, piece by piece, against the reference on the whole clip's features."""
    rng = np.random.default_rng(11)
    samples = (rng.normal(size=16_000 * 10 + 77) * np.linspace(1e-4, 0.5, 16_000 * 10 + 77) ** 2).astype(np.float32)
    samples[:4000] = 0
    sound, stream, updates = MelStream(), AudioStream(encoder), []
    for piece in np.split(samples, np.sort(rng.integers(0, len(samples), 40))):
        updates += stream.push(sound.push(piece))
    updates += stream.push(sound.finish()) + stream.finish()
    torch.testing.assert_close(joined(updates), reference(oracle, torch.from_numpy(mel(samples))), **EXACT)
    assert len({u.index for u in updates}) < len(updates), "the rising voice should have redone a window"


def copy(encoder: AudioEncoder, device: torch.device | str, dtype: torch.dtype) -> AudioEncoder:
    module = AudioEncoder(encoder.config)
    module.load_state_dict(encoder.state_dict())
    return module.to(device, dtype)


def test_bf16_stays_near_float32(encoder: AudioEncoder, device: torch.device) -> None:
    log_mel = speech(950, seed=12)
    exact = whole(encoder, log_mel)
    rounded = joined(stream_all(copy(encoder, device, torch.bfloat16), log_mel, [130]))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
def test_cuda_equals_cpu_and_never_waits(encoder: AudioEncoder, dtype: torch.dtype, tolerance: float) -> None:
    log_mel = speech(1650, seed=13)
    expected = whole(copy(encoder, "cpu", torch.float32), log_mel)
    module = copy(encoder, "cuda", dtype)
    stream_all(module, log_mel, [70])  # the first run may load kernels, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        updates = stream_all(module, log_mel, [70])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (joined(updates).float() - expected).norm() / expected.norm() < tolerance


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
    assert {name: tuple(view.shape) for name, view in found.items()} == {PREFIX + n: s for n, s in expected.items()}

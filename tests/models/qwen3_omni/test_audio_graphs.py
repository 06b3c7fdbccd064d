"""Attention windows in static buffers: the same rows as alone."""

from __future__ import annotations

import pytest
import torch

from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.config import AudioConfig

SMALL = AudioConfig(
    num_mel_bins=16,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    ffn_size=48,
    conv_channels=4,
    output_size=24,
    chunk_frames=100,
    window_frames=200,
)


def build(c: AudioConfig, device: torch.device, dtype: torch.dtype) -> AudioEncoder:
    encoder = AudioEncoder(c).to(device, dtype)
    g = torch.Generator(device).manual_seed(0)
    for p in encoder.parameters():
        p.data.normal_(0, p.shape[-1] ** -0.5, generator=g)
    return encoder


def windows(
    lengths: list[int], hidden: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(n, hidden, generator=g).to(device, dtype) for n in lengths]


@pytest.mark.parametrize("left", [1e6, float("nan")])
def test_padded_windows_are_as_alone(left: float) -> None:
    """Over static buffers, with what an earlier and larger batch left in them, as it is
    captured."""
    cpu = torch.device("cpu")
    encoder = build(SMALL, cpu, torch.float32)
    graphs = WindowGraphs(encoder, sizes=(2, 4))
    assert graphs.length == 26
    graphs.rows.fill_(left)
    for lengths, size in (([26, 26, 9, 1], 4), ([26, 13, 2], 4), ([5], 2)):
        rows = windows(lengths, SMALL.hidden_size, cpu, torch.float32)
        graphs.fill(rows, size)
        out = graphs.forward(size)
        for got, window in zip(out, rows, strict=False):
            torch.testing.assert_close(
                got[: len(window)], encoder.window(window), rtol=1e-5, atol=1e-5
            )


def test_without_captured_graphs_nothing_fits() -> None:
    encoder = build(SMALL, torch.device("cpu"), torch.float32)
    assert (
        WindowGraphs(encoder).run(
            windows([3], SMALL.hidden_size, torch.device("cpu"), torch.float32)
        )
        is None
    )


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_equal_the_plain_windows() -> None:
    cuda = torch.device("cuda")
    released = AudioConfig(128, 1280, 4, 20, 5120, 480, 2048, 100, 800)
    encoder = build(released, cuda, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    batches = [
        windows(n, 1280, cuda, torch.bfloat16)
        for n in ([104, 26], [104], [104, 104, 104, 50, 1], [7])
    ]
    want = [[encoder.window(r) for r in rows] for rows in batches]
    graphs = WindowGraphs(encoder)
    graphs.capture(stream)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # results of one replay outlive the next
        got = [encoder.windows(rows, graphs.run) for rows in batches]
        for ours, theirs in zip(got, want, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == b.shape
                assert float((a - b).float().norm() / b.float().norm()) < 1e-2
        many = windows([104] * 9, 1280, cuda, torch.bfloat16)
        assert graphs.run(many) is None
    stream.synchronize()

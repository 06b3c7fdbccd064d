"""Small vocoders, and streams played through them: for the tests of the kernels that a vocoder is
made of."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from stretto.layers.capture import capture_graphs
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder_state import VocoderState
from stretto.models.weights import build

CONFIG = VocoderConfig(
    codebook_size=16,
    num_quantizers=2,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    head_dim=8,
    ffn_size=24,
    window=4,
    rms_eps=1e-6,
    rope_theta=1e4,
    upsampling_ratios=(2,),
    upsample_rates=(3, 2),
    decoder_dim=36,
)


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_vocoder(config: VocoderConfig, device: torch.device) -> Code2Wav:
    """With weights that do not amplify what is rounded, and samples far from where they are
    clipped."""
    model = build(lambda: Code2Wav(config), device, torch.float32)
    g = torch.Generator().manual_seed(4)
    for name, view in targets(model, "").items():
        values = torch.randn(view.shape, generator=g)
        if view.dim() == 1:
            view.copy_(1 + 0.1 * values if name.endswith("norm.weight") else 0.3 * values)
        else:
            gain = 0.05 if view.shape[0] == 1 else 0.3 if "conv2.conv" in name else 1.0
            view.copy_(gain * values * view[0].numel() ** -0.5)
    model.prepare()
    return model


def random_codes(model: Code2Wav, *shape: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.codebook_size, shape, generator=g).to(
        model.code_embedding.weight.device
    )


def random_stream(model: Code2Wav, frames: int, seed: int) -> torch.Tensor:
    return random_codes(model, frames, model.config.num_quantizers, seed=seed)


def play(
    model: Code2Wav,
    state: VocoderState,
    streams: list[torch.Tensor],
    steps: Iterable[tuple[int, Sequence[int]]],
) -> list[torch.Tensor]:
    """All streams side by side to their ends. A step is its size, and how many frames each slot
    would take at most (if it has so many left), with garbage behind them."""
    taken = [0] * len(streams)
    parts: list[list[torch.Tensor]] = [[] for _ in streams]
    for i, (size, wanted) in enumerate(steps):
        codes = random_codes(model, len(streams), model.config.num_quantizers, size, seed=90 + i)
        lengths = [min(n, len(s) - t) for n, s, t in zip(wanted, streams, taken, strict=True)]
        for slot, n in enumerate(lengths):
            codes[slot, :, :n] = streams[slot][taken[slot] : taken[slot] + n].T
        wav = model.step(state, codes, torch.tensor(lengths, device=codes.device))
        for slot, n in enumerate(lengths):
            span = model.valid(taken[slot], n)
            parts[slot].append(wav[slot, span.start : span.stop])
            taken[slot] += n
        if taken == [len(s) for s in streams]:
            return [torch.cat(p) for p in parts]
    raise AssertionError(f"streams were played to {taken}")


def check_captured(model: Code2Wav) -> None:
    """A captured step equals an eager one, time and again."""
    rng = random.Random(0)
    eager, captured = model.state(3, 2), model.state(3, 2)
    codes = random_codes(model, 3, model.config.num_quantizers, 2, seed=0)
    lengths = torch.zeros(3, dtype=torch.int64, device=codes.device)
    graphs = capture_graphs(
        [0], lambda _: lambda: model.step(captured, codes, lengths), torch.cuda.Stream()
    )
    graph, wav = graphs[0]
    for i in range(20):
        codes.copy_(random_codes(model, *codes.shape, seed=i))
        lengths.copy_(torch.tensor([rng.randint(0, 2) for _ in range(3)]))
        graph.replay()
        torch.testing.assert_close(wav, model.step(eager, codes, lengths), rtol=0, atol=1e-5)
    torch.testing.assert_close(captured.tails, eager.tails, rtol=0, atol=1e-4)

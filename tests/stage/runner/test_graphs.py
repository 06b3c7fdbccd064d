"""What is captured, in which order, on which stream and out of which memory, over a device that
only takes notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.layers.capture import capture_graphs
from stretto.models.qwen3_omni import vision_graphs
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.build import capture_encoders
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.qwen3_omni.vision_graphs import FrameGraphs
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import build
from stretto.stage import vocoder as codec
from stretto.stage.runner import graphs as decoding
from stretto.stage.runner.adapter import Picked
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.runner.prefill_graphs import PrefillGraphs

CPU = torch.device("cpu")
PLAIN, FULL = SamplingMode(False, False), SamplingMode(True, True)


class FakeCuda:
    """The names of torch.cuda that a capture uses."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.place = "host"
        self.pools: list[object] = []
        self.replayed: list[tuple[object, str]] = []
        self.side = self.Stream(self, "side")

    class Stream:
        device = CPU

        def __init__(self, cuda: FakeCuda, name: str) -> None:
            self.cuda, self.name = cuda, name

        def wait_stream(self, other: FakeCuda.Stream) -> None:
            self.cuda.notes.append((self.name, "waits for", other.name))

    class CUDAGraph:
        cuda: FakeCuda

        def pool(self) -> object:
            return self, "its pool"

        def replay(self) -> None:
            self.cuda.replayed.append((self, self.cuda.place))

    class Within:
        def __init__(self, cuda: FakeCuda, place: str) -> None:
            self.cuda, self.place = cuda, place

        def __enter__(self) -> None:
            assert self.cuda.place == "host"
            self.cuda.place = self.place

        def __exit__(self, *args: object) -> None:
            self.cuda.place = "host"

    def stream(self, stream: Stream) -> Within:
        return self.Within(self, stream.name)

    def graph(self, graph: CUDAGraph, pool: object, stream: Stream) -> Within:
        self.pools.append(pool)
        graph.cuda = self
        return self.Within(self, f"{stream.name}, captured")

    def current_stream(self, device: torch.device) -> Stream:
        assert device == CPU
        return self.Stream(self, "current")

    def note(self, what: object) -> None:
        assert torch.is_inference_mode_enabled()
        self.notes.append((what, self.place))

    def captured(self) -> list[Any]:
        return [note[0] for note in self.notes if note[1] == "side, captured"]

    def warmups(self) -> list[Any]:
        return [note[0] for note in self.notes if note[1] == "side"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("stream", "graph", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def passes(cuda: FakeCuda) -> Callable[[str], Callable[[], str]]:
    def prepare(key: str) -> Callable[[], str]:
        cuda.note(f"inputs of {key}")

        def run() -> str:
            cuda.note(key)
            return f"{key}'s result"

        return run

    return prepare


def test_one_key_after_the_other(cuda: FakeCuda) -> None:
    """Inputs and warm-ups on the stream, which has waited for what was made elsewhere; then the
    capture. At the end each is replayed once."""
    found = capture_graphs(["b", "a"], passes(cuda), cuda.side, warmups=2)  # type: ignore[arg-type]
    on, into = "side", "side, captured"
    assert cuda.notes == [
        ("side", "waits for", "current"),
        *[("inputs of b", on), ("b", on), ("b", on), ("b", into)],
        *[("inputs of a", on), ("a", on), ("a", on), ("a", into)],
    ]
    assert [(key, result) for key, (_, result) in found.items()] == [
        ("b", "b's result"),
        ("a", "a's result"),
    ]
    assert cuda.replayed == [(graph, on) for graph, _ in found.values()]


def test_all_share_the_first_ones_memory(cuda: FakeCuda) -> None:
    found = capture_graphs(["c", "b", "a"], passes(cuda), cuda.side)  # type: ignore[arg-type]
    first = found["c"][0].pool()
    assert cuda.pools == [None, first, first]
    assert len({graph for graph, _ in found.values()}) == 3


@pytest.mark.parametrize("at", ["side", "side, captured"])
def test_a_failure_names_its_key(cuda: FakeCuda, at: str) -> None:
    def prepare(key: int) -> Callable[[], None]:
        def run() -> None:
            if key == 2 and cuda.place == at:
                raise RuntimeError("out of memory")

        return run

    with pytest.raises(RuntimeError, match="out of memory") as failed:
        capture_graphs([4, 2, 1], prepare, cuda.side)  # type: ignore[arg-type]
    assert failed.value.__notes__ == ["while capturing 2"]
    assert cuda.place == "host"


# ---- what each owner captures


@pytest.mark.parametrize("fused", [False, True])
def test_decode_steps(cuda: FakeCuda, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Way after way, from the largest batch, each all padding; kernels of our own need one warm-up,
    libraries two."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **kw: zeros(*shape, **kw))

    def step(
        adapter: Any,
        rows: torch.Tensor,
        positions: torch.Tensor,
        values: torch.Tensor,
        mode: SamplingMode,
    ) -> Picked:
        assert rows.tolist() == [9] * len(rows)
        assert not positions.any()
        assert not values.any()
        cuda.note((len(rows), mode))
        return Picked(rows + 1)

    monkeypatch.setattr(decoding, "decode_step", step)
    adapter = SimpleNamespace(rows=SimpleNamespace(num_rows=3, device=CPU, sink=9), fused=fused)
    graphs = DecodeGraphs(adapter, sizes=(1, 2, 4))
    graphs.capture(cuda.side)  # type: ignore[arg-type]
    ways = [FULL] if fused else [PLAIN, FULL]
    want = [(size, mode) for mode in ways for size in (3, 2, 1)]
    assert cuda.captured() == want
    assert cuda.warmups() == [key for key in want for _ in range(1 if fused else 2)]
    assert list(graphs.graphs) == want
    for (size, _), (_, (inputs, picked)) in graphs.graphs.items():
        assert (inputs.shape, picked.tokens.shape) == ((3, size), (size,))


@pytest.mark.parametrize("owner", [PrefillGraphs, WindowGraphs, FrameGraphs])
def test_passes_over_shared_buffers(
    cuda: FakeCuda, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the largest, each run once before."""

    def forward(self: Any, size: int) -> int:
        cuda.note(size)
        return size

    monkeypatch.setattr(owner, "__init__", lambda self, sizes: setattr(self, "sizes", sizes))
    monkeypatch.setattr(owner, "forward", forward)
    graphs = owner([1, 2, 8])
    graphs.capture(cuda.side)
    assert cuda.captured() == cuda.warmups() == [8, 2, 1]
    assert [(size, result) for size, (_, result) in graphs.graphs.items()] == [
        (8, 8),
        (2, 2),
        (1, 1),
    ]


@pytest.mark.parametrize("images", [False, True])
def test_images_are_captured_if_set(
    cuda: FakeCuda, images: bool, tiny_config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound always, single images by their setting; on the stage's stream."""
    for owner in (WindowGraphs, FrameGraphs):
        monkeypatch.setattr(owner, "forward", lambda self, size: cuda.note((type(self), size)))
    model = build(lambda: Thinker(tiny_config), "cpu", torch.float32)
    used: list[int] = []
    model.audio_tower.conv2d1.register_forward_pre_hook(
        lambda module, given: used.append(len(given[0]))
    )
    windows, frames = capture_encoders(model, cuda.side, images=images)  # type: ignore[arg-type]
    assert used == [64, 32, 16, 8, 4, 2, 1]
    sound = [(WindowGraphs, size) for size in (8, 4, 2, 1)]
    single = [(FrameGraphs, size) for size in sorted(vision_graphs.SIZES, reverse=True)]
    assert cuda.captured() == (sound + single if images else sound)
    assert isinstance(windows, WindowGraphs)
    assert isinstance(frames, FrameGraphs) == images


@pytest.mark.parametrize("sizes", [None, [(1, 2), (3, 2), (3, 1), (1, 2)]])
def test_vocoder_steps(
    cuda: FakeCuda,
    sizes: Sequence[tuple[int, int]] | None,
    tiny_config: OmniConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the most cells, twice before; whatever runs, the streams' state is as it was."""
    model = build(lambda: Code2Wav(tiny_config.code2wav), "cpu", torch.float32)
    fill_dummy(model, 0)
    model.prepare()
    config = codec.CodecConfig(slots=3, frame_sizes=(1, 2), stream_sizes=(1,))
    stage = codec.VocoderCore(model, config)
    stage.state.frames.fill_(5)
    before = [stage.state.frames.clone(), stage.state.tails.clone()]
    stage.stream = cuda.side  # type: ignore[assignment]
    step = model.step

    def noted(
        state: Any, codes: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        cuda.note((codes.shape[0], codes.shape[2]))
        return step(state, codes, counts, slots)

    monkeypatch.setattr(model, "step", noted)
    stage.capture(sizes)
    captured = cuda.captured()
    assert sorted(captured) == sorted(set(sizes or config.shapes()))
    assert captured == sorted(captured, key=lambda shape: -shape[0] * shape[1])
    assert cuda.warmups() == [shape for shape in captured for _ in range(2)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, [stage.state.frames, stage.state.tails], strict=True)
    )
    for (streams, frames), (_, (given, wav)) in stage.graphs.items():
        assert given.numel() == streams * (tiny_config.code2wav.num_quantizers * frames + 2)
        assert wav.shape[0] == streams

"""The loader: what it reads, what it refuses and how it says so, and that it needs no more memory
than its staging."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from stretto.errors import CheckpointError
from stretto.layers.targets import frozen, targets
from stretto.models import checkpoint
from stretto.models import weights as loader
from stretto.models.checkpoint import CheckpointFiles, read_header
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.random_weights import fill_dummy, spread
from stretto.models.weights import build, load
from stretto.testing.qwen3_omni import checkpoint_shapes, released_config
from stretto.testing.qwen3_omni import tiny_config as tiny_json
from tests.models.fill import fill_on_gpu
from tests.models.sizes import estimate
from tests.prompts import make
from tests.solo import Audio, Options, Solo


class Pair(nn.Module):
    """Two checkpoint tensors in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = frozen(5, 3)

    def own_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        up, down = torch.split(self.weight.data, [2, 3])
        return {f"{prefix}up.weight": up, f"{prefix}down.weight": down}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.bias = frozen(7)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> CheckpointFiles:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return CheckpointFiles.open(path)


@pytest.fixture
def broken(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint's weights, to be damaged."""
    for f in tiny_dir.glob("model*"):
        shutil.copy(f, tmp_path)
    return tmp_path


def shard(directory: Path, n: int = 2) -> Path:
    return directory / f"model-0000{n}-of-00003.safetensors"


def empty_like(
    files: CheckpointFiles, prefix: str, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        n: torch.full(t.shape, torch.nan, dtype=dtype)
        for n, t in files.tensors.items()
        if n.startswith(prefix)
    }


def test_headers_match_the_safetensors_library(tiny_dir: Path, tiny_config: OmniConfig) -> None:
    files = CheckpointFiles.open(tiny_dir)
    assert {n: t.shape for n, t in files.tensors.items()} == checkpoint_shapes(tiny_config)
    theirs = {}
    for f in sorted(tiny_dir.glob("*.safetensors")):
        theirs |= load_file(f)
    for name, t in files.tensors.items():
        raw = t.file.read_bytes()[t.start : t.start + t.nbytes]
        assert np.array_equal(
            np.frombuffer(raw, np.float32).reshape(t.shape), theirs[name].numpy()
        ), name


@pytest.mark.parametrize("staging", [8, 1000, 1 << 16, loader.STAGING])
def test_loads_exactly_what_is_stored(staging: int, tiny_dir: Path) -> None:
    """Whatever the staging size: pieces of tensors, one tensor, or many tensors at a time."""
    files = CheckpointFiles.open(tiny_dir)
    prefixes = ["code2wav.decoder.", "thinker.visual."] if staging > 8 else ["code2wav.decoder.4."]
    into = {n: t for p in prefixes for n, t in empty_like(files, p).items()}
    report = load(files, into, prefixes, progress=False, staging_bytes=staging)
    theirs = {}
    for f in tiny_dir.glob("*.safetensors"):
        theirs |= load_file(f)
    assert all(torch.equal(t, theirs[name]) for name, t in into.items())
    assert report.tensors == len(into)
    assert report.bytes == sum(t.nbytes for t in into.values())


def test_stages_load_only_their_own_bytes(
    tiny_dir: Path, tiny_config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes read are the stage's tensors, each once, and never more at once than the staging
    buffer."""
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def watch(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        reads.append((sum(len(b) for b in buffers), got))
        return got

    monkeypatch.setattr(os, "preadv", watch)
    files = CheckpointFiles.open(tiny_dir)
    stages: dict[str, Callable[[], nn.Module]] = {
        "thinker.": lambda: Thinker(tiny_config),
        "talker.": lambda: Talker(tiny_config),
        "code2wav.": lambda: Code2Wav(tiny_config.code2wav),
    }
    for prefix, factory in stages.items():
        reads.clear()
        module = build(factory, "cpu", torch.float32)
        report = load(
            files, targets(module, prefix), [prefix], progress=False, staging_bytes=100_000
        )
        assert report.bytes == sum(
            t.nbytes for n, t in files.tensors.items() if n.startswith(prefix)
        )
        assert sum(got for _, got in reads) == report.bytes
        assert max(asked for asked, _ in reads) <= 100_000
        assert all(torch.isfinite(p).all() for p in module.parameters())


def test_staging_is_all_the_memory(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers of the asked size are made, whatever is loaded."""
    made: list[int] = []

    class Counted(loader._Staging):
        def __init__(self, nbytes: int, device: torch.device) -> None:
            made.append(nbytes)
            super().__init__(nbytes, device)

    monkeypatch.setattr(loader, "_Staging", Counted)
    files = CheckpointFiles.open(tiny_dir)
    load(files, empty_like(files, "talker."), ["talker."], progress=False, staging_bytes=50_000)
    assert made == [50_000, 50_000]


def test_fused_parameters_are_filled_part_by_part(tmp_path: Path) -> None:
    tensors = {
        "m.up.weight": torch.randn(2, 3),
        "m.down.weight": torch.randn(3, 3),
        "m.bias": torch.randn(7),
    }
    module = build(Small, "cpu", torch.float32)
    load(write(tmp_path, tensors), targets(module, "m."), ["m."], progress=False)
    assert torch.equal(
        module.pair.weight, torch.cat([tensors["m.up.weight"], tensors["m.down.weight"]])
    )
    assert torch.equal(module.bias, tensors["m.bias"])


def test_prepared_kernels_hide_no_parameters(tiny_config: OmniConfig) -> None:
    """What a decoder keeps for its kernels is not taken for a word on where its tensors go."""
    module = build(lambda: Thinker(tiny_config), "cpu", torch.float32)
    before = targets(module, "thinker.")
    module.model.fused = object()  # a stand-in: these sizes are not the kernels'
    after = targets(module, "thinker.")
    assert after.keys() == before.keys()
    assert sum(t.numel() for t in after.values()) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("staging", [8, 24, 1 << 20])
def test_strided_destinations(staging: int, tmp_path: Path) -> None:
    stored = torch.arange(60, dtype=torch.float32).reshape(5, 3, 4)
    into = torch.zeros(4, 5, 3).permute(1, 2, 0)
    assert not into.is_contiguous()
    load(write(tmp_path, {"x": stored}), {"x": into}, ["x"], progress=False, staging_bytes=staging)
    assert torch.equal(into, stored)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_dtypes_convert(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    """Odd byte counts of mixed dtypes side by side, in pieces: each value is rounded once."""
    tensors = {
        "a": torch.randn(5, dtype=torch.float32).to(stored),
        "b": torch.randn(3).bfloat16(),
        "c": torch.randn(9, 7).to(stored),
    }
    files = write(tmp_path, tensors)
    into = {n: torch.empty(t.shape, dtype=wanted) for n, t in tensors.items()}
    load(files, into, [""], progress=False, staging_bytes=16)
    for name, t in tensors.items():
        assert torch.equal(into[name], t.to(wanted)), name


def test_bf16_survives_the_way_through_fp32(tmp_path: Path) -> None:
    first = {"x": torch.randn(100).bfloat16()}
    wide = {"x": torch.empty(100)}
    load(write(tmp_path / "a", first), wide, ["x"], progress=False)
    back = {"x": torch.empty(100, dtype=torch.bfloat16)}
    load(write(tmp_path / "b", wide), back, ["x"], progress=False)
    assert torch.equal(back["x"], first["x"])


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(8, 200),
    st.integers(0, 2**31),
)
def test_any_sizes_through_any_staging(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], staging: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    tensors = {
        f"t{i}": torch.randn(n, generator=g).to(kinds[(seed + i) % 3]) for i, n in enumerate(sizes)
    }
    wanted = {
        n: torch.full(t.shape, torch.nan) for n, t in tensors.items() if int(n[1:]) % 2 == seed % 2
    }
    files = write(tmp_path_factory.mktemp("any"), tensors)
    load(files, wanted, ["none"], progress=False, staging_bytes=staging)
    assert all(torch.equal(t, tensors[n].float()) for n, t in wanted.items())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "progress", "shown"), [
    (Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False),
])  # fmt: skip
def test_progress_is_for_terminals(
    stream: io.StringIO,
    progress: bool,
    shown: bool,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    files = CheckpointFiles.open(tiny_dir)
    load(files, empty_like(files, "code2wav."), ["code2wav."], progress=progress, label="voice")
    assert ("voice" in stream.getvalue() and "B/s" in stream.getvalue()) == shown
    assert bool(stream.getvalue()) == shown


# What does not fit the model


def expect(files: CheckpointFiles, into: dict[str, torch.Tensor], prefixes: list[str]) -> str:
    before = {n: t.clone() for n, t in into.items()}
    with pytest.raises(CheckpointError) as caught:
        load(files, into, prefixes, progress=False)
    assert all(torch.equal(t, before[n]) for n, t in into.items())  # nothing was half loaded
    return str(caught.value)


def test_misfits_are_named_together(tmp_path: Path) -> None:
    stored = {
        "m.a": torch.zeros(2, 3),
        "m.b": torch.zeros(4),
        "m.extra": torch.zeros(1),
        "other.x": torch.zeros(1),
    }
    files = write(tmp_path, stored | {"m.ids": torch.zeros(2, dtype=torch.int64)})
    into = {
        "m.a": torch.zeros(3, 2),
        "m.b": torch.zeros(4),
        "m.gone": torch.zeros(1),
        "m.ids": torch.zeros(2),
    }
    message = expect(files, into, ["m."])
    assert str(tmp_path) in message
    assert "m.a (model.safetensors) has shape [2, 3], the model needs [3, 2]" in message
    assert "m.gone is missing" in message
    assert "m.ids (model.safetensors) has dtype I64, which is not supported" in message
    assert "m.extra (model.safetensors) is unexpected" in message
    assert "m.b" not in message
    assert "other.x" not in message


def test_many_misfits_are_counted(tiny_dir: Path) -> None:
    files = CheckpointFiles.open(tiny_dir)
    names = [n for n in files.tensors if n.startswith("code2wav.")]
    message = expect(files, {"code2wav.made_up": torch.zeros(1)}, ["code2wav."])
    assert "code2wav.made_up is missing" in message
    assert message.count("is unexpected") == 4
    assert message.endswith(f"and {len(names) + 1 - 5} more")
    assert names[0] in message


# Damaged files


def test_missing_shard(broken: Path) -> None:
    shard(broken).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"model-00002-of-00003\.safetensors: no such file; .* home of talker\.",
    ):
        CheckpointFiles.open(broken)


def test_truncated_shard(broken: Path) -> None:
    path = shard(broken)
    last = max(read_header(path).values(), key=lambda t: t.start)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles.open(broken)
    assert str(path) in str(caught.value)
    assert last.name in str(caught.value)
    assert "truncated?" in str(caught.value)


def test_file_that_shrinks_after_the_check(broken: Path) -> None:
    files = CheckpointFiles.open(broken)
    last = max(
        (t for t in files.tensors.values() if t.file == shard(broken)), key=lambda t: t.start
    )
    os.truncate(shard(broken), last.start + 4)
    with pytest.raises(CheckpointError) as caught:
        load(files, empty_like(files, last.name), [last.name], progress=False)
    assert (
        str(caught.value)
        == f"{shard(broken)}: tensor {last.name}: cannot be read (the file ended early)"
    )


def test_file_that_vanishes_after_the_check(broken: Path) -> None:
    files = CheckpointFiles.open(broken)
    into = empty_like(files, "talker.codec_head.")
    for f in broken.glob("*.safetensors"):
        f.unlink()
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be read \(No such file"):
        load(files, into, ["talker.codec_head."], progress=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not a safetensors file"),
        (b"\x08\x00\x00", "truncated or not a safetensors file"),
        (b"\xff" * 64, "truncated or not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "cannot hold a header of 100 bytes"),
        ((8).to_bytes(8, "little") + b'{"a": 1,', "header is not valid JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc", "header is not valid JSON"),
        ((40_000).to_bytes(8, "little") + b"[" * 40_000, "header is not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "header is not a JSON object"),
    ],
)
def test_bad_headers(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointFiles.open(tmp_path)
    assert str(path) in str(caught.value)


def raw_file(path: Path, header: dict[str, object], data: int = 16) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(
    dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": 3}, "tensor x: its header entry is not an object"),
        ({"x": entry(dtype="F31")}, "tensor x: unknown dtype 'F31'"),
        ({"x": entry(dtype=None)}, "tensor x: unknown dtype None"),
        ({"x": entry(shape=[-4])}, "tensor x: shape [-4] is not a list of sizes"),
        ({"x": entry(shape=[True, 4])}, "tensor x: shape [True, 4] is not a list of sizes"),
        ({"x": entry(shape=4)}, "tensor x: shape 4 is not a list of sizes"),
        ({"x": entry(offsets=[16, 0])}, "tensor x: data_offsets [16, 0] are not a byte range"),
        (
            {"x": entry(offsets=[0, 8, 16])},
            "tensor x: data_offsets [0, 8, 16] are not a byte range",
        ),
        ({"x": entry(offsets=[-16, 0])}, "tensor x: data_offsets [-16, 0] are not a byte range"),
        ({"x": entry(shape=[5])}, "tensor x: F32 [5] takes 20 bytes, its byte range holds 16"),
        ({"x": entry(shape=[8], offsets=[0, 32])}, "tensor x: needs bytes up to"),
        (
            {"x": entry(), "y": entry(shape=[1], offsets=[8, 12])},
            "tensor y: overlaps the tensor before it",
        ),
        ({"x": entry(shape=[2], offsets=[8, 16])}, "tensor x: leaves 8 bytes before it"),
        ({"x": entry(shape=[2], offsets=[0, 8])}, "8 bytes at the end belong to no tensor"),
    ],
)
def test_bad_entries(header: dict[str, object], message: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_good_entries(tmp_path: Path) -> None:
    """Metadata, scalars and empty tensors are part of the format."""
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"},
        "empty": entry(shape=[0, 5], offsets=[0, 0]),
        "scalar": entry(shape=[], offsets=[0, 4]),
        "rest": entry(dtype="BF16", shape=[3, 2], offsets=[4, 16]),
    }
    found = read_header(raw_file(tmp_path / "f.safetensors", header))
    assert {n: t.shape for n, t in found.items()} == {"empty": (0, 5), "scalar": (), "rest": (3, 2)}


def test_header_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_HEADER", 20)
    with pytest.raises(CheckpointError, match="cannot hold a header"):
        read_header(raw_file(tmp_path / "f.safetensors", {"x": entry()}))


@given(
    st.binary(max_size=200) | st.binary(max_size=80).map(lambda b: len(b).to_bytes(8, "little") + b)
)
def test_garbage_is_refused_with_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "model.safetensors"
    path.write_bytes(content)
    message = ""
    try:
        found = read_header(path)
    except CheckpointError as e:
        found, message = {}, str(e)
    assert found == {}  # a file this small that holds a tensor would have to be made on purpose
    assert not message or str(path) in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.clear(), "weight_map is missing or empty"),
        (
            lambda i: i["weight_map"].update(made_up="model-00001-of-00003.safetensors"),
            "has no tensor made_up",
        ),
        (lambda i: i["weight_map"].update(made_up="../secret.safetensors"), "not a file name"),
        (
            lambda i: i["weight_map"].update(made_up=7),
            "made_up is placed in 7, which is not a file name",
        ),
        (
            lambda i: i["weight_map"].pop("talker.codec_head.weight"),
            "holds talker.codec_head.weight, which model.safetensors.index.json does not place "
            "there",
        ),
    ],
)
def test_bad_index(
    change: Callable[[dict[str, dict[str, object]]], object], message: str, broken: Path
) -> None:
    path = broken / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles.open(broken)
    assert message in str(caught.value)
    assert str(broken) in str(caught.value)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has neither"):
        CheckpointFiles.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        CheckpointFiles.open(tmp_path / "nowhere")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        CheckpointFiles.open(tmp_path)


# Building and random weights


def test_build_leaves_the_defaults_alone() -> None:
    module = build(Small, "cpu", torch.bfloat16)
    assert module.bias.dtype == torch.bfloat16
    assert build(Small, "meta", torch.float32).bias.is_meta

    def fail() -> nn.Module:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build(fail, "meta", torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device == torch.device("cpu")


def test_dummy_weights_are_a_function_of_the_seed(tiny_config: OmniConfig) -> None:
    def make(seed: int) -> dict[str, torch.Tensor]:
        module = build(lambda: Talker(tiny_config), "cpu", torch.bfloat16)
        for p in module.parameters():
            p.fill_(torch.nan)
        fill_dummy(module, seed)
        return dict(module.named_parameters())

    one, again, two = make(1), make(1), make(2)
    assert all(torch.isfinite(p).all() for p in one.values())
    assert all(torch.equal(p, again[n]) for n, p in one.items())
    assert not any(torch.equal(p, two[n]) for n, p in one.items())


def test_dummy_weights_have_the_sizes_of_their_checkpoint_tensors(tiny_config: OmniConfig) -> None:
    """Fused parameters are filled at once, yet each part has the spread its own name asks for."""
    module = build(lambda: Thinker(tiny_config), "cpu", torch.float32)
    fill_dummy(module, 0)
    for name, t in targets(module, "thinker.").items():
        if t.numel() >= 1000:
            mean, std = spread(name, tuple(t.shape))
            assert abs(float(t.mean()) - mean) < 0.2 * std, name
            assert 0.9 * std < float(t.std()) < 1.1 * std, name


def test_dummy_weights_keep_activations_of_order_one() -> None:
    """The released depth of every part in bf16: all that any module puts out is finite and of order
    one."""
    raw = tiny_json()
    real = released_config()
    for path in (
        "thinker_config.text_config.num_hidden_layers",
        "thinker_config.audio_config.encoder_layers",
        "thinker_config.vision_config.depth",
        "talker_config.text_config.num_hidden_layers",
        "talker_config.code_predictor_config.num_hidden_layers",
        "code2wav_config.num_hidden_layers",
    ):
        a, b, c = (path + ".").split(".")[:3]
        if c:
            raw[a][b][c] = real[a][b][c]
        else:
            raw[a][b] = real[a][b]
    config = parse(raw)
    models = Models.open(Source.open(config, "cpu", torch.bfloat16, load_format="dummy"))
    sizes: list[float] = []

    def watch(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
            sizes.append(float(output.float().abs().max()))

    for stage in (models.thinker, models.talker, models.code2wav):
        for child in stage.modules():
            child.register_forward_hook(watch)
    options = Options(max_text_tokens=2, max_frames=3).greedy()
    events = [
        e for kind in ("image", "audio") for e in Solo(models).run(make(kind, config), options)
    ]
    assert len(sizes) > 1000
    assert max(sizes) < 100
    samples = np.concatenate([e.samples for e in events if isinstance(e, Audio)])
    assert 0.02 < samples.std() < np.abs(samples).max() < 0.95


def test_estimate_of_the_released_model() -> None:
    c = parse(released_config())
    sizes = estimate(
        {
            "thinker": lambda: Thinker(c),
            "talker": lambda: Talker(c),
            "code2wav": lambda: Code2Wav(c.code2wav),
        },
        torch.bfloat16,
    )
    total = 2 * 35_259_818_545
    assert total <= sum(sizes.values()) < 1.001 * total  # weights, and a few small tables
    assert sizes["thinker"] > sizes["talker"] > sizes["code2wav"] > 400_000_000


@pytest.mark.gpu
def test_loading_to_a_gpu_equals_loading_to_the_host(tiny_dir: Path) -> None:
    files = CheckpointFiles.open(tiny_dir)
    for dtype in (torch.float32, torch.bfloat16):
        host = empty_like(files, "thinker.", dtype)
        load(files, host, ["thinker."], progress=False)
        for staging in (4096, 1 << 20, loader.STAGING):
            there = {n: torch.full_like(t, torch.nan, device="cuda") for n, t in host.items()}
            load(files, there, ["thinker."], progress=False, staging_bytes=staging)
            assert all(torch.equal(t.cpu(), host[n]) for n, t in there.items())


@pytest.mark.gpu
@pytest.mark.alone
def test_the_released_thinker_is_filled_on_the_gpu() -> None:
    """Thirty billion parameters, straight on the device: no copy of them is ever on the host or
    made twice."""
    module, size, took = fill_on_gpu(parse(released_config()), factor=1.05)
    assert took < 1.01 * size
    assert all(torch.isfinite(p).all() for p in module.parameters())

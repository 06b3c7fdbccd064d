"""`stretto quantize`: what it writes is what compressed-tensors reads, near the wide weights, and
answered by us as `transformers` answers it; a run that was stopped goes on; what cannot be done is
one sentence."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stretto.errors import CheckpointError, Invalid, StrettoError
from stretto.layers.targets import targets
from stretto.models.quantised import convert, shards
from stretto.models.quantised.convert import STATE
from stretto.models.qwen3_omni.load import Models, Source
from stretto.registry import open_model, quantise, write_tiny
from tests.kernels.wide import wide_value
from tests.models.quantised.library import decompressed, library_config, read
from tests.models.quantised.packers import save_shards
from tests.models.qwen3_omni.greedy import check_greedy
from tests.oracle import load_oracle


@dataclass(frozen=True, slots=True)
class WrittenAs:
    """How a checkpoint is quantised, and what is said of it."""

    scheme: str
    says: str
    error: float  # the largest relative error of a matrix
    group: int = 8  # which divides the tiny talker's inputs too
    symmetric: bool = True


WAYS = {
    "int4": WrittenAs("int4", "int4, groups of 8", 0.09),
    "int4 with zero points": WrittenAs(
        "int4", "int4, groups of 8, with zero points", 0.09, symmetric=False
    ),
    "int4, thinker": WrittenAs("int4", "int4, groups of 32", 0.11, group=32),
    "fp8-block": WrittenAs("fp8-block", "FP8, blocks of 128 x 128", 0.04, group=32),
    "fp8-row": WrittenAs("fp8-row", "FP8, a scale per row", 0.04, group=32),
}


def quantised(source: Path, out: Path, name: str = "int4", tick: Any = lambda n: None) -> Path:
    way = WAYS[name]
    parts = () if name == "int4, thinker" else ("talker",)
    options = {"group": way.group, "symmetric": way.symmetric, "device": "cpu"}
    quantise(source, out, parts, way.scheme, **options).run(tick)
    return out


@pytest.fixture(scope="module")
def bfloat16(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in the type, and in shards, as the released ones come; and with a folder
    and a file of its own beside the weights."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_dir, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.*"))
    save_shards({n: t.bfloat16() for n, t in read(tiny_dir).items()}, folder, 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (folder / "voices").mkdir()
    (folder / "voices" / "anna.bin").write_bytes(bytes(range(200)))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    return folder


@pytest.fixture(scope="module")
def made(bfloat16: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in found:
            found[name] = quantised(bfloat16, tmp_path_factory.mktemp("made") / "out", name)
        return found[name]

    return get


@pytest.mark.parametrize("name", list(WAYS))
def test_what_is_written_is_near_the_wide_weights(
    name: str, made: Callable[[str], Path], bfloat16: Path
) -> None:
    """As compressed-tensors reads it; and everything else is as it was."""
    wide, (found, changed) = read(bfloat16), decompressed(made(name))
    assert found.keys() == wide.keys()
    assert all(torch.equal(found[n], t) for n, t in wide.items() if n not in changed)
    layers = ("thinker.model.layers.", "talker.model.layers.")
    assert all(n.startswith(layers) and ("attn" in n or ".experts." in n) for n in changed)
    assert any(n.startswith("talker") for n in changed) == (name != "int4, thinker")
    for n in changed:
        t, rounded = wide[n].float(), found[n].float()
        assert (rounded - t).norm() < WAYS[name].error * t.norm(), n


@pytest.mark.parametrize("packed", [False, True], ids=["widened", "packed"])
@pytest.mark.parametrize("name", list(WAYS))
def test_weights_are_those_of_compressed_tensors(
    name: str, packed: bool, made: Callable[[str], Path]
) -> None:
    """Bit for bit, in the model's type."""
    source = Source.open(made(name), "cpu", torch.bfloat16, progress=False, packed=packed)
    places = {**targets(source.thinker(), "thinker."), **targets(source.talker(), "talker.")}
    found, names = decompressed(made(name))
    assert source.quantised().keys() == names
    for n in names:
        assert torch.equal(wide_value(places[n], torch.bfloat16), found[n]), n


@pytest.mark.parametrize("name", list(WAYS))
def test_what_is_written_is_read_here_as_compressed_tensors_reads_it(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Text, codes and samples are those of `transformers` with the weights that the library
    makes."""
    folder = made(name)
    assert open_model(folder).info.weights == WAYS[name].says
    wide = tmp_path / "wide"
    shutil.copytree(folder, wide, ignore=shutil.ignore_patterns("*.safetensors", "*.index.*"))
    config = json.loads((folder / "config.json").read_text())
    (wide / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "quantization_config"})
    )
    exact, _ = decompressed(folder, torch.float32)
    tensors = {n: t.float().contiguous() for n, t in exact.items()}
    save_file(tensors, wide / "model.safetensors", {"format": "pt"})
    source = Source.open(folder, "cpu", torch.float32, progress=False, packed="thinker" in name)
    check_greedy("text", Models.open(source), load_oracle(wide))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_loads_what_is_written(tiny_dir: Path, tmp_path: Path) -> None:
    """The same files, in both: text, codes and samples are equal. (What it does not load: a wide
    talker beside a quantised thinker, for it takes all experts for quantised ones; and experts of
    other formats in float32.)"""
    pytest.importorskip("compressed_tensors", reason="`make setup-test` installs it")
    from transformers import CompressedTensorsConfig

    out = quantised(tiny_dir, tmp_path / "out")
    widened = CompressedTensorsConfig(dequantize=True)
    oracle = load_oracle(out, quantization_config=widened)
    check_greedy("audio+image", Models.open(Source.open(out, progress=False)), oracle)


@pytest.mark.parametrize("name", list(WAYS))
def test_the_config_lists_the_linear_maps_that_stay_wide(
    name: str, made: Callable[[str], Path]
) -> None:
    """So that other engines look for no scales there."""
    config = library_config(made(name))
    tensors = read(made(name))
    linear = {n.removesuffix(".weight") for n, t in tensors.items() if t.ndim == 2}
    wide = {n for n in linear if f"{n}.weight" in tensors and f"{n}.weight_scale" not in tensors}
    assert {*config.ignore} == wide
    assert {"thinker.lm_head", "thinker.model.layers.0.mlp.gate"} <= wide


def test_everything_else_is_copied(made: Callable[[str], Path], bfloat16: Path) -> None:
    out = made("int4")
    names = {p.relative_to(bfloat16) for p in bfloat16.rglob("*") if ".cache" not in p.parts}
    assert {p.relative_to(out) for p in out.rglob("*")} == names
    for path in names - {Path("config.json"), Path("model.safetensors.index.json")}:
        if (bfloat16 / path).is_file() and path.suffix != ".safetensors":
            assert (out / path).read_bytes() == (bfloat16 / path).read_bytes(), path
    before, after = (json.loads((p / "config.json").read_text()) for p in (bfloat16, out))
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(out).values())


def test_what_is_no_file_is_left_out(bfloat16: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(bfloat16, source)
    (source / "gone.json").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    out = quantised(source, tmp_path / "out")
    assert not {"gone.json", "pipe"} & {p.name for p in out.iterdir()}


def test_one_file_stays_one(tiny_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "single"
    shutil.copytree(tiny_dir, source, ignore=shutil.ignore_patterns("*.safetensors", "*.index.*"))
    save_file(read(tiny_dir), source / "model.safetensors", {"format": "pt"})
    out = quantised(source, tmp_path / "out")
    assert [f.name for f in out.glob("*safetensors*")] == ["model.safetensors"]
    assert open_model(out).info.weights == "int4, groups of 8"


class Killed(BaseException):
    """As a signal ends a run, anywhere."""


@pytest.mark.parametrize("after", [0, 0.2, 0.5, 0.99])
def test_a_run_that_was_stopped_goes_on(
    after: float, bfloat16: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    total = sum(t.nbytes for t in read(bfloat16).values())
    done = 0

    def stop(n: int) -> None:
        nonlocal done
        done += n
        if done > after * total:
            raise Killed

    with pytest.raises(Killed):
        quantised(bfloat16, out, "int4", stop)
    assert not (out / "config.json").exists(), "whoever opens it is refused"
    assert not list(out.rglob("*.part"))
    whole = {f: f.stat().st_mtime_ns for f in out.glob("*.safetensors")}
    ticks: list[int] = []
    quantised(bfloat16, out, "int4", ticks.append)
    assert sum(ticks) == total
    assert {f: f.stat().st_mtime_ns for f in whole} == whole, "they are not made again"
    assert {f.name: f.read_bytes() for f in out.iterdir() if f.is_file()} == {
        f.name: f.read_bytes() for f in made("int4").iterdir() if f.is_file()
    }


def test_a_shard_that_is_not_whole_is_made_again(
    bfloat16: Path, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Should the disk have lost the end of a file, or its name hold another one."""
    out = tmp_path / "out"
    shutil.copytree(made("int4"), out)
    with pytest.raises(Killed):
        quantised(bfloat16, tmp_path / "stopped", "int4", lambda n: (_ for _ in ()).throw(Killed()))
    shutil.copy(tmp_path / "stopped" / STATE, out / STATE)
    first, second, third = sorted(out.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    shutil.copy(bfloat16 / second.name, second)
    third.write_bytes(bytes(third.stat().st_size))
    quantised(bfloat16, out)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(read(out).values(), read(made("int4")).values(), strict=True)
    )


def refusal(*args: Any, kind: type[StrettoError] = Invalid) -> str:
    with pytest.raises(kind) as e:
        quantised(*args)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_what_is_quantised_is_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("int4", "fp8-row"):
        assert "is quantised already" in refusal(made(name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_config_that_speaks_of_another_format_is_refused(bfloat16: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(bfloat16, source)
    config = json.loads((source / "config.json").read_text())
    for section in ("quantization_config", "quantization"):
        text = json.dumps({**config, section: {"quant_method": "awq"}})
        (source / "config.json").write_text(text)
        assert "is quantised already" in refusal(source, tmp_path / "out")


def test_a_place_that_holds_something_else_is_refused(bfloat16: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file"):
        assert "is there already: name a new or an empty directory" in refusal(bfloat16, out)
    assert os.listdir(tmp_path) == ["file"]
    assert "lies in MODEL" in refusal(bfloat16, bfloat16)
    assert "lies in MODEL" in refusal(bfloat16, bfloat16 / "quantised")


def test_a_run_of_other_settings_is_not_gone_on_with(bfloat16: Path, tmp_path: Path) -> None:
    def stop(n: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        quantised(bfloat16, tmp_path / "out", "int4", stop)
    assert "unfinished run of other settings" in refusal(bfloat16, tmp_path / "out", "fp8-row")
    source = tmp_path / "model"
    shutil.copytree(bfloat16, source)
    assert "unfinished run of other settings" in refusal(source, tmp_path / "out")
    with pytest.raises(Killed):
        quantised(source, tmp_path / "other", "int4", stop)
    os.utime(min(source.glob("*.safetensors")), ns=(0, 0))
    assert "a model that has changed since" in refusal(source, tmp_path / "other")


def test_a_file_that_shrinks_while_it_is_read_is_refused(bfloat16: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(bfloat16, source)
    last = max(source.glob("*.safetensors"))
    whole = last.stat().st_size

    def cut(n: int) -> None:
        os.truncate(last, whole - 100)

    with pytest.raises(CheckpointError, match="the file ended early"):
        quantised(source, tmp_path / "out", "int4", cut)
    assert not (tmp_path / "out" / last.name).exists()


def test_two_runs_do_not_write_to_one_place(bfloat16: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / STATE, "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        message = refusal(bfloat16, tmp_path / "out", kind=StrettoError)
    assert "another run writes there" in message


def test_a_disk_without_room_is_refused_at_once(
    bfloat16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    message = refusal(bfloat16, tmp_path / "out", kind=StrettoError)
    assert "GiB are to be written, but 0.0 GiB are free there" in message
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_one_sentence(
    bfloat16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    message = refusal(bfloat16, tmp_path / "out", kind=StrettoError)
    assert message.endswith("cannot be written (No space left on device)")
    assert not list((tmp_path / "out").glob("**/*.part"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(
    value: float, bfloat16: Path, tmp_path: Path
) -> None:
    source, name = tmp_path / "model", "thinker.model.layers.1.mlp.experts.3.up_proj.weight"
    shutil.copytree(bfloat16, source)
    tensors = read(bfloat16)
    tensors[name][3, 5] = value
    save_shards(tensors, source, 3)
    message = refusal(source, tmp_path / "out", kind=CheckpointError)
    assert f"tensor {name}: holds infinities or NaN" in message


def test_settings_that_cannot_be_are_refused(bfloat16: Path, tmp_path: Path) -> None:
    def message(scheme: str = "int4", **options: Any) -> str:
        usual = {"group": 32, "symmetric": True, "device": "cpu"}
        with pytest.raises(Invalid) as e:
            quantise(bfloat16, tmp_path / "out", ("talker",), scheme, **{**usual, **options})
        return str(e.value)

    assert "--group-size 32 does not divide the 48 inputs of talker.model." in message()
    assert "--group-size must be a multiple of 8, got 12" in message(group=12)
    assert "--group-size must be a multiple of 8, got 0" in message(group=0)
    assert "--group-size is of int4; fp8-row has none" in message("fp8-row", group=64)
    assert "fp8-block has no zero points" in message("fp8-block", symmetric=False)


def test_a_family_without_packed_weights_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tts", family="qwen3-tts")
    message = refusal(tmp_path / "tts", tmp_path / "out")
    assert "a qwen3_tts cannot be quantised; qwen3_omni_moe can" in message


def test_a_checkpoint_that_lacks_a_matrix_is_refused(bfloat16: Path, tmp_path: Path) -> None:
    source, name = tmp_path / "model", "thinker.model.layers.1.mlp.experts.3.up_proj.weight"
    shutil.copytree(bfloat16, source)
    tensors = read(bfloat16)
    del tensors[name]
    save_shards(tensors, source, 3)
    assert f"{name} is missing" in refusal(source, tmp_path / "out", kind=CheckpointError)

"""What a quantised checkpoint may not be: one sentence names the tensor, or the field, and the
reason; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stretto.errors import CheckpointError
from stretto.models.checkpoint import StoredTensor
from stretto.models.quantised.loading import read_small
from stretto.models.qwen3_omni.load import Source
from stretto.registry import open_model
from tests.models.quantised.packers import CASES, Tensors, save_shards, set_config, write

Change = Callable[[Tensors], object]
STEM = "thinker.model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def folders(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write(tiny_dir, tmp_path_factory.mktemp("refused"), CASES[name]).directory
        return made[name]

    return get


def changed(source: Path, folder: Path, change: Change) -> Path:
    """A copy with other tensors."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors: Tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    save_shards(tensors, folder)
    return folder


def refusal(folder: Path, **options: Any) -> str:
    def load() -> None:
        open_model(folder)
        Source.open(folder, progress=False, **options).thinker()

    with pytest.raises(CheckpointError) as e:
        load()
    text = str(e.value)
    assert "\n" not in text
    return text


def put(suffix: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[f"{STEM}.{suffix}"] = value(tensors[f"{STEM}.{suffix}"])

    return change


def add(suffix: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({f"{STEM}.{suffix}": value})


def drop(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{STEM}.{suffix}")


def bad(at: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[at] = value
        return t

    return change


def code(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        raw = t.view(torch.uint8).clone()
        raw[2, 5] = value
        return raw.view(torch.float8_e4m3fn)

    return change


def awq(tensors: Tensors) -> None:
    tensors[f"{STEM}.qweight"] = tensors[f"{STEM}.qweight"].T.reshape(64, 4).contiguous()


def nvfp4(tensors: Tensors) -> None:
    tensors.pop(f"{STEM}.weight_shape")
    tensors[f"{STEM}.weight_packed"] = torch.zeros(32, 32, dtype=torch.uint8)
    tensors[f"{STEM}.weight_scale"] = torch.zeros(32, 4, dtype=torch.float8_e4m3fn)
    tensors[f"{STEM}.weight_global_scale"] = torch.ones(1)


def nvfp4_modelopt(tensors: Tensors) -> None:
    tensors[f"{STEM}.weight"] = torch.zeros(32, 32, dtype=torch.uint8)
    tensors[f"{STEM}.weight_scale"] = torch.zeros(32, 4, dtype=torch.float8_e4m3fn)
    tensors[f"{STEM}.weight_scale_2"] = torch.tensor(1.0)
    tensors[f"{STEM}.input_scale"] = torch.tensor(1.0)


def packed_encoder(tensors: Tensors) -> None:
    """The encoder has no matrix of this shape."""
    name = "thinker.audio_tower.layers.0.fc1"
    tensors.pop(f"{name}.weight")
    for suffix in ("weight_packed", "weight_scale", "weight_shape"):
        tensors[f"{name}.{suffix}"] = tensors[f"{STEM}.{suffix}"].clone()


WRONG_ORDER = torch.arange(64).flip(0).int() // 32
TENSORS = [
    ("A", drop("weight_scale"), "comes without weight_scale"),
    ("A", drop("weight_packed"), "comes without weight_packed"),
    ("A", drop("weight_shape"), "comes without weight_shape"),
    ("A", add("weight", torch.zeros(32, 64)), "is there both wide and packed"),
    ("A", add("weight_scale_inv", torch.ones(1, 1)), "is not known beside the other tensors"),
    ("A", add("input_scale", torch.ones(1)), "activations with a fixed scale"),
    ("A", nvfp4, "NVFP4 weights are not supported"),
    ("A", put("weight_packed", lambda t: t.long()), r"is I64 \[32, 8\] instead of words"),
    ("A", put("weight_packed", lambda t: t[:, :7].contiguous()), "groups of 28 inputs"),
    ("A", put("weight_scale", lambda t: t[:31].contiguous()), "for a matrix of 32 outputs"),
    ("A", put("weight_scale", lambda t: t.repeat(1, 2)), "groups of 16 inputs, but group_size is"),
    ("A", put("weight_scale", lambda t: torch.ones(32, 3)), "3 scales do not divide 64 inputs"),
    ("A", put("weight_scale", lambda t: t[:, :0].contiguous()), "0 scales do not divide 64 inputs"),
    ("A", put("weight_scale", lambda t: t.int()), "scales of dtype I32 are not supported"),
    ("A", put("weight_scale", bad((3, 1), torch.nan)), "holds scales that are infinite or NaN"),
    ("A", put("weight_scale", bad((3, 1), torch.inf)), "holds scales that are infinite or NaN"),
    ("A", put("weight_shape", lambda t: t.flip(0)), r"says \[64, 32\], but the codes are of"),
    ("A", add("weight_zero_point", torch.zeros(4, 2).int()), "which its tensors contradict"),
    ("A", add("weight_g_idx", WRONG_ORDER), "puts inputs into another order"),
    ("A", packed_encoder, r"is a matrix of \[32, 64\], the model needs"),
    ("A asymmetric", drop("weight_zero_point"), "which its tensors contradict"),
    ("A asymmetric", put("weight_zero_point", lambda t: t[:3].contiguous()), "has shape"),
    ("A 8 bits", put("weight_packed", lambda t: t[:, :8].contiguous()), "groups of 16 inputs"),
    ("B GPTQ", put("qzeros", bad((1, 2), 0)), "has zero points: GPTQ weights must be symmetric"),
    ("B GPTQ", put("qzeros", lambda t: t[:, :3].contiguous()), r"has shape \[2, 3\] instead of"),
    ("B GPTQ", put("scales", lambda t: t[:, :31].contiguous()), "for a matrix of 32 outputs"),
    ("B GPTQ", put("g_idx", lambda t: t.flip(0)), "puts inputs into another order"),
    ("B GPTQ", drop("qzeros"), "comes without qzeros"),
    ("B AutoRound", put("qzeros", lambda t: t + 0x11111111), "has zero points"),
    ("B AutoRound", awq, r"AWQ's own packing \(GEMM\) is not supported"),
    ("B AutoRound", put("scales", bad((1, 2), torch.inf)), "holds scales that are infinite"),
    ("C", drop("weight_scale_inv"), "comes without weight_scale"),
    ("C", put("weight_scale_inv", lambda t: t[:, :1].contiguous()), "in blocks of 32 x 32 need"),
    ("C", put("weight_scale_inv", bad((0, 1), 5000.0)), "which kind is meant"),
    ("C", put("weight_scale_inv", bad((0, 1), 0.0)), "holds a scale of 0"),
    ("C", put("weight_scale_inv", bad((0, 1), torch.nan)), "holds infinities or NaN"),
    ("C", put("weight", code(0x7F)), "holds NaN"),
    ("C", put("weight", code(0xFF)), "holds NaN"),
    ("D", put("weight", lambda t: t.view(torch.float8_e5m2)), "is F8_E5M2"),
    ("D", put("weight_scale", bad((3, 0), torch.nan)), "holds infinities or NaN"),
    ("D", put("weight_scale", lambda t: t[:5].contiguous()), "has shape"),
    ("D", put("weight_scale", lambda t: t.int()), "scales of dtype I32 are not supported"),
    ("D", put("weight_scale", lambda t: torch.ones(1, 1)), r"has shape \[1, 1\] instead of"),
    ("C compressed-tensors", put("weight_scale", lambda t: torch.ones(32, 1)), "need"),
    ("D", nvfp4_modelopt, "NVFP4 weights are not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "why"), TENSORS)
def test_a_wrong_tensor_is_named(
    name: str, change: Change, why: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    import re

    text = refusal(changed(folders(name), tmp_path / "bad", change))
    assert re.search(why, text), text
    assert STEM in text or "audio_tower.layers.0.fc1" in text


@pytest.mark.parametrize("name", ["A", "C", "D"])
def test_packed_weights_are_checked_like_widened_ones(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    change = (
        put("weight_scale", bad((3, 1), torch.nan)) if name == "A" else put("weight", code(255))
    )
    assert STEM in refusal(changed(folders(name), tmp_path / "bad", change), packed=True)


def group(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["config_groups"]["group_0"]["weights"].update({key: value})


def activations(value: object) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["config_groups"]["group_0"].update(input_activations=value)


def of_group(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["config_groups"]["group_0"].update({key: value})


def another_group(c: dict[str, Any]) -> None:
    first = c["config_groups"]["group_0"]
    c["config_groups"]["group_1"] = {**first, "weights": {**first["weights"], "num_bits": 8}}


STATIC = {"num_bits": 8, "type": "float", "dynamic": False}
FIELDS = [
    ("A", lambda c: c.update(quant_method="bitsandbytes"), "quant_method 'bitsandbytes'"),
    ("A", lambda c: c.update(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
    ("A", lambda c: c.update(format="mixed-precision"), "format 'mixed-precision'"),
    ("A", lambda c: c.update(quantization_status="frozen"), "quantization_status 'frozen'"),
    ("A", lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    ("A", lambda c: c.update(sparsity_config={"format": "dense"}), "sparsity_config"),
    ("A", lambda c: c.update(transform_config={"a": 1}), "transform_config"),
    ("A", another_group, "groups that differ"),
    ("A", group("num_bits", 3), "num_bits 3"),
    ("A", group("type", "float"), "type 'float'"),
    ("A", group("strategy", "channel"), "strategy 'channel'"),
    ("A", group("actorder", "group"), "actorder 'group'"),
    ("A", group("group_size", 0), "group_size 0"),
    ("A", group("group_size", "32"), "group_size '32'"),
    ("A", of_group("output_activations", {"num_bits": 8}), "output activations"),
    ("A", of_group("format", "float-quantized"), "format 'float-quantized' of a group"),
    ("A", of_group("weights", None), "a group of config_groups without weights"),
    ("A", lambda c: c.update(config_groups={}), "config_groups without a group"),
    ("A", group("dynamic", True), "dynamic scales"),
    ("A", activations({"num_bits": 8, "type": "int", "dynamic": True}), "activations beside int"),
    ("D", activations(STATIC), "activations with a fixed scale"),
    ("D", activations({"num_bits": 4, "type": "float", "dynamic": True}), "are not FP8"),
    ("D", group("strategy", "tensor"), "strategy 'tensor'"),
    ("C", lambda c: c.update(activation_scheme="static"), "activation_scheme 'static'"),
    ("C", lambda c: c.update(fmt="e5m2"), "fmt 'e5m2'"),
    ("C", lambda c: c.update(weight_block_size=[0, 32]), "weight_block_size"),
    ("B GPTQ", lambda c: c.update(desc_act=True), "desc_act True"),
    ("B GPTQ", lambda c: c.update(sym=False), "sym False"),
    ("B GPTQ", lambda c: c.update(bits=8), "bits 8"),
    ("B GPTQ", lambda c: c.update(group_size=0), "group_size 0"),
    ("B AutoRound", lambda c: c.update(packing_format="auto_round:auto_awq"), "packing_format"),
    ("B AutoRound", lambda c: c.update(act_bits=8), "act_bits 8"),
    ("B AutoRound", lambda c: c.update(data_type="nv_fp"), "data_type 'nv_fp'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "why"), FIELDS)
def test_a_field_that_asks_for_more_is_named(
    name: str,
    change: Callable[[dict[str, Any]], object],
    why: str,
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """From the config alone."""
    config = json.loads((folders(name) / "config.json").read_text())
    change(config["quantization_config"])
    for file in folders(name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(tmp_path)
    assert why in text
    assert "config.json: quantization_config" in text
    assert text.endswith("is not supported")


@pytest.mark.parametrize(
    ("name", "config"),
    [("A", "B GPTQ"), ("A", "C"), ("A", "D"), ("B GPTQ", "A"), ("C", "A"), ("D", "B AutoRound")],
)
def test_a_config_of_another_format_is_refused(
    name: str, config: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(folders(name), tmp_path / "other", lambda tensors: None)
    set_config(folder, CASES[config].config)
    text = refusal(folder)
    method = CASES[config].config["quant_method"]
    assert text.endswith(f"is not what quantization_config ({method}) says"), text


def test_configs_in_other_places(tiny_dir: Path, tmp_path: Path) -> None:
    """In a part's section, and in a file beside it; MLX's and ModelOpt's own."""
    for file in tiny_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tiny_dir / "config.json").read_text())
    bad_config = {"quant_method": "awq"}
    (tmp_path / "config.json").unlink()
    for changes, where in (
        ({"compression_config": bad_config}, "config.json: compression_config"),
        (
            {"thinker_config": {**raw["thinker_config"], "quantization_config": bad_config}},
            "config.json: thinker_config.quantization_config",
        ),
        ({"quantization": {"bits": 4}}, "MLX"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        assert where in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "quantize_config.json").write_text(json.dumps(bad_config))
    assert "quantize_config.json: quant_method 'awq'" in refusal(tmp_path)
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "ModelOpt" in refusal(tmp_path)


def test_configs_that_contradict_each_other(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The one of a part's section is another than that of the whole."""
    raw = json.loads((folders("A") / "config.json").read_text())
    other = json.loads(json.dumps(raw["quantization_config"]))
    other["config_groups"]["group_0"]["weights"]["symmetric"] = False
    raw["thinker_config"]["quantization_config"] = other
    for file in folders("A").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "contradicts another quantization_config" in refusal(tmp_path)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100))
    stored = StoredTensor("a.weight_scale", file, "F32", (4, 8), 0, 128)
    with pytest.raises(CheckpointError, match="weight_scale: cannot be read"):
        read_small(stored)


@pytest.mark.parametrize("name", ["A", "B AutoRound", "C"])
def test_nothing_is_rounded_twice(name: str, folders: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="--expert-weights float8 is for wide weights"):
        Source.open(folders(name), progress=False, expert_weights="float8")


def test_float8_rows_are_what_that_flag_makes(folders: Callable[[str], Path]) -> None:
    """They are copied, not rounded again."""
    source = Source.open(folders("D"), progress=False, expert_weights="float8")
    stored = load_file(folders("D") / "model-00001-of-00002.safetensors")
    stored |= load_file(folders("D") / "model-00002-of-00002.safetensors")
    gate_up = source.thinker().model.layers[1].mlp.experts.gate_up  # type: ignore[union-attr]
    assert torch.equal(
        gate_up[3, 32:].view(torch.uint8), stored[f"{STEM}.weight"].view(torch.uint8)
    )


def test_a_truncated_file_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(folders("A"), tmp_path / "cut", lambda tensors: None)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "truncated?" in refusal(folder)


def test_quantised_numbers_without_a_config_say_enough(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """But for the size of blocks, which is then the usual one."""
    folder = changed(folders("D"), tmp_path / "bare", lambda tensors: None)
    set_config(folder, None)
    assert open_model(folder).info.weights == "FP8, a scale per row"

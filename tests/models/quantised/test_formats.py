"""Quantised checkpoints in the layouts of the tools that write them: what they stand for is what is
loaded, widened or packed, and what is answered is what `transformers` answers with those weights in
float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cli import main
from stretto.kernels.formats import WeightFormat
from stretto.kernels.reference.packed import PackedWeight, pack, widen
from stretto.layers.linear import PackedMatrix
from stretto.layers.mlp import Experts
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.load import Models, Source
from stretto.registry import open_model, write_tiny
from tests.kernels.wide import wide_value
from tests.models.quantised.library import decompressed
from tests.models.quantised.packers import (
    CASES,
    CONFIG_GPTQ,
    QuantisedCase,
    Written,
    config_a,
    pack_asymmetric,
    pack_gptq,
    pack_quantized,
    write,
)
from tests.models.qwen3_omni.greedy import LIMITS, check_greedy, codes, texts
from tests.oracle import load_oracle
from tests.prompts import make
from tests.solo import Solo


@pytest.fixture(scope="module")
def written(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    made: dict[str, Written] = {}

    def get(name: str) -> Written:
        if name not in made:
            made[name] = write(tiny_dir, tmp_path_factory.mktemp("quantised"), CASES[name])
        return made[name]

    return get


def stages(directory: Path, dtype: torch.dtype, packed: bool) -> dict[str, nn.Module]:
    source = Source.open(directory, "cpu", dtype, progress=False, packed=packed)
    return {"thinker.": source.thinker(), "talker.": source.talker()}


@pytest.mark.parametrize("packed", [False, True], ids=["widened", "packed"])
@pytest.mark.parametrize("name", list(CASES))
def test_weights_are_what_the_numbers_stand_for(
    name: str, packed: bool, written: Callable[[str], Written]
) -> None:
    """Each is the float32 product of number and scale, rounded once."""
    case, dtype = written(name), torch.bfloat16
    values = dict(case.values)
    for prefix, model in stages(case.directory, dtype, packed).items():
        for key, into in targets(model, prefix).items():
            if key in values:
                assert torch.equal(wide_value(into, dtype), values.pop(key).to(dtype)), key
    assert not values


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if c.config["quant_method"] == "compressed-tensors"]
)
def test_the_library_reads_them_as_we_do(name: str, written: Callable[[str], Written]) -> None:
    """These tests' own writers keep to the layout of compressed-tensors."""
    found, names = decompressed(written(name).directory, torch.float32)
    assert names == written(name).values.keys()
    for n, value in written(name).values.items():
        assert torch.equal(found[n], value), n


@pytest.mark.parametrize("name", list(CASES))
def test_packed_weights_take_the_checkpoints_bytes(
    name: str, written: Callable[[str], Written]
) -> None:
    source = Source.open(written(name).directory, progress=False, packed=True)
    experts = 2 if "thinker.experts" in source.config.formats else 0
    assert experts, "the thinker's experts stay packed"
    thinker = source.thinker()
    matrices = [m for m in thinker.modules() if isinstance(m, PackedMatrix | Experts)]
    assert len(matrices) >= experts * source.config.thinker.text.num_layers / 2
    stored = sum(
        part.nbytes
        for key, q in source.quantised().items()
        if key.startswith("thinker.")
        for part in (q.codes, q.scale, q.zero)
        if part is not None
    )
    taken = sum(b.nbytes for m in matrices for b in (*m.parameters(), *m.buffers()))
    # Scales of float8 are widened to float32, zero points to a byte.
    assert stored <= taken <= 1.2 * stored


GROUP_16 = {"group_size": 16}
KINDS = {"A": "audio+image", "B AutoRound": "multi-turn", "C reciprocal": "audio"}
"""Of prompts, where it is not text."""
WIDENED = ("B AutoRound", "C")


@pytest.mark.parametrize("name", list(CASES))
def test_answers_are_the_references(name: str, written: Callable[[str], Written]) -> None:
    """Text, codes and samples, greedy, of weights that stay packed where they can."""
    case, kind = written(name), KINDS.get(name, "text")
    packed = name not in WIDENED
    source = Source.open(case.directory, "cpu", torch.float32, progress=False, packed=packed)
    check_greedy(kind, Models.open(source), load_oracle(case.wide))


@pytest.mark.parametrize("name", ["A", "A asymmetric", "C", "D"])
def test_answers_do_not_depend_on_their_company(
    name: str, written: Callable[[str], Written]
) -> None:
    """Sampled ones, in one run and cut into pieces."""
    kind = KINDS.get(name, "text")
    source = Source.open(written(name).directory, "cpu", torch.float32, progress=False, packed=True)
    models = Models.open(source)
    prompts = [make(k, models.config, seed=i) for i, k in enumerate(("text", kind))]
    options = [replace(LIMITS.seeded(i), prefill_chunk=7 * i or None) for i in range(2)]
    together = list(Solo(models).run(prompts, options))
    for i in range(2):
        alone = list(Solo(models).run(prompts[i], LIMITS.seeded(i)))
        assert texts(together, i) == texts(alone)
        np.testing.assert_array_equal(codes(together, i), codes(alone))


@pytest.mark.parametrize("name", list(CASES))
def test_the_format_is_named(name: str, written: Callable[[str], Written]) -> None:
    assert open_model(written(name).directory).info.weights == CASES[name].says


def test_wide_weights_need_no_word(tiny_dir: Path) -> None:
    assert open_model(tiny_dir).info.weights == ""


@pytest.mark.parametrize("staging", [8, 5000])
def test_little_is_staged_at_a_time(staging: int, written: Callable[[str], Written]) -> None:
    """Pieces of tensors, and matrices that are staged whole, are the same model."""
    from stretto.models.weights import load

    for packed in (False, True):
        source = Source.open(written("A").directory, progress=False, packed=packed)
        whole, cut = source.thinker(), source.thinker()
        for t in (*cut.parameters(), *cut.buffers()):
            t.zero_()
        places, files = targets(cut, "thinker."), source.files()
        load(files, places, [], False, staging_bytes=staging, quantised=source.quantised())
        pairs = zip(whole.state_dict().items(), cut.state_dict().values(), strict=True)
        for (key, ours), theirs in pairs:
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize(
    "case",
    [
        replace(CASES["A"], pack=pack_quantized(16), config=config_a(group=16)),
        replace(CASES["A asymmetric"], pack=pack_asymmetric(16), config=config_a(4, 16, False)),
        replace(CASES["B GPTQ"], pack=pack_gptq(16, 0x88888888), config=CONFIG_GPTQ | GROUP_16),
        CASES["C reciprocal"],
        CASES["D"],
    ],
    ids=["A", "A asymmetric", "B", "C", "D"],
)
def test_another_familys_weights_are_widened(case: QuantisedCase, tmp_path: Path) -> None:
    """Qwen3-TTS: no public checkpoint is known, but nothing speaks against one."""
    from stretto.models.qwen3_tts.load import Source as Tts

    write_tiny(tmp_path / "tts", family="qwen3-tts")
    case = replace(case, names=(r"talker\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj",))
    made = write(tmp_path / "tts", tmp_path / "made", case)
    talker = Tts.open(made.directory, progress=False).talker()
    loaded = {n: t for n, t in targets(talker, "talker.").items() if n in made.values}
    assert len(loaded) == len(made.values) > 10
    for name, t in loaded.items():
        assert isinstance(t, torch.Tensor)
        assert torch.equal(t, made.values[name]), name
    shown = case.says if case.says.startswith("FP8") else case.says.replace("of 32", "of 16")
    assert open_model(made.directory).info.weights == shown


@pytest.mark.parametrize("section", [("thinker_config",), ("thinker_config", "text_config")])
def test_settings_in_a_parts_section(
    section: tuple[str, ...], written: Callable[[str], Written], tmp_path: Path
) -> None:
    """Where some tools put them: only there it says that the numbers have 8 bits."""
    for file in written("A 8 bits").directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    part = config
    for key in section:
        part = part[key]
    part["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(tmp_path).info.weights == "int8, groups of 32"
    Source.open(tmp_path, progress=False).thinker()


def test_the_words_of_the_published_layouts(tmp_path: Path) -> None:
    """Codes -8 to 7 in order, as compressed-tensors and GPTQ pack them: fixed numbers, so that a
    mistake that packing and reading share shows."""
    codes = torch.arange(-8, 8)[None]
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - 2**32]], dtype=torch.int32)
    form = WeightFormat("int4", 16)
    w = PackedWeight(form, words, torch.ones(1, 1))
    assert torch.equal(widen(w, torch.float32), codes.float())
    assert torch.equal(pack(codes + 8, 4), words)


def test_the_command_line_says_the_format(
    written: Callable[[str], Written], tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, says in ((written("C").directory, "FP8, blocks"), (tiny_dir, "not quantised")):
        assert main(["env", str(folder)]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert lines["weights"].startswith(says)
        assert lines["family"] == "qwen3_omni_moe"

"""Quantised checkpoints in the layouts of the tools that write them: what they stand for is what is
loaded, widened or packed, and what is answered is what `transformers` answers with those weights in
float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cli import main
from stretto.kernels.reference.packed import PackedWeight, widen
from stretto.layers.linear import PackedMatrix
from stretto.layers.mlp import Experts
from stretto.layers.targets import Float8Rows, targets
from stretto.models.qwen3_omni.load import Models, Source
from stretto.registry import open_model, write_tiny
from tests.kernels.wide import dequantize
from tests.models.quantised.packers import CASES, Written, config_a, pack_quantized, write
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


def wide_value(t: object, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(t, Float8Rows):
        return dequantize(t.weight, t.scale).to(dtype)
    assert isinstance(t, PackedWeight | torch.Tensor)
    return widen(t, dtype)


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


@pytest.mark.parametrize(
    ("name", "packed", "kind"),
    [
        ("A", True, "audio+image"),
        ("A asymmetric", True, "text"),
        ("B AutoRound", False, "multi-turn"),
        ("C reciprocal", True, "audio"),
        ("D", True, "text"),
    ],
)
def test_answers_are_the_references(
    name: str, packed: bool, kind: str, written: Callable[[str], Written]
) -> None:
    """Text, codes and samples, greedy; a sampled answer in one run and cut into pieces."""
    case = written(name)
    source = Source.open(case.directory, "cpu", torch.float32, progress=False, packed=packed)
    models = Models.open(source)
    check_greedy(kind, models, load_oracle(case.wide))
    prompts = [make(k, models.config, seed=i) for i, k in enumerate(("text", kind))]
    options = [replace(LIMITS.seeded(i), prefill_chunk=7 * i or None) for i in range(2)]
    together = list(Solo(models).run(prompts, options))
    for i in range(2):
        alone = list(Solo(models).run(prompts[i], LIMITS.seeded(i)))
        assert texts(together, i) == texts(alone)
        np.testing.assert_array_equal(codes(together, i), codes(alone))


@pytest.mark.parametrize("name", list(CASES))
def test_the_format_is_said(name: str, written: Callable[[str], Written]) -> None:
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


def test_another_familys_weights_are_widened(tmp_path: Path) -> None:
    """Qwen3-TTS: no public checkpoint is known, but nothing speaks against one."""
    from stretto.models.qwen3_tts.load import Source as Tts

    write_tiny(tmp_path / "tts", family="qwen3-tts")
    case = replace(CASES["A"], names=(r"talker\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj",))
    case = replace(case, pack=pack_quantized(16), config=config_a(group=16))
    made = write(tmp_path / "tts", tmp_path / "made", case)
    talker = Tts.open(made.directory, progress=False).talker()
    loaded = {n: t for n, t in targets(talker, "talker.").items() if n in made.values}
    assert len(loaded) == len(made.values) > 10
    for name, t in loaded.items():
        assert isinstance(t, torch.Tensor)
        assert torch.equal(t, made.values[name]), name
    assert open_model(made.directory).info.weights == "int4, groups of 16"


def test_the_command_line_says_the_format(
    written: Callable[[str], Written], tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, says in ((written("C").directory, "FP8, blocks"), (tiny_dir, "not quantised")):
        assert main(["env", str(folder)]) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert lines["weights"].startswith(says)
        assert lines["family"] == "qwen3_omni_moe"

"""Experts as float8: the model is the reference's with the weights that the float8 numbers stand
for, and however it is loaded it is the same one."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.errors import CheckpointError
from stretto.kernels.reference.quantized import FLOAT8
from stretto.layers.mlp import Experts
from stretto.layers.targets import Float8Rows, targets
from stretto.models.checkpoint import CheckpointFiles
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import build, load
from stretto.testing.qwen3_omni import released_config
from stretto.types import SamplingParams
from tests.kernels.wide import dequantize
from tests.models.fill import fill_on_gpu
from tests.models.qwen3_omni.greedy import LIMITS, check_greedy, codes, done, texts
from tests.models.sizes import estimate
from tests.oracle import load_oracle
from tests.prompts import KINDS, make
from tests.solo import Solo


@pytest.fixture(scope="module")
def narrow(tiny_dir: Path, device: torch.device) -> Models:
    return Models.open(
        Source.open(tiny_dir, device, torch.float32, progress=False, expert_weights="float8")
    )


@pytest.fixture(scope="module")
def wide_dir(tiny_dir: Path, narrow: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the numbers that the float8 ones stand for."""
    folder = tmp_path_factory.mktemp("float8") / "wide"
    shutil.copytree(tiny_dir, folder)
    rows = {
        n: t for n, t in targets(narrow.thinker, "thinker.").items() if isinstance(t, Float8Rows)
    }
    values = {n: dequantize(t.weight, t.scale).cpu() for n, t in rows.items()}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {n: values.pop(n).contiguous() for n in tensors if n in values}
        save_file({**tensors, **changed}, file, {"format": "pt"})
    assert rows
    assert not values
    return folder


@pytest.fixture(scope="module")
def oracle(wide_dir: Path, device: torch.device) -> Any:
    return load_oracle(wide_dir, device)


def mixtures(model: torch.nn.Module) -> Iterator[Experts]:
    return (m for m in model.modules() if isinstance(m, Experts))


def same_bits(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """All parameters and buffers, each byte."""
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (a, b))
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        assert t.dtype == theirs[name].dtype, name
        assert torch.equal(
            t.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)
        ), name


# ---- what it computes


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_the_reference_with_those_weights(
    kind: str, narrow: Models, oracle: Any
) -> None:
    check_greedy(kind, narrow, oracle)


def test_only_the_thinkers_routed_experts_are_float8(narrow: Models, models: Models) -> None:
    narrow_names = {n for n, p in narrow.thinker.named_parameters() if p.dtype == FLOAT8}
    layers = narrow.config.thinker.text.num_layers
    parts = ("gate_up", "down")
    assert narrow_names == {
        f"model.layers.{i}.mlp.experts.{part}" for i in range(layers) for part in parts
    }
    same_bits(narrow.talker, models.talker)
    same_bits(narrow.code2wav, models.code2wav)
    full = dict(models.thinker.named_parameters())
    for name, p in narrow.thinker.named_parameters():
        assert name in narrow_names or torch.equal(p, full[name])
    assert all(e.scales is None for m in (narrow.talker, models.thinker) for e in mixtures(m))


def test_it_is_another_model_but_not_far_from_the_full_one(narrow: Models, models: Models) -> None:
    for ours, theirs in zip(mixtures(narrow.thinker), mixtures(models.thinker), strict=True):
        assert ours.scales is not None
        for q, scale, w in (
            (ours.gate_up, ours.scales[0], theirs.gate_up),
            (ours.down, ours.scales[1], theirs.down),
        ):
            error = (dequantize(q, scale) - w).norm() / w.norm()
            assert (
                0.01 < error < 0.04
            )  # three bits of mantissa: 2^-4 / sqrt(3) at most, and about 2/3 of that


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prompt_gives_the_same_answer(chunk: int, narrow: Models) -> None:
    prompt, options = make("audio+image", narrow.config), LIMITS.seeded(4)
    whole = list(Solo(narrow).run(prompt, options))
    cut = list(Solo(narrow).run(prompt, replace(options, prefill_chunk=chunk)))
    assert texts(cut) == texts(whole)
    np.testing.assert_array_equal(codes(cut), codes(whole))


def test_batched_equals_alone(narrow: Models) -> None:
    size = 5
    prompts = [make(KINDS[i % len(KINDS)], narrow.config, seed=i) for i in range(size)]
    options = [
        replace(
            LIMITS.seeded(i),
            text=SamplingParams(0.8 * (i % 2), seed=i),
            max_text_tokens=4 + i,
            speak=i != 2,
        )
        for i in range(size)
    ]
    together = list(Solo(narrow).run(prompts, options))
    for i in range(size):
        alone = list(Solo(narrow, block_size=8).run(prompts[i], options[i]))
        assert texts(together, i) == texts(alone)
        np.testing.assert_array_equal(codes(together, i), codes(alone))
        assert replace(done(together, i), request=0) == done(alone)


# ---- how it is loaded


def quantized(model: Thinker) -> Thinker:
    for e in mixtures(model):
        e.quantize()
    return model


@pytest.mark.parametrize("staging", [8, 3000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_while_loading_equals_loaded_then_quantised(
    staging: int,
    dtype: torch.dtype,
    tiny_dir: Path,
    tiny_config: OmniConfig,
    device: torch.device,
    tmp_path: Path,
) -> None:
    tensors = {
        n: t.to(dtype) for f in tiny_dir.glob("*.safetensors") for n, t in load_file(f).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = CheckpointFiles.open(tmp_path)
    configs = tiny_config, tiny_config.with_float8_experts()
    full, narrow = (build(lambda c=c: Thinker(c), device, dtype) for c in configs)  # type: ignore[misc]
    for model in (full, narrow):
        experts = {n: t for n, t in targets(model, "thinker.").items() if ".experts." in n}
        load(
            files,
            experts,
            [],
            progress=False,
            staging_bytes=staging if model is narrow else 1 << 20,
        )
    for a, b in zip(mixtures(narrow), mixtures(quantized(full)), strict=True):
        same_bits(a, b)


def test_dummy_weights_are_the_full_ones_quantised(
    tiny_config: OmniConfig, device: torch.device
) -> None:
    configs = tiny_config, tiny_config.with_float8_experts()
    full, narrow = (build(lambda c=c: Thinker(c), device, torch.bfloat16) for c in configs)  # type: ignore[misc]
    for model in (full, narrow):
        fill_dummy(model, 5)
    same_bits(narrow, quantized(full))


class Largest(TorchDispatchMode):
    """The most elements that any tensor made by any operation has, and of which type it is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.seen = max(self.seen, t.numel())
        return out


def test_wide_experts_are_never_there_all_at_once(tiny_dir: Path, tiny_config: OmniConfig) -> None:
    """While they are loaded, no tensor is made that is larger than one of the checkpoint's, or than
    all the scales."""
    files = CheckpointFiles.open(tiny_dir)
    model = build(lambda: Thinker(tiny_config.with_float8_experts()), "cpu", torch.float32)
    into = {n: t for n, t in targets(model, "thinker.").items() if isinstance(t, Float8Rows)}
    largest, scales = (
        max(t.numel() for t in into.values()),
        sum(len(t.scale) for t in into.values()),
    )
    with Largest() as made:
        load(files, into, [], progress=False, staging_bytes=2 * largest)
    assert 0 < made.seen <= max(2 * largest, scales)
    assert made.seen < sum(t.numel() for t in into.values()) / 8


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_named(bad: float, tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path / "bad")
    name = "thinker.model.layers.1.mlp.experts.3.up_proj.weight"
    [file] = [f for f in (tmp_path / "bad").glob("*.safetensors") if name in load_file(f)]
    tensors = load_file(file)
    tensors[name][2, 5] = bad
    save_file(tensors, file, {"format": "pt"})
    source = Source.open(tmp_path / "bad", progress=False, expert_weights="float8")
    with pytest.raises(CheckpointError) as e:
        source.thinker()
    assert (
        str(e.value) == f"{file}: tensor {name}: holds infinities or NaN, and cannot be made float8"
    )


def test_the_released_thinker_takes_half() -> None:
    c = parse(released_config())
    full, narrow = (
        estimate(
            {"thinker": lambda c=c: Thinker(c), "talker": lambda c=c: Talker(c)}, torch.bfloat16
        )  # type: ignore[misc]
        for c in (c, c.with_float8_experts())
    )
    moe, text = c.thinker.text.moe, c.thinker.text
    assert moe is not None
    rows = text.num_layers * moe.num_experts * (2 * moe.expert_size + text.hidden_size)
    numbers = text.num_layers * moe.num_experts * 3 * moe.expert_size * text.hidden_size
    assert full["thinker"] - narrow["thinker"] == numbers - 4 * rows
    assert narrow["talker"] == full["talker"]
    assert narrow["thinker"] < 33 << 30 < 59 << 30 < full["thinker"]


@pytest.mark.gpu
@pytest.mark.parametrize("staging", [3000, 1 << 20])
def test_a_gpu_quantises_to_the_same_bits(
    staging: int, tiny_dir: Path, tiny_config: OmniConfig
) -> None:
    files, config = CheckpointFiles.open(tiny_dir), tiny_config.with_float8_experts()
    here, there = (
        build(lambda: Thinker(config), where, torch.bfloat16) for where in ("cpu", "cuda")
    )
    for model in (here, there):
        experts = {n: t for n, t in targets(model, "thinker.").items() if ".experts." in n}
        load(files, experts, [], progress=False, staging_bytes=staging)
    for a, b in zip(mixtures(here), mixtures(there), strict=True):
        same_bits(a, b.cpu())


@pytest.mark.gpu
@pytest.mark.alone
def test_the_released_float8_thinker_is_filled_in_its_own_size() -> None:
    """One layer's wide weights at a time are all that comes on top."""
    module, size, took = fill_on_gpu(parse(released_config()).with_float8_experts(), extra=4 << 30)
    assert took < size + (2 << 30)
    assert all(e.scales is not None and e.scales[0].isfinite().all() for e in mixtures(module))

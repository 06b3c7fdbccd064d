"""Decoder layers by numpy, for few rows on a CPU: what the modules compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.kernels.reference import moe
from stretto.kernels.reference.paged import KVCache
from stretto.kernels.reference.sampling import _GOLDEN, _mix, counter_noise
from stretto.layers import numpy_decoder as by_host
from stretto.layers.config import DecoderConfig, MoeConfig
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.numpy_decoder import MAX_ROWS
from stretto.models.speech.code_predictor import FrameCache, FramePass

CPU = torch.device("cpu")
SHARED = MoeConfig(num_experts=4, top_k=2, expert_size=24, norm_topk=True, shared_size=16)
BARE = MoeConfig(num_experts=4, top_k=3, expert_size=24, norm_topk=False, shared_size=None)


def decoder(moe_: MoeConfig | None, section: tuple[int, int, int] | None = None) -> Decoder:
    c = DecoderConfig(64, 48, 3, 4, 2, 16, 1e-6, 1e4, section, 64, None if moe_ else 40, moe_)
    made = Decoder(c)
    generator = torch.Generator().manual_seed(3)
    for p in made.parameters():
        p.data.copy_(
            torch.randn(p.shape, generator=generator) * 0.3 + (1.0 if p.ndim == 1 else 0.0)
        )
    made.prepare(CPU)
    return made


def rows_of(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
@pytest.mark.parametrize("kind", [None, SHARED, BARE], ids=["dense", "shared expert", "experts"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_over_the_paged_cache(kind: MoeConfig | None, rows: int) -> None:
    model = decoder(kind, (3, 3, 2))
    host, seen = model.host, []
    assert host is not None
    found = []
    for used in (None, host):
        model.host = used
        cache = KVCache(3, 10, 2, 4, 16, CPU, torch.float32)
        paging = cache.page([([1 + 2 * r, 2 + 2 * r], 0, 6) for r in range(rows)])
        positions = torch.arange(6.0).repeat(rows).expand(3, -1)
        model(
            rows_of(1, 6 * rows), positions, PagedPass(cache, paging)
        )  # a prompt, of too many rows or by the modules
        step = cache.page([([1 + 2 * r, 2 + 2 * r], 6, 1) for r in range(rows)])
        x, watched = rows_of(2, rows), []
        out = model(
            x,
            torch.full((3, rows), 6.0),
            PagedPass(cache, step),
            lambda i, h, w=watched: w.append(h) or h + i,
        )
        found.append(out)
        seen.append(torch.stack(watched))
        assert torch.equal(x, rows_of(2, rows))  # what was given is not written to
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(seen[1], seen[0], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["by torch", "by numpy"])
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_large_and_small_matrices(
    small: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_host, "SMALL", small)
    weight, x = torch.randn(40, 48, generator=torch.Generator().manual_seed(1)), rows_of(5, rows)
    found = by_host.product(weight)(x.numpy())
    np.testing.assert_allclose(found, torch.nn.functional.linear(x, weight).numpy(), atol=2e-5)


@torch.inference_mode()
def test_a_frame_of_the_predictor() -> None:
    model = decoder(None)
    host = model.host
    found = []
    for used in (None, host):
        model.host = used
        cache = FrameCache(model.config, 2, 5, CPU, torch.float32)
        parts = [
            model(rows_of(1, 4), torch.tensor([0.0, 1.0]).repeat(2), FramePass(cache, 2, 0, 2))
        ]
        parts += [
            model(rows_of(i, 2), torch.full((2,), float(i)), FramePass(cache, 2, i, 1))
            for i in (2, 3, 4)
        ]
        found.append(torch.cat(parts))
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_results_outlive_the_next_step() -> None:
    model = decoder(SHARED)
    cache = FrameCache(model.config, 1, 4, CPU, torch.float32)
    first = model(rows_of(1, 1), torch.zeros(1), FramePass(cache, 1, 0, 1))
    kept = first.clone()
    model(rows_of(2, 1), torch.ones(1), FramePass(cache, 1, 1, 1))
    assert torch.equal(first, kept)


def test_only_where_it_pays() -> None:
    model = decoder(None)
    assert model.host is not None
    calls = []
    model.host = lambda *given: calls.append(len(given[0])) or given[0]  # type: ignore[assignment,func-returns-value]
    cache = FrameCache(model.config, MAX_ROWS + 1, 4, CPU, torch.float32)
    for rows in (MAX_ROWS, MAX_ROWS + 1):
        model(rows_of(0, rows), torch.zeros(rows), FramePass(cache, rows, 0, 1))
    assert calls == [MAX_ROWS]
    assert decoder_of(torch.bfloat16).host is None


def decoder_of(dtype: torch.dtype) -> Decoder:
    made = Decoder(DecoderConfig(64, 48, 1, 4, 2, 16, 1e-6, 1e4, None, 64, 40, None)).to(dtype)
    made.prepare(CPU)
    return made


def test_experts_one_by_one_are_the_gathered_ones() -> None:
    g = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(s, generator=g) for s in ((3, 8), (4, 12, 8), (4, 8, 6)))
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]])
    torch.testing.assert_close(moe._each(x, gate_up, down, ids), moe._few(x, gate_up, down, ids))


def test_noise_on_the_host_is_the_devices() -> None:
    g = torch.Generator().manual_seed(0)
    seed, draw = (
        torch.randint(-(2**62), 2**62, (6,), generator=g),
        torch.randint(0, 10_000, (6,), generator=g),
    )
    start = _mix(_mix(seed) + draw * _GOLDEN)[:, None]
    bits = _mix(start + torch.arange(700) * _GOLDEN)
    uniform = (((bits >> 40) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    assert torch.equal(counter_noise(seed, draw, 700), -uniform.clamp(max=1 - 2.0**-24).log())

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from stretto.kernels.reference.paged import KVCache, Paging, paged_attention
from stretto.kernels.triton.attention_prefill import attend, launch_for

Spans = Sequence[tuple[int, int]]  # (first query, queries) of each sequence


def starts_of(spans: Spans, device: torch.device, empty: int = 0) -> torch.Tensor:
    """Where each sequence's queries begin, with `empty` sequences of none behind."""
    ends = torch.tensor([n for _, n in spans] + [0] * empty).cumsum(0)
    return torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(device, torch.int32)


def paged(
    spans: Spans,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, Paging]:
    g = torch.Generator().manual_seed(seed)
    needed = [-(-(start + n) // block) for start, n in spans]
    cache = KVCache(1, sum(needed) + 1, kv_heads, block, dim, device, dtype)
    cache.data.copy_(torch.randn(cache.data.shape, generator=g))
    cache.data[:, :, 0] = float("nan")  # the sink: whoever reads it shows
    free = (torch.randperm(sum(needed), generator=g) + 1).tolist()
    tables = [[free.pop() for _ in range(n)] for n in needed]
    paging = cache.page([(t, start, n) for t, (start, n) in zip(tables, spans, strict=True)])
    q = torch.randn(sum(n for _, n in spans), heads, dim, generator=g).to(device, dtype)
    return q, cache.data[0], paging


def expected(q: torch.Tensor, cache: torch.Tensor, paging: Paging) -> torch.Tensor:
    clean = cache.clone()
    clean[:, 0] = 0  # the plain version multiplies what it masks
    return paged_attention(q.float(), clean.float(), paging)


def close(a: torch.Tensor, b: torch.Tensor, limit: float) -> None:
    error = float((a.float() - b.float()).norm() / b.float().norm())
    assert error < limit, f"relative error {error}"


MIXES: list[Spans] = [
    [(0, 1)],
    [(0, 5)],
    [(30, 1), (7, 1), (0, 1)],
    [(33, 1), (0, 17), (15, 2), (16, 16), (1, 40)],
    [(0, 16), (0, 32), (64, 64)],  # everything on a boundary
]


CASES = [(spans, 4, 2, torch.float32) for spans in MIXES]
CASES += [(MIXES[3], 8, 1, torch.float32), (MIXES[3], 6, 2, torch.float32)]
CASES += [(MIXES[2], 8, 1, torch.bfloat16), (MIXES[3], 4, 2, torch.bfloat16)]


@pytest.mark.parametrize(("spans", "heads", "kv_heads", "dtype"), CASES)
def test_a_mix_of_sequences_equals_the_plain_version(
    spans: Spans, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, cache, paging = paged(spans, heads, kv_heads, 16, 16, device, dtype, seed=len(spans))
    out = attend(q, cache, starts_of(spans, device), paging.lengths, paging.tables)
    close(out, expected(q, cache, paging), 1e-5 if dtype == torch.float32 else 1e-2)


MANY = [(n, 1) for n in range(0, 90, 3)]  # more tiles than programs


UNEVEN = [(200, 1), (90, 3), (0, 9), (47, 20)]


@pytest.mark.parametrize(
    ("spans", "splits"),
    [(UNEVEN, 4), *((spans, splits) for spans in (*MIXES, UNEVEN, MANY) for splits in (2, 8))],
)
def test_keys_in_splits_equal_the_plain_version(
    spans: Spans, splits: int, device: torch.device
) -> None:
    """Some tiles with one split and some with several; queries that see nothing of the last one."""
    q, cache, paging = paged(spans, 4, 2, 16, 16, device, torch.float32, seed=splits)
    launch = {"QUERIES": 8, "N": 16, "KEYS": 16, "SPLITS": splits}
    counters = torch.zeros(2 * len(q), dtype=torch.int32, device=device)
    for _ in range(2):
        out = attend(
            q, cache, starts_of(spans, device), paging.lengths, paging.tables, launch, counters
        )
        close(out, expected(q, cache, paging), 1e-5)
        assert not counters.any()  # for the next call


def test_few_rows_are_split_and_many_are_not() -> None:
    assert launch_for(32, 4, 128, 96)["SPLITS"] == 4
    assert launch_for(32, 4, 128, 16)["SPLITS"] == 8
    assert launch_for(32, 4, 128, 256)["SPLITS"] == 1


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_changes_nothing_and_comes_out_as_zeros(splits: int, device: torch.device) -> None:
    launch = {"N": 16, "KEYS": 16, "SPLITS": splits}
    spans = [(9, 1), (0, 11), (20, 6)]
    q, cache, paging = paged(spans, 8, 1, 16, 8, device, torch.float32, seed=3)
    alone = attend(q, cache, starts_of(spans, device), paging.lengths, paging.tables, launch)
    bad = torch.full((14, 8, 16), float("nan"), device=device)
    lengths = torch.cat((paging.lengths, torch.full((2,), 77, dtype=torch.int32, device=device)))
    tables = torch.cat((paging.tables, torch.zeros_like(paging.tables[:2])))
    out = attend(
        torch.cat((q, bad)), cache, starts_of(spans, device, empty=2), lengths, tables, launch
    )
    assert torch.equal(out[: len(q)], alone)
    assert not out[len(q) :].any()


def test_chunks_and_neighbours_do_not_matter(device: torch.device) -> None:
    """A prompt in one pass, in chunks, and beside others: the same rows, up to the order of
    sums."""
    q, cache, paging = paged([(0, 50)], 4, 2, 16, 16, device, torch.float32, seed=5)
    whole = attend(q, cache, starts_of([(0, 50)], device), paging.lengths, paging.tables)
    parts = []
    for start, stop in ((0, 1), (1, 16), (16, 33), (33, 50)):
        length = torch.tensor([stop], dtype=torch.int32, device=device)
        parts.append(
            attend(
                q[start:stop],
                cache,
                starts_of([(start, stop - start)], device),
                length,
                paging.tables,
            )
        )
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)
    both = torch.cat((q[49:], q[16:33]))
    lengths = torch.tensor([50, 33], dtype=torch.int32, device=device)
    mixed = attend(
        both, cache, starts_of([(49, 1), (16, 17)], device), lengths, paging.tables.repeat(2, 1)
    )
    torch.testing.assert_close(mixed, torch.cat((whole[49:], whole[16:33])), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 100)],
        [(0, 2500)],
        [(32_000, 300)],
        [(32_767, 1), (1000, 1), (5, 1), (0, 128), (1024, 512), (0, 2)],
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (16, 2)])
def test_real_sizes(spans: Spans, heads: int, kv_heads: int, device: torch.device) -> None:
    q, cache, paging = paged(spans, heads, kv_heads, 128, 16, device, torch.bfloat16, seed=1)
    for extra in (0, 29):
        lengths = torch.cat((paging.lengths, paging.lengths.new_zeros(extra)))
        tables = torch.cat((paging.tables, paging.tables.new_zeros(extra, paging.tables.shape[1])))
        out = attend(q, cache, starts_of(spans, device, empty=extra), lengths, tables)
        close(out, expected(q, cache, paging), 1e-2)

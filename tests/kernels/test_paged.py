import pytest
import torch

from stretto.kernels.reference.paged import KVCache, paged_attention, write_kv

HEADS, KV, DIM, BLOCK = 6, 2, 16, 4


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) positions, written out."""
    k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    place = torch.arange(len(k))
    scores = scores.masked_fill(place[None] > place[len(k) - len(q) :, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("left", [0.0, float("nan")], ids=["zeros", "bad numbers"])
@pytest.mark.parametrize("seed", range(6))
def test_any_cut_of_ragged_sequences_equals_dense_attention(seed: int, left: float) -> None:
    """Whatever others left in the cache."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (5,), generator=g).tolist()
    qs, ks, vs = ([torch.randn(n, h, DIM, generator=g) for n in lengths] for h in (HEADS, KV, KV))
    cache = KVCache(1, 60, KV, BLOCK, DIM, torch.device("cpu"), torch.float32)
    cache.data.fill_(left)
    free = (torch.randperm(59, generator=g) + 1).tolist()  # scattered blocks, never the sink
    tables = [[free.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
    done = [0] * 5
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        # a random chunk of each open sequence; those of one row go first, as the contract says
        cuts = {
            i: int(torch.randint(1, n - d + 1, (), generator=g))
            for i, (d, n) in enumerate(zip(done, lengths))
            if d < n
        }
        order = sorted(cuts, key=lambda i: cuts[i] != 1)
        paging = cache.page([(tables[i], done[i], cuts[i]) for i in order])
        part = [slice(done[i], done[i] + cuts[i]) for i in order]
        q, k, v = (
            torch.cat([t[i][s] for i, s in zip(order, part, strict=True)]) for t in (qs, ks, vs)
        )
        write_kv(cache.data[0], k, v, paging.slots)
        out = paged_attention(q, cache.data[0], paging)
        for i, rows in zip(order, out.split([cuts[i] for i in order]), strict=True):
            got[i].append(rows)
            done[i] += cuts[i]
    for i in range(5):
        torch.testing.assert_close(torch.cat(got[i]), dense(qs[i], ks[i], vs[i]), atol=2e-6, rtol=0)


def test_last_rows() -> None:
    cache = KVCache(1, 9, KV, BLOCK, DIM, torch.device("cpu"), torch.float32)
    paging = cache.page([([1], 2, 1), ([2], 0, 1), ([3, 4], 1, 4), ([5], 0, 3)])
    assert paging.last_rows == [0, 1, 5, 8]
    assert paging.num_decode == 2
    assert paging.prefills == ((4, 5), (3, 3))


def test_decoding_rows_must_come_first() -> None:
    cache = KVCache(1, 9, KV, BLOCK, DIM, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="before"):
        cache.page([([1], 0, 3), ([2], 0, 1)])

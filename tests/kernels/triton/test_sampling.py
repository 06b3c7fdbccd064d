"""The picks of the kernels are those of the reference, token for token: the noise is the same, so
nothing is left to chance but the rounding of a sum at the very border of top_p, which no seeded
case here sits on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from stretto.kernels.reference.sampling import sample
from stretto.kernels.triton import sampling as fast
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.stage.runner.columns import SamplingColumns, SamplingMode
from stretto.types import SamplingParams

ROWS, GROUPS, HIDDEN = 9, 16, 40
END = 100
ALWAYS = SamplingMode(sampled=True, penalty=True)
MANY = 10 if torch.cuda.is_available() else 1  # the interpreter takes its time


@dataclass
class Case:
    """Rows of a batch with all that their picks depend on."""

    logits: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    columns: SamplingColumns
    seen: torch.Tensor
    floor: torch.Tensor
    end: int

    @property
    def params(self) -> fast.Columns:
        return fast.Columns(self.columns.floats, self.columns.ints)

    @property
    def answer(self) -> fast.PickState:
        return fast.PickState(self.seen.clone(), self.floor, self.end)

    def scores(self) -> torch.Tensor:
        out = self.logits.float()
        early = self.positions + 1 < self.floor[self.rows]
        out[:, self.end] = out[:, self.end].masked_fill(early, float("-inf"))
        return out

    def only(self, i: int) -> Case:
        one = slice(i, i + 1)
        return replace(
            self, logits=self.logits[one], rows=self.rows[one], positions=self.positions[one]
        )


def case(
    params: list[SamplingParams], logits: torch.Tensor, seed: int, device: torch.device
) -> Case:
    rng = np.random.default_rng(seed)
    batch, size = logits.shape
    columns = SamplingColumns(ROWS, device)
    rows = rng.permutation(ROWS)[:batch]
    for row, p in zip(rows, params, strict=True):
        columns.write(int(row), p)
    end = int(logits[0].float().nan_to_num(0).argmax())  # the first row would love to end
    positions = rng.integers(0, 1000, batch)
    floor = np.zeros(ROWS, np.int64)
    floor[rows] = positions + rng.integers(0, 4, batch)
    return Case(
        logits=logits.to(device),
        rows=torch.from_numpy(rows).to(device),
        positions=torch.from_numpy(positions).to(device),
        columns=columns,
        seen=torch.from_numpy(rng.random((ROWS, size)) < 0.3).to(device),
        floor=torch.from_numpy(floor).to(device),
        end=end,
    )


def mixed(
    rng: np.random.Generator, size: int, batch: int, penalties: bool = True
) -> list[SamplingParams]:
    """Every kind of row: greedy, pure temperature, top_k, top_p, both."""

    def one() -> SamplingParams:
        return SamplingParams(
            temperature=float(rng.choice([0.0, 0.1, 0.7, 1.0, 3.0], p=[0.1, 0.1, 0.3, 0.3, 0.2])),
            top_k=int(rng.choice([0, 1, 5, 20, 50, 64, 65, 100, size - 1, size, 2 * size])),
            top_p=float(rng.choice([1.0, 0.99, 0.8, 0.5, 0.1])),
            repetition_penalty=float(rng.choice([1.0, 1.05, 1.3, 0.8])) if penalties else 1.0,
            seed=int(rng.integers(0, 2**63)),
        )

    return [one() for _ in range(batch)]


def random_logits(
    batch: int, size: int, seed: int, dtype: torch.dtype, spread: float = 3.0
) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, size, generator=gen) * spread).to(dtype)


def ending_logits(
    batch: int, size: int, seed: int, dtype: torch.dtype, spread: float = 3.0
) -> torch.Tensor:
    """Random logits whose first row has its best one at END. The end token is a constant of the
    kernels: another one in each case, and each would be compiled anew."""
    logits = random_logits(batch, size, seed, dtype, spread)
    best = int(logits[0].argmax())
    logits[0, [END, best]] = logits[0, [best, END]]
    return logits


def text_reference(c: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and marks, as the adapter makes them from the reference."""
    params = c.columns.pick(c.rows, ALWAYS)
    tokens = sample(c.scores(), params, c.positions + 1, seen=c.seen[c.rows])
    seen = c.seen.clone()
    seen[c.rows, tokens] = True
    return tokens, seen


def check_text(c: Case) -> list[int]:
    want, seen = text_reference(c)
    answer, next = c.answer, torch.full((ROWS,), -7, device=c.logits.device)
    got = fast.pick_text(c.logits, c.rows, c.positions, c.params, answer, next)
    assert got.tolist() == want.tolist()
    assert next[c.rows].tolist() == want.tolist()
    assert (next == -7).sum() == ROWS - len(c.rows)
    assert torch.equal(answer.seen, seen)
    return got.tolist()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks even of a small vocabulary."""

    def config(kernel: str, key: tuple[int, ...], default: dict[str, int]) -> dict[str, int]:
        return default | {"block": 256} if kernel == "pick_text" else default

    monkeypatch.setattr(fast, "config", config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_blocks")
def test_text_is_the_references(device: torch.device, dtype: torch.dtype) -> None:
    """Blocks of 256: some rows are decided among candidates, others (flat, or much of them kept)
    need all logits."""
    rng = np.random.default_rng(1)
    for seed in range(6 * MANY):
        size = [2000, 257, 1024][seed % 3]
        logits = ending_logits(3, size, seed, dtype, spread=[3.0, 0.5, 8.0][seed // 2 % 3])
        check_text(case(mixed(rng, size, 3), logits, seed, device))


@pytest.mark.usefixtures("small_blocks")
def test_masked_text_is_the_references(device: torch.device) -> None:
    """Most blocks have no token that may be picked: as a grammar leaves it."""
    rng = np.random.default_rng(4)
    for seed in range(2 * MANY):
        size = [600, 1024][seed % 2]
        c = case(mixed(rng, size, 3), random_logits(3, size, seed, torch.bfloat16), seed, device)
        c.floor[:] = 0
        allowed = torch.zeros(3, size, dtype=torch.bool, device=device)
        for row in range(3):
            allowed[
                row, torch.from_numpy(rng.choice(size, [1, 5, 40][row], replace=False)).to(device)
            ] = True
        c.logits.masked_fill_(~allowed, float("-inf"))
        got = check_text(c)
        assert all(allowed[i, t] for i, t in enumerate(got))


def test_text_at_the_shipped_block_size(device: torch.device) -> None:
    rng = np.random.default_rng(2)
    size = 10_000  # three blocks
    params = [
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=1),
        SamplingParams(temperature=1.0, top_k=50, repetition_penalty=1.1, seed=2),
        SamplingParams(temperature=0.6, top_p=0.9, seed=3),
        *mixed(rng, size, 2),
    ]
    check_text(case(params, random_logits(5, size, 5, torch.bfloat16), 5, device))


@pytest.mark.usefixtures("small_blocks")
def test_rows_are_picked_as_if_alone(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    c = case(mixed(rng, 700, 5), random_logits(5, 700, 3, torch.bfloat16), 3, device)
    together = check_text(c)
    assert together == [check_text(c.only(i))[0] for i in range(5)]


@pytest.mark.parametrize("tied", [60, 300])
@pytest.mark.usefixtures("small_blocks")
def test_ties_beyond_what_a_block_can_hold(device: torch.device, tied: int) -> None:
    """All of them are kept by top_k, wherever they lie; top_p drops the first ones."""
    logits = random_logits(1, 900, 4, torch.float32).clamp(max=4)
    places = torch.randperm(900, generator=torch.Generator().manual_seed(4))[:tied]
    logits[0, places] = 5.0
    picked = set()
    for seed in range(12):
        top_k, top_p = [(3, 1.0), (1, 0.7), (0, 0.3)][seed % 3]
        p = SamplingParams(temperature=0.5, top_k=top_k, top_p=top_p, seed=seed)
        picked.update(check_text(case([p], logits, seed, device)))
    assert picked <= set(places.tolist())
    assert len(picked) > 6


def test_equal_logits_and_a_share_of_them(device: torch.device) -> None:
    """With 64 equal logits and top_p 1/4, the last 16 survive (all sums are exact here)."""
    p = [SamplingParams(temperature=1.0, top_p=0.25, seed=s) for s in range(9)]
    c = case(p, torch.zeros(9, 64), 0, device)
    c.floor[:] = 0
    c.seen[:] = False
    tokens = check_text(c)
    assert min(tokens) >= 48
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_logits_give_no_token(device: torch.device, dtype: torch.dtype) -> None:
    logits = random_logits(6, 300, 6, dtype)
    logits[0, 7] = float("nan")
    logits[1, 299] = float("inf")
    logits[2] = float("-inf")
    logits[3, :299] = float("-inf")  # one is left: fine
    logits[4] = float("nan")
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=0.9) for t in (0.0, 1.0) for k in (0, 3, 400)
    ]
    c = case(params, logits, 6, device)
    c.floor[:] = 0
    next = torch.full((ROWS,), -7, device=device)
    got = fast.pick_text(c.logits, c.rows, c.positions, c.params, c.answer, next).tolist()
    assert [t < 0 for t in got] == [True, True, True, False, True, False]
    assert got[3] == 299
    assert (
        (next[c.rows] >= 0) & (next[c.rows] < 300)
    ).all()  # the next step must be able to look it up
    out = frame_out(6, device)
    table, x = torch.ones(300, HIDDEN, device=device), torch.empty(6, HIDDEN, device=device)
    suppress = torch.zeros(300, dtype=torch.bool, device=device)
    fast.pick_code0(c.logits, c.rows, c.positions, c.params, c.answer, suppress, table, x, out)
    assert (out.codes[:, 0] < 0).tolist() == [True, True, True, False, True, False]
    fast.pick_residual(c.logits, c.rows, c.positions, c.params, 3, table, x, out)
    assert (out.codes[:, 3] < 0).tolist() == [True, True, True, False, True, False]


def frame_out(batch: int, device: torch.device) -> fast.FrameOut:
    """Poisoned."""
    codes = torch.full((batch, GROUPS), -99, device=device)
    return fast.FrameOut(codes, torch.full((batch, HIDDEN), float("nan"), device=device))


def table_of(size: int, seed: int, device: torch.device) -> torch.Tensor:
    return random_logits(size, HIDDEN, seed, torch.bfloat16, 1.0).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code0_is_the_references(device: torch.device, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(7)
    for seed in range(4 * MANY):
        size = [300, 128][seed % 2]
        params = [
            SamplingParams(0.9, 50, 1.0, 1.05),
            *mixed(rng, size, 3),
        ]  # as the released talker draws, and others
        c = case(params, ending_logits(4, size, 50 + seed, dtype), seed, device)
        suppress = torch.zeros(size, dtype=torch.bool, device=device)
        suppress[-40:] = True
        suppress[c.end] = False
        c.logits[:, -1] = 30.0  # tempting, and forbidden
        rows = c.columns.pick(c.rows, ALWAYS)
        want = sample(
            c.scores(), rows, (c.positions + 1) * GROUPS, seen=c.seen[c.rows], suppress=suppress
        )
        seen = c.seen.clone()
        seen[c.rows, want] = True

        table, out, answer = table_of(size, seed, device), frame_out(4, device), c.answer
        x = torch.full((4, 2, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
        fast.pick_code0(
            c.logits, c.rows, c.positions, c.params, answer, suppress, table, x[:, 1], out
        )
        assert out.codes[:, 0].tolist() == want.tolist()
        assert (out.codes[:, 1:] == -99).all()
        assert torch.equal(answer.seen, seen)
        assert torch.equal(x[:, 1], table[want])
        assert x[:, 0].isnan().all()
        assert torch.equal(out.total, table[want].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_codes_are_the_references(device: torch.device, dtype: torch.dtype) -> None:
    """A whole frame: codes, the inputs they become, and their sum."""
    rng = np.random.default_rng(8)
    size = 256
    for seed in range(MANY):
        c = case(
            [RESIDUAL, *mixed(rng, size, 1, penalties=False)],
            random_logits(2, size, seed, dtype),
            seed,
            device,
        )
        rows = c.columns.pick(c.rows, ALWAYS)
        out = frame_out(2, device)
        embedding = torch.full((ROWS, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
        first = table_of(2, 99 + seed, device)
        out.total.copy_(first)
        total = first.float()
        for group in range(1, GROUPS):
            logits = random_logits(2, size, 100 * seed + group, dtype, spread=1 + group / 4).to(
                device
            )
            table = table_of(size, group, device)
            want = sample(logits, rows, (c.positions + 1) * GROUPS + group)
            total += table[want]
            if group < GROUPS - 1:
                x = torch.full((2, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
                fast.pick_residual(logits, c.rows, c.positions, c.params, group, table, x, out)
                assert torch.equal(x, table[want])
                assert torch.equal(out.total, total)
            else:
                fast.pick_last(logits, c.rows, c.positions, c.params, group, table, embedding, out)
            assert out.codes[:, group].tolist() == want.tolist(), group
        assert (out.codes[:, 0] == -99).all()
        assert torch.equal(embedding[c.rows], total.to(torch.bfloat16))
        assert embedding.isnan().any(1).sum() == ROWS - 2


@pytest.mark.parametrize("tied", [90, 200])
def test_more_tied_codes_than_a_shortlist_holds(device: torch.device, tied: int) -> None:
    logits = random_logits(4, 2048, 11, torch.bfloat16).clamp(max=4)
    places = torch.randperm(2048, generator=torch.Generator().manual_seed(tied))[:tied]
    logits[:, places] = 5.0
    params = [
        SamplingParams(temperature=1.0, top_k=k, top_p=p, seed=3)
        for k, p in ((2, 1.0), (1, 0.5), (50, 0.8), (0, 0.02))
    ]
    c = case(params, logits, 11, device)
    out, x = frame_out(4, device), torch.empty(4, HIDDEN, dtype=torch.bfloat16, device=device)
    for group in range(1, 4):
        want = sample(c.logits, c.columns.pick(c.rows, ALWAYS), (c.positions + 1) * GROUPS + group)
        fast.pick_residual(
            c.logits, c.rows, c.positions, c.params, group, table_of(2048, 1, device), x, out
        )
        assert out.codes[:, group].tolist() == want.tolist()
    assert set(out.codes[:3, 1:4].flatten().tolist()) <= set(places.tolist())
    assert out.codes[:3, 1:4].unique().numel() > 5


def seed_with_largest_bits(index: int) -> int:
    """A seed whose noise at `index` of draw 0 comes from 24 ones: splitmix64 run backwards."""
    mask = (1 << 64) - 1

    def unshift(x: int, n: int) -> int:
        y = x
        for _ in range(64 // n):
            y = x ^ (y >> n)
        return y

    def unmix(x: int) -> int:
        x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        return unshift(x, 30)

    start = (unmix(mask) - index * 0x9E3779B97F4A7C15) & mask
    return unmix(unmix(start))


def test_the_largest_bits_are_noise_like_any_other(device: torch.device) -> None:
    """24 ones round up to 1, whose logarithm is no noise: a token that was dropped must not win by
    0 / 0, and one that was kept must win (it has the smallest noise of all)."""
    index = 200
    p = SamplingParams(temperature=1.0, top_k=5, seed=seed_with_largest_bits(index))
    for value, wins in ((-10.0, False), (10.0, True)):
        logits = random_logits(1, 300, 9, torch.float32)
        logits[0, index] = value
        c = case([p], logits, 9, device)
        c.floor[:] = 0
        c.seen[:] = False
        c.positions[:] = -1  # draw 0
        assert (check_text(c) == [index]) == wins


def steps(size: int, index: int, rank: int) -> torch.Tensor:
    """Logits that fall in small even steps, in random order, with `index` at a rank (0: the
    best)."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size + rank))
    ranks = torch.empty(size, dtype=torch.int64).scatter_(0, order, torch.arange(size))
    there = int(order[rank])
    ranks[there], ranks[index] = ranks[index].clone(), rank
    return (ranks * -(2.0**-10))[None]


@pytest.mark.parametrize(("size", "rank"), [(900, 0), (900, 19), (900, 300), (4200, 4100)])
@pytest.mark.usefixtures("small_blocks")
def test_the_borders_are_exact(device: torch.device, size: int, rank: int) -> None:
    """A token whose noise beats all others is picked if it is the last to be kept, and not if it is
    the first to be dropped; on every path, be it text or code."""
    index = 123
    logits = steps(size, index, rank).to(device)
    mass = (torch.arange(size) * -(2.0**-10)).double().softmax(0)
    middle = float(mass[:rank].sum() + mass[rank] / 2)
    kept = {"top_k": rank + 1}, {"top_p": middle}, {"top_k": rank + 1, "top_p": 0.999999}
    dropped = (
        {"top_k": rank},
        {"top_p": middle - float(mass[rank])},
        {"top_k": 0, "top_p": middle * 0.9},
    )
    table, out = table_of(size, 0, device), frame_out(1, device)
    x = torch.empty(1, HIDDEN, dtype=torch.bfloat16, device=device)
    for wins, truncations in ((True, kept), (False, dropped if rank else ())):
        for truncation in truncations:
            p = SamplingParams(temperature=1.0, seed=seed_with_largest_bits(index), **truncation)
            c = case([p], logits, 1, device)
            c.floor[:] = 0
            c.positions[:] = -1
            assert (check_text(c) == [index]) == wins, truncation
            fast.pick_residual(c.logits, c.rows, c.positions, c.params, 0, table, x, out)
            assert (out.codes[:, 0].tolist() == [index]) == wins, truncation


def test_ties_are_dropped_in_order_across_a_whole_row(device: torch.device) -> None:
    """Three values over more ids than are read at once: of those at the border, exactly the first
    ones go."""
    size, top_p = 9000, 0.8
    logits = torch.randint(0, 3, (2, size), generator=torch.Generator().manual_seed(12)).float()
    c = case(
        [SamplingParams(temperature=2.0, top_p=top_p, seed=s) for s in range(2)], logits, 12, device
    )
    c.seen[:] = False
    check_text(c)
    for row, seed in ((0, 0), (1, 1)):  # and the first to stay would have been picked
        warm = logits[row].double() / 2
        rising, order = warm.sort(stable=True)
        first = int((rising.softmax(0).cumsum(0) <= 1 - top_p).sum())
        for offset in (-1, 0):
            index = int(order[first + offset])
            p = SamplingParams(temperature=2.0, top_p=top_p, seed=seed_with_largest_bits(index))
            one = case([p], logits[row : row + 1], seed, device)
            one.floor[:] = 0
            one.seen[:] = False
            one.positions[:] = -1
            next = torch.zeros(ROWS, dtype=torch.int64, device=device)
            got = fast.pick_text(one.logits, one.rows, one.positions, one.params, one.answer, next)
            assert (got.tolist() == [index]) == (offset == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_sizes(device: torch.device) -> None:
    rng = np.random.default_rng(10)
    for seed in range(20):
        size = 152_064
        check_text(
            case(mixed(rng, size, 8), ending_logits(8, size, seed, torch.bfloat16), seed, device)
        )
    for seed in range(20):
        c = case(
            [RESIDUAL, *mixed(rng, 2048, 7, False)],
            random_logits(8, 2048, seed, torch.bfloat16),
            seed,
            device,
        )
        out = frame_out(8, device)
        x = torch.empty(8, HIDDEN, dtype=torch.bfloat16, device=device)
        fast.pick_residual(
            c.logits, c.rows, c.positions, c.params, 4, table_of(2048, seed, device), x, out
        )
        want = sample(c.logits, c.columns.pick(c.rows, ALWAYS), (c.positions + 1) * GROUPS + 4)
        assert out.codes[:, 4].tolist() == want.tolist()

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stretto.errors import Bug
from stretto.stage.request import OPAQUE, BlockId, RequestSpec, Salt, StageRequest
from stretto.stage.scheduler.blocks import BlockPool
from stretto.stage.scheduler.prefix import chain_keys, prefix_keys
from stretto.types import RequestId, Span
from tests.stage.invariants import check_pool
from tests.stage.pools import clear_cache, num_held


def keys_of(
    ids: list[int], *salts: Salt, root: bytes = b"", size: int = 4, rows: int = 1000
) -> list[bytes]:
    request = StageRequest(RequestSpec(RequestId("r"), 1, cache_root=root), 0)
    request.add_input(ids, salts)
    chain_keys(request, rows, size)
    return [key for key, _ in request.keys]


IDS = [5, 6, 7, 8, 9, 10, 11, 12]


def test_equal_rows_have_equal_keys_and_a_key_tells_all_before_it() -> None:
    assert keys_of(IDS) == keys_of(list(IDS))
    first, second = keys_of(IDS)
    other = keys_of([0, *IDS[1:]])
    assert first != other[0]
    assert second != other[1]  # same rows in the block, another prefix


def test_partial_blocks_and_rows_after_an_opaque_one_have_no_key() -> None:
    assert len(keys_of(IDS[:7])) == 1
    assert len(keys_of([*IDS, OPAQUE, 1, 2, 3, 4, 5, 6, 7])) == 2
    assert len(keys_of([*IDS[:3], OPAQUE, *IDS])) == 0
    assert len(keys_of(IDS, rows=7)) == 1


@pytest.mark.parametrize(
    "other",
    [
        keys_of(IDS, Salt(Span(1, 4), b"y")),
        keys_of(IDS, Salt(Span(2, 4), b"x")),
        keys_of(IDS, Salt(Span(1, 3), b"x")),
        keys_of(IDS, Salt(Span(1, 2), b"x"), Salt(Span(2, 4), b"x")),
        keys_of(IDS, root=b"another voice"),
    ],
)
def test_media_their_place_and_the_root_are_part_of_the_key(other: list[bytes]) -> None:
    mine = keys_of(IDS, Salt(Span(1, 4), b"x"))
    assert mine[0] != keys_of(IDS)[0]
    assert not set(mine) & set(other)


def test_a_salt_in_a_later_block_leaves_earlier_keys_alone() -> None:
    mine, plain = keys_of(IDS, Salt(Span(5, 6), b"x")), keys_of(IDS)
    assert mine[0] == plain[0]
    assert mine[1] != plain[1]


def test_keys_do_not_depend_on_when_they_are_computed() -> None:
    request = StageRequest(RequestSpec(RequestId("r"), 1), 0)
    salt = Salt(Span(2, 7), b"x")
    request.add_input(IDS[:5], [salt])
    chain_keys(request, 5, 4)
    request.add_input(IDS[5:], [])
    chain_keys(request, 8, 4)
    assert [key for key, _ in request.keys] == keys_of(IDS, salt)
    assert [media for _, media in request.keys] == [True, True]


def test_prefix_keys_see_everything_before_their_end_only() -> None:
    salt, later = Salt(Span(1, 3), b"x"), Salt(Span(6, 8), b"z")
    one, two = prefix_keys(IDS, [salt, later])
    assert prefix_keys([*IDS[:3], 99], [salt]) == [one]
    assert prefix_keys([99, *IDS[1:]], [salt])[0] != one
    assert prefix_keys(IDS, [Salt(Span(1, 3), b"y"), later])[1] != two
    assert prefix_keys(IDS, [Salt(Span(1, 2), b"x"), later])[1] != two
    between = prefix_keys([*IDS[:4], 99, *IDS[5:]], [salt, later])
    assert between[0] == one
    assert between[1] != two


def test_eviction_is_by_last_use_and_from_the_end_of_a_prefix() -> None:
    pool = BlockPool(4)
    one, two = pool.take(2), pool.take(2)
    for i, block in enumerate(one + two):
        pool.publish(block, bytes([i]), False)
    pool.release(two)
    pool.release(one)
    assert len(pool.cached) == 4
    assert pool.take(1) == [two[1]]
    pool.hold(pool.find([(bytes([2]), False)]))
    pool.release([two[0]])  # used again: now the youngest
    assert pool.take(2) == [one[1], one[0]]
    assert pool.find([(bytes([0]), False)]) == []
    assert pool.find([(bytes([2]), False)]) == [two[0]]
    check_pool(pool)


def test_finding_stops_at_the_first_gap_and_at_a_missing_payload() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for i, block in enumerate(blocks):
        assert pool.publish(block, bytes([i]), False)
    keys = [bytes([i]) for i in range(3)]
    assert pool.find([(k, False) for k in keys]) == blocks
    assert pool.find([(keys[0], False), (b"?", False), (keys[2], False)]) == blocks[:1]
    assert pool.find([(keys[0], False), (keys[1], True), (keys[2], False)]) == blocks[:1]
    pool.attach(blocks[1], keys[1], "rows")
    assert pool.find([(keys[0], False), (keys[1], True), (keys[2], False)]) == blocks
    pool.attach(blocks[1], keys[1], "others")
    pool.attach(blocks[1], b"?", "others")
    assert pool.payloads == {blocks[1]: "rows"}
    pool.release(blocks)
    pool.take(3)
    assert not pool.payloads
    pool.attach(blocks[0], keys[0], "late")
    assert not pool.payloads, "evicted since"


def test_a_block_with_payload_replaces_an_equal_one_without() -> None:
    pool = BlockPool(4)
    plain, rich, late = pool.take(3)
    assert pool.publish(plain, b"k", False)
    assert not pool.publish(late, b"k", False)
    assert pool.publish(rich, b"k", True)
    assert pool.find([(b"k", False)]) == [rich]
    pool.attach(rich, b"k", "rows")
    assert not pool.publish(late, b"k", True)
    pool.release([plain, rich, late])
    assert (len(pool.cached), pool.num_available) == (1, 4)
    check_pool(pool, [0] * 4)


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(Bug):
        pool.take(2)
    pool.release([block])
    with pytest.raises(Bug):
        pool.release([block])
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block, b"a", False)
    with pytest.raises(Bug):
        pool.publish(block, b"b", False)
    with pytest.raises(AssertionError):
        check_pool(pool, [0, 0])


NAMES = ["take", "hold", "release", "publish", "attach", "clear"]
commands = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 99)))


@given(st.integers(1, 6), commands)
def test_blocks_are_conserved(total: int, commands: list[tuple[str, int]]) -> None:
    pool = BlockPool(total)
    held: list[BlockId] = []
    for i, (name, n) in enumerate(commands):
        block = held[n % len(held)] if held else None
        key = bytes([n % 5])
        match name:
            case "take" if pool.num_available:
                held += pool.take(1 + n % pool.num_available)
            case "hold":
                found = pool.find([(key, bool(n % 2))])
                pool.hold(found)
                held += found
            case "release" if block is not None:
                held.remove(block)
                pool.release([block])
            case "publish" if block is not None and pool.keys[block] is None:
                pool.publish(block, key, bool(n % 2))
            case "attach" if block is not None:
                pool.attach(block, key, i)
            case "clear" if n < 10:
                clear_cache(pool)
        refs = Counter(held)
        check_pool(pool, [refs[BlockId(b)] for b in range(total)])
        assert num_held(pool) == len(refs)
    pool.release(held)
    clear_cache(pool)
    assert pool.num_available == total
    assert not pool.payloads

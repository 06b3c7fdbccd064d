"""Shares of a bounded whole: half is the most for one owner, and a newcomer always finds room."""

from __future__ import annotations

import random

import pytest

from stretto.server.heap import BUSY_BYTES, QUIET_BYTES, Trimmer
from stretto.server.shares import Holding, Shares, client_of_address


def fill(shares: Shares, owner: str, piece: int) -> int:
    while shares.take(owner, piece):
        pass
    return shares.of(owner)


def test_one_owner_has_half_and_each_newcomer_half_of_the_rest() -> None:
    shares = Shares(1024)
    assert [fill(shares, owner, 1) for owner in "abcd"] == [512, 256, 128, 64]
    shares.give_back("a", 512)
    assert fill(shares, "b", 1) == 416, "what is left over may be used by anybody"
    assert shares.held == shares.limit - shares.free == 416 + 128 + 64


def test_owners_that_grow_together_have_equal_parts() -> None:
    shares = Shares(1200)
    for _ in range(600):
        for owner in "abc":
            shares.take(owner, 1)
    assert [shares.of(owner) for owner in "abc"] == [300, 300, 300]


def test_the_largest_thing_fits_where_nothing_else_is_held() -> None:
    shares = Shares(512, floor=64)
    assert fill(shares, "a", 64) == 256
    assert [fill(shares, owner, 64) for owner in "bcd"] == [128, 64, 0], (
        "the last part is for small things"
    )
    assert shares.take("e", 8)
    shares.give_back("c", 64)
    assert shares.take("d", 64)
    assert not shares.take("d", 64)
    alone = Shares(64, floor=64)
    assert alone.take("a", 64), "the floor may be the whole"
    assert not alone.take("b", 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_whole_is_never_exceeded_and_all_comes_back(seed: int) -> None:
    rng, shares = random.Random(seed), Shares(1000, floor=100)
    held: list[tuple[str, int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.4:
            owner, size = held.pop(rng.randrange(len(held)))
            shares.give_back(owner, size)
        else:
            owner, size = rng.choice("abcdef"), rng.randrange(1, 120)
            if shares.take(owner, size):
                held.append((owner, size))
        assert 0 <= shares.held <= shares.limit
        assert shares.held == sum(size for _, size in held)
        assert all(shares.of(o) <= 500 for o in "abcdef")
    for owner, size in held:
        shares.give_back(owner, size)
    assert shares.held == 0
    assert not [o for o in "abcdef" if f"'{o}'" in repr(shares)], (
        "an owner that holds nothing is forgotten"
    )


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2::3", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::3", "2001:db8:1:3::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.8", "192.0.2.8"),
        ("", ""),
        ("unknown", "unknown"),
    ],
)
def test_addresses_of_one_network_are_one_owner(address: str, owner: str) -> None:
    assert client_of_address(address) == owner


def test_a_holding_grows_shrinks_and_changes_its_owner() -> None:
    shares = Shares(100)
    one, other = Holding(shares, "a"), Holding(shares, "b")
    one.resize(40)
    assert (one.fits(50), one.fits(51)) == (True, False)
    one.belong_to("b")
    assert (shares.of("a"), shares.of("b")) == (0, 40)
    assert not other.fits(20)
    one.close()
    assert other.fits(20)
    assert shares.held == 0
    assert shares.returned == 80, "counted when it changed hands too"


def test_the_heap_is_trimmed_when_much_was_freed_or_nothing_more_is() -> None:
    freed = 0
    trimmer = Trimmer(lambda: freed)
    seen = []
    for more in (
        0,
        QUIET_BYTES,
        0,
        0,
        QUIET_BYTES - 1,
        0,
        1,
        0,
        BUSY_BYTES,
        BUSY_BYTES,
        BUSY_BYTES - 1,
        0,
        0,
    ):
        freed += more
        seen.append(trimmer.due())
    assert seen == [
        False,
        False,
        True,
        False,
        False,
        False,
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]

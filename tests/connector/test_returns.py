"""Slots that come back by a word in shared memory: against a model, in every order of the two sides' steps."""

from __future__ import annotations

import itertools
import mmap
import random
from collections.abc import Callable, Iterator

import pytest

from stretto.connector.notes import Hangup, Kind
from stretto.connector.returns import Returns
from stretto.types import RequestId

GENERATION = 3


def both(slots: int) -> tuple[Returns, Returns]:
    """The sender's and the receiver's view of the same words."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return Returns(memory, slots, GENERATION), Returns(memory, slots, GENERATION)


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_back_is_what_was_given_back_once(seed: int) -> None:
    chance = random.Random(seed)
    slots = chance.choice([1, 2, 5, 256])
    sender, receiver = both(slots)
    free, there, told = list(range(slots)), [], []
    for seq in range(400):
        if free and chance.random() < 0.6:
            slot = free.pop(chance.randrange(len(free)))
            sender.flight[slot] = (seq, RequestId(f"r{seq}"))
            there.append((slot, seq))
        while there and chance.random() < 0.4:
            slot, gone = there.pop(chance.randrange(len(there)))
            kind = chance.choice([Kind.RELEASE, Kind.REFUSE])
            assert not receiver.give_back(kind, slot, gone), "nobody asked to be rung"
            told.append((int(kind), slot, gone, 0, GENERATION))
        if chance.random() < 0.5:
            news = sender.news()
            assert sorted(news) == sorted(told)
            told.clear()
            for _kind, slot, *_ in news:
                del sender.flight[slot]
                free.append(slot)
            assert sender.news() == []


def interleavings(
    ours: list[Callable[[], None]], theirs: list[Callable[[], None]]
) -> Iterator[list[Callable[[], None]]]:
    """Every way to merge the two orders."""
    for places in itertools.combinations(range(len(ours) + len(theirs)), len(ours)):
        left, right = iter(ours), iter(theirs)
        yield [next(left) if at in places else next(right) for at in range(len(ours) + len(theirs))]


def test_a_return_is_seen_or_rung_for_in_every_order() -> None:
    """The sender asks, then looks; the receiver writes, then looks for the question: no order leaves both unaware."""
    orders = len(list(interleavings(*halves(*both(1), [], []))))
    assert orders == 6
    for number in range(orders):
        sender, receiver = both(1)
        sender.flight[0] = (0, RequestId("r"))
        seen: list[bool] = []
        rung: list[bool] = []
        for step in list(interleavings(*halves(sender, receiver, seen, rung)))[number]:
            step()
        assert seen[0] or rung[0]


def halves(
    sender: Returns, receiver: Returns, seen: list[bool], rung: list[bool]
) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
    """What each side does, in the order in which it does it: `ask` and `news`, and the two halves of `give_back`."""
    return (
        [lambda: sender.ask(True), lambda: seen.append(bool(sender.news()))],
        [lambda: write_word(receiver, 0, 0), lambda: rung.append(bool(receiver.words[1]))],
    )


def write_word(receiver: Returns, slot: int, seq: int) -> None:
    """The first half of `give_back`."""
    receiver.words[slot] = 2 * seq + 2


def test_one_ring_for_one_question() -> None:
    sender, receiver = both(3)
    sender.flight |= {slot: (slot, RequestId("r")) for slot in range(3)}
    sender.ask(True)
    assert [receiver.give_back(Kind.RELEASE, slot, slot) for slot in range(3)] == [True, False, False]
    sender.ask(True)
    sender.ask(False)
    assert not receiver.give_back(Kind.RELEASE, 0, 0)


def test_a_receiver_that_gives_back_what_it_was_not_sent_is_hung_up_on() -> None:
    sender, receiver = both(2)
    sender.flight[1] = (7, RequestId("r"))
    receiver.give_back(Kind.RELEASE, 1, 6)
    assert sender.news() == [], "the word of the chunk before, late"
    receiver.give_back(Kind.RELEASE, 1, 8)
    with pytest.raises(Hangup, match="seq 8"):
        sender.news()

"""Slots returned by a word in shared memory: against a model, in every order of the two sides'
steps."""

from __future__ import annotations

import itertools
import mmap
import random
from collections.abc import Callable, Iterator

import pytest

from stretto.transport.notes import Hangup, Kind
from stretto.transport.returns import Returns
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
            assert not receiver.give_back(kind, slot, gone), "the wake flag is clear"
            told.append((int(kind), slot, gone, 0, GENERATION))
        if chance.random() < 0.5:
            notes = sender.returned()
            assert sorted(notes) == sorted(told)
            told.clear()
            for _kind, slot, *_ in notes:
                del sender.flight[slot]
                free.append(slot)
            assert sender.returned() == []


def interleavings(
    ours: list[Callable[[], None]], theirs: list[Callable[[], None]]
) -> Iterator[list[Callable[[], None]]]:
    """Every way to merge the two orders."""
    for places in itertools.combinations(range(len(ours) + len(theirs)), len(ours)):
        left, right = iter(ours), iter(theirs)
        yield [next(left) if at in places else next(right) for at in range(len(ours) + len(theirs))]


def test_a_return_is_seen_or_wakes_in_every_order() -> None:
    """The sender sets the flag, then reads the words; the receiver writes the word, then reads the
    flag: in no order does each miss the other."""
    orders = len(list(interleavings(*halves(*both(1), [], []))))
    assert orders == 6
    for number in range(orders):
        sender, receiver = both(1)
        sender.flight[0] = (0, RequestId("r"))
        seen: list[bool] = []
        woken: list[bool] = []
        for step in list(interleavings(*halves(sender, receiver, seen, woken)))[number]:
            step()
        assert seen[0] or woken[0]


def halves(
    sender: Returns, receiver: Returns, seen: list[bool], woken: list[bool]
) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
    """Each side's steps in its order: `set_wake` and `returned`; and the two halves of
    `give_back`."""
    return (
        [lambda: sender.set_wake(True), lambda: seen.append(bool(sender.returned()))],
        [lambda: write_word(receiver, 0, 0), lambda: woken.append(bool(receiver.words[1]))],
    )


def write_word(receiver: Returns, slot: int, seq: int) -> None:
    """The first half of `give_back`."""
    receiver.words[slot] = 2 * seq + 2


def test_one_wake_up_for_one_flag() -> None:
    sender, receiver = both(3)
    sender.flight |= {slot: (slot, RequestId("r")) for slot in range(3)}
    sender.set_wake(True)
    assert [receiver.give_back(Kind.RELEASE, slot, slot) for slot in range(3)] == [
        True,
        False,
        False,
    ]
    sender.set_wake(True)
    sender.set_wake(False)
    assert not receiver.give_back(Kind.RELEASE, 0, 0)


def test_a_receiver_that_gives_back_what_it_was_not_sent_is_hung_up_on() -> None:
    sender, receiver = both(2)
    sender.flight[1] = (7, RequestId("r"))
    receiver.give_back(Kind.RELEASE, 1, 6)
    assert sender.returned() == [], "the word of the chunk before, late"
    receiver.give_back(Kind.RELEASE, 1, 8)
    with pytest.raises(Hangup, match="seq 8"):
        sender.returned()

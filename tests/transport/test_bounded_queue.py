"""The queue between a loop and a courier: order and count under both sides waiting, and no wake-up
lost."""

from __future__ import annotations

import threading

import pytest

from stretto.transport.bounded_queue import AutoResetEvent, BoundedQueue

PATIENCE_S = 60.0


@pytest.mark.parametrize("capacity", [1, 3])
def test_everything_passes_in_order(capacity: int) -> None:
    queue: BoundedQueue[int] = BoundedQueue(capacity)
    got: list[int] = []
    most = 0

    def consume() -> None:
        while len(got) < 5000:
            item = queue.wait_item(PATIENCE_S)
            assert item is not None, "a wake-up was lost"
            got.append(item)

    thread = threading.Thread(target=consume)
    thread.start()
    for item in range(5000):
        while not queue.offer(item):
            queue.wait_room(PATIENCE_S)
        most = max(most, len(queue))
    thread.join(PATIENCE_S)
    assert got == list(range(5000))
    assert most <= capacity


def test_closing_wakes_and_keeps_what_is_inside() -> None:
    queue: BoundedQueue[int] = BoundedQueue(4)
    results: list[int | None] = []
    thread = threading.Thread(target=lambda: results.append(queue.wait_item(PATIENCE_S)))
    thread.start()
    queue.close()
    thread.join(PATIENCE_S)
    assert results == [None]
    full: BoundedQueue[int] = BoundedQueue(1)
    assert full.offer(1)
    assert not full.offer(2)
    full.close()
    full.wait_room(PATIENCE_S)  # returns
    assert not full.offer(3)
    assert (full.wait_item(PATIENCE_S), full.wait_item(PATIENCE_S), full.poll()) == (1, None, None)


def test_an_event_stays_set_until_one_wait_clears_it() -> None:
    event = AutoResetEvent()
    assert not event.wait(0)
    event.set()
    event.set()
    assert event.wait(0)
    assert not event.wait(0)

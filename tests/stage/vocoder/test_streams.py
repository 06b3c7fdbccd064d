"""A vocoder's streams: their frames in order, their slots by urgency."""

import numpy as np

from stretto.stage.vocoder.streams import Primer, Slots, Stream
from stretto.types import RequestId


def frames(*codes: int) -> np.ndarray:
    return np.array([[c] * 16 for c in codes], dtype=np.int64)


def stream(name: str, arrival: int, *codes: int, deadline: float | None = None) -> Stream:
    made = Stream(RequestId(name), arrival, deadline=deadline)
    if codes:
        made.add(frames(*codes))
    return made


def test_frames_are_taken_in_order_however_they_came() -> None:
    made = stream("a", 0, 1, 2, 3)
    made.add(frames(4))
    made.add(frames(5, 6))
    taken = []
    for n in (2, 3, 1):
        into = np.zeros((16, 4), dtype=np.int64)
        made.take(n, into)
        taken += into[0, :n].tolist()
    assert taken == [1, 2, 3, 4, 5, 6]
    assert made.num_pending == 0
    assert not made.pending


def test_a_step_ends_with_the_primer() -> None:
    """Or its state would be that behind frames of the stream."""
    primer = Primer(b"key", frames(1, 2, 3))
    made = Stream(RequestId("a"), 0, primer=primer)
    made.add(primer.codes)
    made.add(frames(4, 5))
    assert made.num_ready == 3
    made.launched = 2
    made.num_pending = 3
    assert made.num_ready == 1
    made.launched = 3
    made.num_pending = 2
    assert made.num_ready == 2


def test_slots_go_to_the_most_urgent_whose_frames_are_there() -> None:
    slots = Slots(2)
    late, silent, empty, soon = (
        stream("late", 0, 1, deadline=9.0),
        stream("silent", 3, 1),
        stream("empty", 1),
        stream("soon", 2, 1, deadline=5.0),
    )
    slots.waiting.extend((late, silent, empty, soon))
    assert [(s.request, slot) for s, slot in slots.assign()] == [("silent", 0), ("soon", 1)]
    assert list(slots.waiting) == [late, empty]
    assert not list(slots.assign()), "no slot is free"
    slots.give_up(silent)
    assert [(s.request, slot) for s, slot in slots.assign()] == [("late", 0)]


def test_a_slot_is_freed_when_no_step_writes_to_it() -> None:
    slots = Slots(1)
    made = stream("a", 0, 1)
    slots.waiting.append(made)
    list(slots.assign())
    made.in_flight = 1
    slots.give_up(made)
    assert not slots.free
    made.in_flight = 0
    slots.release(made)
    slots.release(made)
    assert slots.free == [0]

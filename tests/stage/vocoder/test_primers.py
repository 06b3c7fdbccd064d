"""What streams have heard before their first frame is computed once."""

import numpy as np

from stretto.stage.vocoder.primers import Primers
from stretto.stage.vocoder.streams import Primer, Stream
from stretto.types import RequestId


class State:
    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def reset(self, slot: int) -> None:
        self.log.append(("reset", slot))

    def load(self, slot: int, saved: str, frames: int) -> None:
        self.log.append(("load", slot, saved, frames))

    def save(self, slot: int) -> str:
        self.log.append(("save", slot))
        return f"of {slot}"


def primer(key: bytes, frames: int = 3) -> Primer:
    return Primer(key, np.zeros((frames, 16), np.int64))


def primed(key: bytes, slot: int) -> Stream:
    return Stream(RequestId("r"), 0, slot=slot, primer=primer(key))


def test_a_stream_without_a_primer_begins_with_nothing() -> None:
    state = State()
    Primers(state, 2).begin(Stream(RequestId("r"), 0), 1)
    assert state.log == [("reset", 1)]


def test_the_second_stream_of_a_voice_begins_behind_the_primer() -> None:
    state = State()
    primers = Primers(state, 2)
    primers.keep(primed(b"a", 4))
    stream = primed(b"a", 5)
    primers.begin(stream, 5)
    assert state.log == [("save", 4), ("load", 5, "of 4", 3)]
    assert stream.launched == stream.done == 3
    assert not stream.pending


def test_an_evicted_primer_is_decoded_again_first() -> None:
    """It was kept when the stream was announced, and so is not among its frames."""
    state = State()
    primers = Primers(state, 2)
    stream = primed(b"a", 0)
    stream.add(np.ones((1, 16), np.int64))
    primers.begin(stream, 0)
    assert state.log == [("reset", 0)]
    assert [len(codes) for codes in stream.pending] == [3, 1]
    assert stream.num_pending == 4


def test_those_used_least_lately_are_forgotten() -> None:
    primers = Primers(State(), 2)
    for slot, key in enumerate((b"a", b"b")):
        primers.keep(primed(key, slot))
    primers.begin(primed(b"a", 2), 2)
    primers.keep(primed(b"c", 3))
    assert len(primers) == 2
    assert primer(b"a") in primers
    assert primer(b"b") not in primers

"""Features that come before the request that they belong to."""

import pytest

from stretto.errors import WireError
from stretto.messages.requests import Features
from stretto.stage.host.feature_buffer import FeatureBuffer
from stretto.types import RequestId

ID = RequestId("r")


def test_pieces_become_one() -> None:
    buffer = FeatureBuffer()
    for piece in (b"abc", b"de"):
        buffer.add(Features(ID, 5), bytearray(piece))
    assert bytes(buffer.take(ID)) == b"abcde"
    assert bytes(buffer.take(ID)) == b"", "they are gone"


def test_what_is_too_long_too_short_or_of_another_size_is_an_error() -> None:
    buffer = FeatureBuffer()
    buffer.add(Features(ID, 5), bytearray(b"abc"))
    with pytest.raises(WireError):
        buffer.add(Features(ID, 5), bytearray(b"def"))
    with pytest.raises(WireError):
        buffer.add(Features(ID, 6), bytearray(b"d"))
    with pytest.raises(WireError, match="3 of 5"):
        buffer.take(ID)


def test_a_request_that_left_leaves_nothing() -> None:
    buffer = FeatureBuffer()
    buffer.add(Features(ID, 5), bytearray(b"abc"))
    buffer.drop(ID)
    buffer.drop(ID)
    assert bytes(buffer.take(ID)) == b""

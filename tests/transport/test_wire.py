"""The wire format: round trips, the golden bytes of docs/wire.md, strictness, and a short run of
the fuzzer."""

from __future__ import annotations

import gc
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import WireError
from stretto.transport import wire
from stretto.transport.contract import Chunk, Corrupt, PutFailed, TensorMeta, VersionMismatch
from stretto.types import Mark, RequestId, Span
from tests.slow.fuzz.chunks import fuzz

R = RequestId("r-42")
DOC = Path(__file__).parents[2] / "docs" / "wire.md"


def rows() -> Chunk:
    tensors = {
        "ids": torch.tensor([7, 8], dtype=torch.int32),
        "hidden": torch.tensor([[1.0, -2.0]]).to(torch.bfloat16),
    }
    return wire.chunk(R, Span(4, 6), Mark.MORE, tensors, seq=2)


def end() -> Chunk:
    return wire.chunk(R, Span(6, 6), Mark.REQUEST_END, {}, seq=3)


def same(left: Chunk, right: Chunk) -> bool:
    return left.header == right.header and all(
        torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors
    )


def test_the_golden_bytes_of_the_page() -> None:
    golden = [
        bytes.fromhex(block)
        for block in re.findall(r"```hex\n(.*?)```", DOC.read_text(), re.DOTALL)
    ]
    assert len(golden) == 2
    for data, chunk, checksum in zip(golden, (rows(), end()), (True, False)):
        assert wire.encode(chunk, checksum=checksum) == data
        assert same(wire.decode(bytearray(data)), chunk)


def any_tensor(data: st.DataObject) -> torch.Tensor:
    dtype = data.draw(st.sampled_from(list(wire.DTYPES.values())))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensor = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=seed).to(dtype)
    if tensor.dim() >= 2 and data.draw(st.booleans()):
        tensor = tensor.transpose(0, 1)  # not contiguous: the encoder lays it out
    return tensor


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    tensors = {f"t{i}": any_tensor(data) for i in range(data.draw(st.integers(0, 5)))}
    checksum, zero_copy = data.draw(st.booleans()), data.draw(st.booleans())
    start = data.draw(st.integers(0, 2**40))
    chunk = wire.chunk(
        R,
        Span(start, start + data.draw(st.integers(0, 9))),
        data.draw(st.sampled_from(Mark)),
        tensors,
    )
    size = wire.encoded_size(chunk)
    slot = bytearray(b"\xaa" * (size + 100))  # what the last chunk left there must not show
    assert wire.encode_into(slot, chunk, checksum=checksum, zero_copy=zero_copy) == size
    assert slot[size:] == b"\xaa" * 100
    assert slot[:size] == wire.encode(chunk, checksum=checksum)
    decoded = wire.decode(memoryview(slot)[:size])
    assert same(decoded, chunk)
    assert wire.encode(decoded, checksum=checksum) == slot[:size]


def test_decoding_makes_views() -> None:
    buffer = wire.encode(rows())
    decoded = wire.decode(buffer)
    at = buffer.index(struct.pack("<ii", 7, 8))
    assert at % wire.ALIGN == 0
    buffer[at] = 9
    assert decoded.tensors["ids"].tolist() == [9, 8]


def test_a_chunk_that_does_not_fit() -> None:
    size = wire.encoded_size(rows())
    for zero_copy in (True, False):
        with pytest.raises(PutFailed, match=f"{size} bytes") as caught:
            wire.encode_into(bytearray(size - 1), rows(), zero_copy=zero_copy)
        assert caught.value.request == R


def test_what_cannot_be_sent() -> None:
    for bad in (
        {"x": torch.zeros(2, dtype=torch.complex64)},
        {"a b": torch.zeros(1)},
        {"x": torch.zeros([1] * 9)},
    ):
        with pytest.raises(ValueError, match="no place on the wire"):
            wire.chunk(R, Span(0, 1), Mark.MORE, bad)
    chunk = rows()
    chunk.tensors = {
        **chunk.tensors,
        "ids": torch.tensor([7], dtype=torch.int32),
    }  # would be broadcast
    with pytest.raises(ValueError, match="not the one in the header"):
        wire.encode(chunk)
    many = wire.chunk(
        R, Span(0, 1), Mark.MORE, {f"t{i}": torch.zeros(1) for i in range(wire.MAX_TENSORS + 1)}
    )
    with pytest.raises(PutFailed):
        wire.encode(many)


def test_every_bit_of_prefix_and_header_counts() -> None:
    data = wire.encode(rows())
    head = wire.PREFIX_BYTES + struct.unpack_from("<I", data, 16)[0]
    for bit in range(8 * head):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.decode(changed)


def test_every_bit_of_a_checked_blob_counts() -> None:
    data = wire.encode(rows(), checksum=True)
    head = wire.PREFIX_BYTES + struct.unpack_from("<I", data, 16)[0]
    for bit in range(8 * (-(-head // wire.ALIGN) * wire.ALIGN), 8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt) as caught:
            wire.decode(changed)
        assert caught.value.request == R, "the header is sound, so the request is known"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 200, 255])
def test_cut_short(length: int) -> None:
    with pytest.raises(Corrupt):
        wire.decode(wire.encode(rows())[:length])


def test_trailing_bytes() -> None:
    with pytest.raises(Corrupt):
        wire.decode(wire.encode(rows()) + b"\0")


COUNTERS = {"seq": 0, "start": 0, "stop": 2}


def mend(
    head: dict[str, Any],
    blobs: bytes,
    *,
    version: int = 3,
    zero: int = 0,
    mark: int = 0,
    **counters: int,
) -> bytearray:
    """An encoding with right lengths and checksums around any header."""
    raw = msgspec.msgpack.encode(head)
    pad = bytes(-(wire.PREFIX_BYTES + len(raw)) % wire.ALIGN) if blobs else b""
    numbers = (COUNTERS | counters).values()
    rest = struct.pack("<HHIIQQQQ", 0, mark, len(raw), 0, len(blobs), *numbers) + raw + pad
    return bytearray(struct.pack("<4sHHI", b"STRT", version, zero, zlib.crc32(rest)) + rest + blobs)


def header() -> dict[str, Any]:
    table = [
        {"name": "a", "dtype": "int32", "shape": [2], "offset": 0},
        {"name": "b", "dtype": "uint8", "shape": [4], "offset": 64},
    ]
    return {"version": 3, "request": "r-42", "tensors": table}


BLOBS = bytes(68)


def test_the_mended_header_is_sound() -> None:
    assert wire.decode(mend(header(), BLOBS)).tensors["a"].tolist() == [0, 0]


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda head: head.update(fields)


def _entry(index: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda head: head["tensors"][index].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        _set(extra=1),
        _set(seq=1),
        _set(version=2.0),
        _set(request=""),
        _set(request="x" * 65),
        _set(request="a/b"),
        _set(request="a\n"),
        _set(request=b"r-42"),
        lambda head: head.pop("request"),
        _entry(0, name="b"),
        _entry(0, name=""),
        _entry(0, dtype="object"),
        _entry(1, dtype="int16"),
        _entry(0, shape=[-2]),
        _entry(0, shape=[2**40]),
        _entry(0, shape=[0, 2**52, 2**52]),
        _entry(0, shape=[1] * 8 + [2]),
        _entry(0, offset=4),
        _entry(1, offset=0),  # on top of the first
        _entry(1, offset=128),  # beyond the end
        _entry(1, offset=2**50),
        _entry(1, shape=[5]),
        _entry(1, shape=[3]),
        _entry(1, strides=[1]),
        lambda head: head["tensors"].pop(),
        lambda head: head.update(tensors=head["tensors"] * 9),
    ],
)
def test_headers_that_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    head = header()
    change(head)
    with pytest.raises(Corrupt):
        wire.decode(mend(head, BLOBS))


@pytest.mark.parametrize(
    "change",
    [{"mark": 2}, {"zero": 1}, {"start": 3}, *({name: 2**53} for name in ("seq", "stop"))],
    ids=str,
)
def test_prefixes_that_are_refused(change: dict[str, int]) -> None:
    for _ in range(2):  # also when the header is known from a sound chunk
        with pytest.raises(Corrupt) as caught:
            wire.decode(mend(header(), BLOBS, **change))
        assert caught.value.request == R
        wire.decode(mend(header(), BLOBS))


def test_other_versions() -> None:
    with pytest.raises(VersionMismatch):
        wire.decode(mend(header(), BLOBS, version=2))
    with pytest.raises(VersionMismatch):
        wire.decode(mend({**header(), "version": 2}, BLOBS))


def test_a_page_is_read_again_and_again() -> None:
    """Views are remembered per layout: what a page holds now is what they show, for every mix of
    layouts."""
    rng = random.Random(3)
    page = wire.Page(bytearray(1 << 16))
    for n in range(300):
        rows, wide = rng.randrange(1, 90), rng.randrange(1, 3)
        sent = {"ids": torch.randint(0, 99, (rows,)), "x": torch.randn(rows, wide)}
        size = wire.encode_into(
            page, wire.chunk(RequestId(f"r-{n % 7}"), Span(n, n + rows), Mark.MORE, sent, seq=n)
        )
        got = wire.read(page, size)
        assert (got.header.request, got.header.seq, got.header.span) == (
            f"r-{n % 7}",
            n,
            Span(n, n + rows),
        )
        assert all(torch.equal(got.tensors[name], sent[name]) for name in sent)
    assert len(page.views) <= 64


def test_what_is_remembered_is_bounded() -> None:
    """Each header that is kept has one entry in its table here: 1,024 of those sent, and as many of
    those received."""
    for n in range(5000):
        wire.decode(
            wire.encode(
                wire.chunk(RequestId(f"r-{n}"), Span(0, 1), Mark.MORE, {"x": torch.zeros(1)})
            )
        )
    gc.collect()
    assert sum(type(o) is TensorMeta for o in gc.get_objects()) < 3000


def test_memory_that_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        wire.encode_into(memoryview(bytes(1 << 12)), rows())


def test_one_form_only() -> None:
    reordered = dict(reversed(header().items()))
    with pytest.raises(Corrupt, match="one form"):
        wire.decode(mend(reordered, BLOBS))
    dirty = bytearray(BLOBS)
    dirty[20] = 1  # between the blobs
    with pytest.raises(Corrupt, match="padding"):
        wire.decode(mend(header(), bytes(dirty)))
    head = header()
    head["tensors"][1]["dtype"] = "bool"
    with pytest.raises(Corrupt, match="bool"):
        wire.decode(mend(head, BLOBS[:-1] + b"\2"))


def test_fuzz() -> None:
    outcomes, _ = fuzz(15_000, seed=7)
    assert sum(outcomes.values()) == 15_000
    accepted = {name for name in outcomes if name.startswith("accepted")}
    assert accepted == {
        "accepted: unchanged",
        "accepted: blob bytes only",
        "accepted: another valid chunk",
    }
    assert len(outcomes) > 12, "it should reach every check"

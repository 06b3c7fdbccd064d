"""Chunks for the wire decoder: each must be refused, or be a chunk in its one encoding. Part of the
program `fuzz`.

Half of the mutants are blind (bits, bytes, cuts, splices), half are repaired: the header is
decoded, changed and encoded again with the right lengths and checksums, so that they pass the
checks that stop the blind ones."""

from __future__ import annotations

import random
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from stretto.transport import wire
from stretto.transport.contract import ChunkHeader, Corrupt, VersionMismatch
from stretto.types import Mark, RequestId, Span

INTERESTING = [
    0,
    1,
    2,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    4095,
    2**15,
    2**16,
    2**30,
    2**31,
    2**32 - 1,
    2**53,
    2**63,
]
REST = struct.Struct("<HHIIQQQQ")  # the prefix behind its checksum
NAMES = ["ids", "", "x" * 64, "x" * 65, "a/b", "..", "é", "ids\n"]
DTYPES = [*(str(dtype.value) for dtype in wire.DTYPES), "float8_e4m3fn", "object", "", "int128"]


def golden() -> list[bytes]:
    """Chunks of every shape: no tensors, one, many, every dtype, scalar, empty; with and without a
    checksum."""
    torch.manual_seed(0)
    r = RequestId("r-42")
    rows = {
        "ids": torch.tensor([7, 8], dtype=torch.int32),
        "media": torch.tensor([[5, 6]]),
        "hidden": torch.randn(1, 32).to(torch.bfloat16),
    }
    kinds = {
        f"t{i}": torch.randint(0, 2, (3,)).to(dtype) for i, dtype in enumerate(wire.DTYPES.values())
    }
    shapes = {
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 8),
        "deep": torch.ones(1, 2, 1, 2, dtype=torch.bool),
    }
    chunks = [
        wire.chunk(r, Span(9, 9), Mark.REQUEST_END, {}, seq=3),
        wire.chunk(
            r, Span(0, 4), Mark.MORE, {"codes": torch.arange(64, dtype=torch.int32).view(4, 16)}
        ),
        wire.chunk(r, Span(4, 6), Mark.REQUEST_END, rows, seq=2),
        wire.chunk(r, Span(0, 3), Mark.MORE, kinds),
        wire.chunk(r, Span(0, 1), Mark.MORE, shapes, seq=2**40),
    ]
    return [
        bytes(wire.encode(chunk, checksum=checksum))
        for chunk in chunks
        for checksum in (False, True)
    ]


def blind(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Changes made without knowledge of the format."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(8):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out += rng.randbytes(rng.choice((1, 4, 63, 64, 200)))
            case 4:
                del out[at : at + rng.choice((1, 2, 8, 64))]
            case 5:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 6:
                other = rng.choice(corpus)
                out[at:] = other[rng.randrange(len(other)) :]
            case _:
                width, form = rng.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
                where = rng.randrange(0, wire.PREFIX_BYTES)
                value = rng.choice(INTERESTING) % 2 ** (8 * width)
                out[where : where + width] = struct.pack(form, value)
    return bytes(out)


def mended(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Changes of the header's or the prefix's meaning, with lengths and checksums made right
    again."""
    flags, mark, length, _crc, blobs, *counters = REST.unpack_from(data, 12)
    head: dict[str, Any] = msgspec.msgpack.decode(
        data[wire.PREFIX_BYTES : wire.PREFIX_BYTES + length]
    )
    area = bytearray(data[len(data) - blobs :]) if blobs else bytearray()
    for _ in range(rng.choice((1, 1, 2, 3))):
        _twist(rng, head, area)
    raw = msgspec.msgpack.encode(head)
    if rng.random() < 0.15:  # the same meaning in other bytes, or bytes with no meaning
        raw = _respell(rng, raw)
    at = wire.PREFIX_BYTES + len(raw)
    pad = bytes(-at % wire.ALIGN) if area else b""
    if pad and rng.random() < 0.05:
        pad = rng.randbytes(len(pad))
    if rng.random() < 0.05:
        flags = rng.randrange(2**16)
    crc = (
        zlib.crc32(area) if flags & 1 and area and rng.random() < 0.9 else rng.choice((0, 0, 0, 7))
    )
    if rng.random() < 0.1:
        mark = rng.choice((0, 1, 2, 3, 2**16 - 1))
    if rng.random() < 0.1:
        counters[rng.randrange(len(counters))] = rng.choice(INTERESTING)
    zero = rng.choice((0,) * 30 + (1, 2**15))
    rest = REST.pack(flags, mark, len(raw), crc, len(area), *counters) + raw + pad
    start = struct.pack("<4sHHI", wire.MAGIC, wire.WIRE_VERSION, zero, zlib.crc32(rest))
    return start + rest + bytes(area)


def _twist(rng: random.Random, head: dict[str, Any], area: bytearray) -> None:
    table = head.get("tensors")
    entry = (
        rng.choice(table)
        if isinstance(table, list) and table and isinstance(table[0], dict)
        else None
    )
    match rng.randrange(9):
        case 0:
            head[rng.choice(list(head))] = _value(rng)
        case 1:
            head.pop(rng.choice(list(head)), None)
        case 2:
            head[rng.choice(("extra", "Version", "request "))] = _value(rng)
        case 3 if entry is not None:
            entry[rng.choice(("name", "dtype", "shape", "offset", "extra"))] = _value(rng)
        case 4 if entry is not None and isinstance(entry.get("shape"), list):
            entry["shape"] = [
                rng.choice((-1, 0, 1, 2, 3, *INTERESTING)) for _ in range(rng.randrange(10))
            ]
        case 5 if entry is not None:
            entry["offset"] = rng.choice((0, 64, 128, 192, -64, 1, len(area), 2**40))
        case 6 if isinstance(table, list):
            head["tensors"] = table * rng.choice((0, 2, 17))
        case 7 if area:
            area[rng.randrange(len(area))] = rng.randrange(256)
        case _:
            if area and rng.random() < 0.5:
                del area[rng.randrange(len(area)) :]
            else:
                area += rng.randbytes(rng.choice((1, 4, 64)))


def _value(rng: random.Random) -> Any:
    picks: list[Callable[[], Any]] = [
        lambda: rng.choice(INTERESTING),
        lambda: -rng.choice(INTERESTING),
        lambda: rng.choice(NAMES),
        lambda: rng.choice(DTYPES),
        lambda: rng.choice(
            (None, True, 1.0, float("nan"), b"ids", [], {}, [1, 2], [[]], {"name": "ids"})
        ),
        lambda: [rng.choice(INTERESTING) for _ in range(rng.randrange(5))],
    ]
    return rng.choice(picks)()


def _respell(rng: random.Random, raw: bytes) -> bytes:
    """Non-minimal integers, doubled keys, trailing or missing bytes."""
    at = rng.randrange(len(raw))
    match rng.randrange(4):
        case 0:
            return raw[:at] + b"\xcc" + raw[at:]  # perhaps a small integer, now in two bytes
        case 1:
            return raw + rng.randbytes(rng.choice((1, 3)))
        case 2:
            return raw[:at]
        case _:
            return raw[:at] + rng.randbytes(1) + raw[at + 1 :]


def judge(data: bytes, corpus: dict[bytes, ChunkHeader], was_blind: bool) -> str:
    """The outcome's name. Raises AssertionError if a rule is broken, or whatever escaped from the
    decoder."""
    try:
        chunk = wire.decode(bytearray(data))
    except VersionMismatch:
        return "version"
    except Corrupt as error:
        return "corrupt: " + re.sub(r"'.*?'|[0-9]+", "_", error.message).split(":")[0]
    checksum = bool(struct.unpack_from("<H", data, 12)[0] & 1)
    assert wire.encode(chunk, checksum=checksum) == data, "accepted, but its encoding is another"
    if data in corpus:
        return "accepted: unchanged"
    if was_blind:
        assert not checksum, "a blind change went past the blob checksum"
        assert chunk.header in corpus.values(), "a blind change went past the header checksum"
        return "accepted: blob bytes only"
    return "accepted: another valid chunk"


def fuzz(
    inputs: int, seed: int, step: Callable[[], None] = lambda: None
) -> tuple[Counter[str], float]:
    """How often each outcome came, and the longest that one input took."""
    rng, corpus, outcomes, longest = random.Random(seed), golden(), Counter[str](), 0.0
    headers = {data: wire.decode(bytearray(data)).header for data in corpus}
    for index in range(inputs):
        source = rng.choice(corpus)
        was_blind = index % 2 == 0
        data = (blind if was_blind else mended)(rng, source, corpus)
        start = time.process_time()  # of this process: others may have the core for a while
        try:
            outcomes[judge(data, headers, was_blind)] += 1
        except Exception as error:
            raise SystemExit(f"input {index}: {error!r}\n{data.hex()}") from error
        longest = max(longest, time.process_time() - start)
        step()
    return outcomes, longest

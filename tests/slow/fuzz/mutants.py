"""Damaged control messages: bytes changed blindly, or values changed in their meaning. For
control.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from bench.harness.host import STAGES
from stretto.errors import WireError
from stretto.messages.hosts import Configure
from stretto.messages.requests import PREFIX, encode, lengths
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.params import Params
from stretto.types import RequestId

LINKS = [link.name for link in PIPELINE.links]
NUMBERS = [0, 1, 2, 3, 7, 15, 16, 100, 255, 4096, 2**15, 2**31, 2**32, 2**40, 2**53, 2**63 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), -float("inf")]
WORDS = ["", *STAGES, "host", *LINKS, "a>b", ">", "shm", "none", "stop", "length", "é", "x" * 99]
DEEP = (
    encode(Configure("", "", (), {"": None}, ()))[PREFIX.size : -1] + b"\x81\xa0" * 5000 + b"\xc0"
)  # maps in maps

IDS = [RequestId(f"r{i}") for i in range(6)]
PARAMS = Params(
    max_text_tokens=3, max_frames=3, seed=1, temperature=0.0, greedy_speech=True, want_codes=True
)
LOOK_EVERY = 1000  # inputs between two looks at everything

Frame = tuple[bytes, bytes]  # header, blob
Said = list[tuple[Any, bytes]]  # messages of one answer, with their blobs


def changed(rng: random.Random, corpus: list[Frame], ids: list[RequestId]) -> Frame:
    """One of the corpus, with another header, and sometimes another blob."""
    header, blob = rng.choice(corpus)
    if rng.random() < 0.001:
        return DEEP, b""
    if rng.random() < 0.5:
        header = scrambled(rng, header)
    else:
        said = msgspec.msgpack.decode(header)
        if "request" in said and rng.random() < 0.9:
            said["request"] = rng.choice(ids)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            twist(rng, said)
        header = msgspec.msgpack.encode(said)
    if blob and rng.random() < 0.2:
        blob = rng.choice(
            (b"", blob[: rng.randrange(len(blob))], blob + rng.randbytes(rng.randrange(9)))
        )
    return header, blob


def scrambled(rng: random.Random, header: bytes) -> bytes:
    out = bytearray(header)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(5):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
            case _:
                del out[at : at + rng.choice((1, 2, 9))]
    return bytes(out)


def twist(rng: random.Random, said: Any) -> None:
    """Change one value somewhere inside a map or a list."""
    while True:
        places = list(said) if isinstance(said, dict) else list(range(len(said)))
        if not places:
            return
        at = rng.choice(places)
        value = said[at]
        if isinstance(value, dict | list) and value and rng.random() < 0.8:
            said = value
            continue
        match rng.randrange(12):
            case 0 if isinstance(said, dict):
                del said[at]
            case 0:
                said.insert(at, value)
            case 1 if isinstance(said, dict):
                said[rng.choice(WORDS)] = value
            case 1:
                del said[at:]
            case 2:
                said[at] = other(rng, rng.choice((0, 0.0, "", b"", None, True, [], {})))
            case _:
                said[at] = other(rng, value)
        return


def other(rng: random.Random, value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            near = [
                v for v in (value + 1, value - 1) if -(2**63) <= v < 2**64
            ]  # as far as the encoding goes
            return rng.choice((*near, rng.choice(NUMBERS), -rng.choice(NUMBERS)))
        case float():
            return rng.choice(FLOATS)
        case str():
            return rng.choice(WORDS)
        case bytes():
            return rng.choice((b"", value[:-1], value + b"x", rng.randbytes(16)))
        case list():
            return rng.choice(
                ([], value * 2, value[:1], value[::-1], [rng.choice(NUMBERS) for _ in range(4)])
            )
        case dict():
            return {}
        case _:
            return rng.choice((0, 0.0, "thinker", b"x", [], True))


def readable(decode: Callable[[bytes], Any], header: bytes) -> Any:
    """The message, which must survive its own encoding; None if it is refused."""
    try:
        message = decode(header)
    except WireError:
        return None
    again = encode(message)[PREFIX.size :]
    assert encode(decode(again))[PREFIX.size :] == again, (
        "a message that is not itself once it is encoded"
    )
    return message


def prefixes(rng: random.Random, inputs: int) -> Counter[str]:
    """Lengths of frames: within the limits, or refused."""
    outcomes: Counter[str] = Counter()
    for _ in range(inputs):
        data = (
            PREFIX.pack(rng.choice(NUMBERS) % 2**32, rng.choice(NUMBERS) % 2**32)
            if rng.random() < 0.5
            else None
        )
        try:
            lengths(data or rng.randbytes(PREFIX.size))
            outcomes["frame: accepted"] += 1
        except WireError:
            outcomes["frame: refused"] += 1
    return outcomes


@contextmanager
def named(index: int, what: str, header: bytes, blob: bytes) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise SystemExit(
            f"input {index} {what}: {error!r}\n{header.hex()}\nwith a blob of {len(blob)}"
        ) from error

"""JSON with halves of surrogate pairs, which msgspec alone refuses."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from stretto._validation import MOST_HALVES, read_json

UNITS = (
    "\\ud83d",
    "\\ude00",
    "\\\\",
    "\\n",
    "a",
    "\\u0041",
    "u",
    "d83d",
    '\\"',
    "é",
    "\\uD83d\\uDE00",
)


def test_lone_surrogates_become_replacement_characters() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        body = '{"x":"' + "".join(rng.choice(UNITS) for _ in range(rng.randrange(8))) + '"}'
        whole = json.loads(body)["x"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert read_json(body.encode(), msgspec.json.decode) == {"x": whole}, body


def test_what_is_not_json_is_refused_all_the_same() -> None:
    for body in (
        b'{"x":"\\ud83d"',
        b"[",
        b'"\\ud83',
        b'["' + (MOST_HALVES + 1) * b"\\ud83d" + b'"]',
    ):
        with pytest.raises(msgspec.DecodeError):
            read_json(body, msgspec.json.decode)
    with pytest.raises(msgspec.ValidationError):
        read_json(b'"\\ud83d"', msgspec.json.Decoder(int).decode)

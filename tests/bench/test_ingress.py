"""What the benchmark of Ray's ingress tells of its rounds. Needs no Ray."""

from __future__ import annotations

import pytest

from bench.ingress import INGRESS, PLAIN, Heard, compare


def test_what_is_added_is_told_per_round() -> None:
    """The machine is slower in each round: all samples together would hide what a round shows."""
    rounds = [
        {
            PLAIN: Heard([s, s + 1, s + 9], [s]),
            INGRESS: Heard([s + 0.2, s + 1 + more, s + 2.5], [s - 0.1]),
        }
        for s, more in ((1.0, 0.5), (10.0, 0.3), (20.0, 0.9))
    ]
    found = compare(rounds)
    first = found["added"]["first_byte_ms"]
    assert first["each"] == pytest.approx([0.5, 0.3, 0.9])
    assert (first["median"], first["min"], first["max"]) == pytest.approx((0.5, 0.3, 0.9))
    assert found["added"]["packet_ms"]["median"] == pytest.approx(-0.1)
    assert found[PLAIN]["answers"] == 9
    assert found[INGRESS]["packets"] == 3
    assert found[PLAIN]["first_byte_ms"]["max"] == pytest.approx(29.0)

"""No link between processes without a secret, on any connector and at either end; and what a seal
holds together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from stretto.errors import Invalid
from stretto.transport.contract import Corrupt, LinkOptions
from stretto.transport.endpoint import (
    MAX_SLOTS,
    check_endpoint,
    check_options,
    hello_of,
    make_endpoint,
    new_nonce,
)
from stretto.transport.registry import connectors
from stretto.types import SECRET_BYTES
from tests.transport.contract.links import SECRET, missing

OPTIONS = LinkOptions(slots=4, slot_bytes=4096, generation=3, secret=SECRET)
BETWEEN = ["shm", "tcp", "mooncake"]
HOSTS = ["127.0.0.1", "::1", "localhost", "0.0.0.0", "192.0.2.1"]


def connector_of(name: str) -> Any:
    if why := missing(name):
        pytest.skip(why)
    return connectors.get(name)


@pytest.mark.parametrize(
    "secret", [None, b"", bytes(SECRET_BYTES - 1)], ids=["none", "empty", "short"]
)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", BETWEEN)
def test_nobody_listens_without_a_secret(name: str, host: str, secret: bytes | None) -> None:
    with pytest.raises(Invalid, match="needs a secret"):
        connector_of(name).listen("a-b", replace(OPTIONS, host=host, secret=secret))


@pytest.mark.parametrize(
    "secret", [None, b"", bytes(SECRET_BYTES - 1)], ids=["none", "empty", "short"]
)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", BETWEEN)
def test_nobody_connects_without_a_secret(name: str, host: str, secret: bytes | None) -> None:
    endpoint = make_endpoint(name, "a-b", OPTIONS, f"{host}:1", new_nonce())
    with pytest.raises(Invalid, match="needs a secret"):
        connector_of(name).connect(endpoint, replace(OPTIONS, secret=secret))


def test_more_slots_than_notes_have_room_for_are_refused() -> None:
    check_options("a-b", replace(OPTIONS, slots=MAX_SLOTS))
    with pytest.raises(Invalid, match="slots"):
        check_options("a-b", replace(OPTIONS, slots=MAX_SLOTS + 1))


CHANGES: dict[str, dict[str, Any]] = {
    "link": {"link": "a-c"},
    "address": {"address": "127.0.0.1:2"},
    "generation": {"generation": 4},
    "nonce": {"nonce": "0" * 32},
    "slots": {"slots": 5},
    "slot_bytes": {"slot_bytes": 8192},
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_endpoint_is_taken_as_it_was_made_or_not_at_all(what: str) -> None:
    endpoint = make_endpoint("tcp", "a-b", OPTIONS, "127.0.0.1:1", new_nonce(), {"more": "1"})
    check_endpoint("tcp", endpoint, OPTIONS)
    with pytest.raises(Corrupt, match="seal"):
        check_endpoint("tcp", msgspec.structs.replace(endpoint, **CHANGES[what]), OPTIONS)


@pytest.mark.parametrize("details", [{}, {"more": "2"}, {"more": "1", "base": "0"}], ids=str)
def test_details_are_sealed_too(details: dict[str, str]) -> None:
    endpoint = make_endpoint("tcp", "a-b", OPTIONS, "127.0.0.1:1", new_nonce(), {"more": "1"})
    changed = msgspec.structs.replace(
        endpoint, details={**details, "seal": endpoint.details["seal"]}
    )
    with pytest.raises(Corrupt, match="seal"):
        check_endpoint("tcp", changed, OPTIONS)


def test_an_endpoint_of_another_connector_or_secret_is_refused() -> None:
    endpoint = make_endpoint("tcp", "a-b", OPTIONS, "127.0.0.1:1", new_nonce())
    with pytest.raises(Corrupt, match="not of shm"):
        check_endpoint("shm", endpoint, OPTIONS)
    with pytest.raises(Corrupt, match="seal"):
        check_endpoint("tcp", endpoint, replace(OPTIONS, secret=bytes(SECRET_BYTES)))


def test_a_hello_needs_the_secret_and_the_endpoint() -> None:
    nonce = new_nonce()
    endpoint = make_endpoint("tcp", "a-b", OPTIONS, "127.0.0.1:1", nonce)
    later = make_endpoint("tcp", "a-b", replace(OPTIONS, generation=4), "127.0.0.1:1", nonce)
    fields = {
        hello_of(endpoint, SECRET),
        hello_of(endpoint, bytes(SECRET_BYTES)),
        hello_of(later, SECRET),
    }
    assert len(fields) == 3
    assert hello_of(make_endpoint("tcp", "a-b", OPTIONS, "127.0.0.1:1", nonce), SECRET) in fields

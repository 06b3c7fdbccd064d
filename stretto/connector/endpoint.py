"""Endpoints of the connectors between processes: how a listener makes one, and how who connects checks it.

An endpoint travels over the control plane as text. Its seal, keyed by the secret that the machines share, is what tells
an endpoint that was changed or mixed up from the one that the listener made. Pure; called when a link is set up."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType

import msgspec

from stretto.connector.contract import Corrupt, Endpoint, LinkOptions

MAX_SLOTS = 256
"""Keeps the notes in flight well inside the smallest queue that carries them (a unix socket's send buffer)."""


def new_nonce() -> str:
    return secrets.token_hex(16)


def make_endpoint(
    connector: str,
    link: str,
    options: LinkOptions,
    address: str,
    nonce: str,
    details: Mapping[str, str] = MappingProxyType({}),
) -> Endpoint:
    """A sealed endpoint."""
    plain = Endpoint(
        connector, link, address, options.generation, nonce, options.slots, options.slot_bytes, dict(details)
    )
    return msgspec.structs.replace(plain, details={**details, "seal": _seal_of(plain, options.secret)})


def check_options(link: str, options: LinkOptions) -> None:
    if options.slots > MAX_SLOTS:
        raise ValueError(f"link {link}: at most {MAX_SLOTS} slots, {options.slots} asked for")


def check_endpoint(connector: str, endpoint: Endpoint, options: LinkOptions) -> None:
    """Raise `WireError` unless the endpoint is one that a listener with our secret made, unchanged."""
    if endpoint.connector != connector:
        raise Corrupt(f"an endpoint of {endpoint.connector}, not of {connector}", link=endpoint.link)
    if not hmac.compare_digest(endpoint.details.get("seal", ""), _seal_of(endpoint, options.secret)):
        raise Corrupt("the endpoint's seal does not match: it was changed, or the secrets differ", link=endpoint.link)


def _seal_of(endpoint: Endpoint, secret: bytes | None) -> str:
    # Without a secret the key is empty: the seal then catches mix-ups, not forgers.
    details = {name: text for name, text in endpoint.details.items() if name != "seal"}
    said = msgspec.msgpack.encode(msgspec.structs.replace(endpoint, details=dict(sorted(details.items()))))
    return hmac.new(secret or b"", said, sha256).hexdigest()

"""Endpoints of the connectors between processes: how a listener makes one, and how who connects checks it.

An endpoint travels over the control plane as text. Both ends are told the link's secret beside it, which is fresh for
every generation and never leaves them. Keyed by it, the *seal* in the endpoint tells one that was changed or mixed up
from the one that the listener made, and the *hello*, a sender's first bytes, tells the invited sender from a stranger.
Pure; called when a link is set up."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from stretto.connector.contract import Corrupt, Endpoint, LinkOptions
from stretto.errors import Invalid
from stretto.types import SECRET_BYTES

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
    return msgspec.structs.replace(plain, details={**details, "seal": _seal_of(plain, secret_of(link, options))})


def check_options(link: str, options: LinkOptions) -> None:
    """Raise `Invalid` if nobody can listen so. Before anything is opened."""
    secret_of(link, options)
    if options.slots > MAX_SLOTS:
        raise Invalid(f"link {link}: at most {MAX_SLOTS} slots, {options.slots} asked for", "slots")


def secret_of(link: str, options: LinkOptions) -> bytes:
    """The secret that the ends share. Without one, whoever reaches the address could be the peer."""
    if options.secret is None or len(options.secret) < SECRET_BYTES:
        raise Invalid(f"link {link}: a link between processes needs a secret of {SECRET_BYTES} bytes", "secret")
    return options.secret


def check_endpoint(connector: str, endpoint: Endpoint, options: LinkOptions) -> None:
    """Raise `WireError` unless the endpoint is one that a listener with our secret made, unchanged."""
    if endpoint.connector != connector:
        raise Corrupt(f"an endpoint of {endpoint.connector}, not of {connector}", link=endpoint.link)
    if not hmac.compare_digest(endpoint.details.get("seal", ""), _seal_of(endpoint, secret_of(endpoint.link, options))):
        raise Corrupt("the endpoint's seal does not match: it was changed, or the secrets differ", link=endpoint.link)


def hello_of(endpoint: Endpoint, secret: bytes) -> bytes:
    """What the sender says first: 32 bytes that only a holder of the secret can make, and only for this endpoint, its
    generation and nonce included."""
    return hmac.digest(secret, f"stretto hello {endpoint.details['seal']}".encode(), "sha256")


def _seal_of(endpoint: Endpoint, secret: bytes) -> str:
    details = {name: text for name, text in endpoint.details.items() if name != "seal"}
    said = msgspec.msgpack.encode(msgspec.structs.replace(endpoint, details=dict(sorted(details.items()))))
    return hmac.digest(secret, said, "sha256").hex()

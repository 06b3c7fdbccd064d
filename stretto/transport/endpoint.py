"""Endpoints: how a listener makes one, and how a sender checks it.

An endpoint travels over the control plane. Both ends also get the link's secret, which is fresh for
every generation and never leaves them. Two HMACs are keyed by it: the *seal* in the endpoint proves
that the endpoint is unchanged, and the *hello*, a sender's first bytes, proves that the sender is
the invited one. Pure; called when a link is set up."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from stretto.errors import Invalid
from stretto.transport.contract import Corrupt, Endpoint, LinkOptions
from stretto.types import SECRET_BYTES

MAX_SLOTS = 256
"""So that the messages in flight fit the smallest queue that carries them (a unix socket's send
buffer)."""


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
        connector,
        link,
        address,
        options.generation,
        nonce,
        options.slots,
        options.slot_bytes,
        dict(details),
    )
    return msgspec.structs.replace(
        plain, details={**details, "seal": _seal_of(plain, secret_of(link, options))}
    )


def check_options(link: str, options: LinkOptions) -> None:
    """Raise `Invalid` if a listener cannot have these options. Called before anything is opened."""
    secret_of(link, options)
    if options.slots > MAX_SLOTS:
        raise Invalid(f"link {link}: at most {MAX_SLOTS} slots, {options.slots} asked for", "slots")


def secret_of(link: str, options: LinkOptions) -> bytes:
    """The secret that the ends share. Without one, anybody who reaches the address could be the
    peer."""
    if options.secret is None or len(options.secret) < SECRET_BYTES:
        raise Invalid(
            f"link {link}: a link between processes needs a secret of {SECRET_BYTES} bytes",
            "secret",
        )
    return options.secret


def check_endpoint(connector: str, endpoint: Endpoint, options: LinkOptions) -> None:
    """Raise `WireError` unless a listener with this secret made the endpoint, and it is
    unchanged."""
    if endpoint.connector != connector:
        raise Corrupt(
            f"an endpoint of {endpoint.connector}, not of {connector}", link=endpoint.link
        )
    if not hmac.compare_digest(
        endpoint.details.get("seal", ""), _seal_of(endpoint, secret_of(endpoint.link, options))
    ):
        raise Corrupt(
            "the endpoint's seal does not match: it was changed, or the secrets differ",
            link=endpoint.link,
        )


def hello_of(endpoint: Endpoint, secret: bytes) -> bytes:
    """The sender's first bytes: 32 that only a holder of the secret can make, for this endpoint
    only (its generation and nonce included)."""
    return hmac.digest(secret, f"stretto hello {endpoint.details['seal']}".encode(), "sha256")


def _seal_of(endpoint: Endpoint, secret: bytes) -> str:
    details = {name: text for name, text in endpoint.details.items() if name != "seal"}
    encoded = msgspec.msgpack.encode(
        msgspec.structs.replace(endpoint, details=dict(sorted(details.items())))
    )
    return hmac.digest(secret, encoded, "sha256").hex()

"""How an agent on another machine and its engine find and prove each other. Both ends use
this; no torch.

The engine listens for one agent at an address of its own, under keys that are made of the
cluster's secret and a nonce that is new for each start. Only a holder of the secret can be dialled
there, and only one can send the hello, whose digest is keyed by the secret too. The hello has the
package's version: messages forbid unknown fields, so two versions must not talk to each other. Each
ZeroMQ message is a kind of one byte and its data."""

from __future__ import annotations

import hmac
import secrets
from typing import Annotated

import msgspec

from stretto import __version__
from stretto.engine.host_handle import Unusable

SECRET_BYTES = 32
HELLO, DATA, ENDED = b"h", b"d", b"e"
"""Kinds: who dials; bytes of the channel; the host has ended, and why."""
PIECE = 256 << 10
"""Bytes of the channel in one message, at most."""
MOST_BYTES = PIECE + 4096
HEARTBEAT_MS, SILENCE_MS = 1000, 3000
"""Between signs of life, and after how long without one the other end is gone."""
QUEUED = 64
"""Messages that a socket holds before it takes no more."""


class Invitation(msgspec.Struct, frozen=True):
    """What an agent is started with. No secret is in it: the agent has that from a file."""

    address: str  # to dial, host:port
    nonce: str
    name: str  # of the host, for logs

    @property
    def purpose(self) -> str:
        return f"control {self.nonce}"


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[str, msgspec.Meta(max_length=64)]
    address: Annotated[str, msgspec.Meta(max_length=64)]  # of the agent's machine, for links
    pid: int  # of the agent
    digest: bytes = b""

    @classmethod
    def make(
        cls,
        invitation: Invitation,
        secret: bytes,
        address: str,
        pid: int,
        version: str = __version__,
    ) -> Hello:
        plain = cls(version, address, pid)
        return msgspec.structs.replace(plain, digest=plain._digest(invitation, secret))

    def proves(self, invitation: Invitation, secret: bytes) -> bool:
        return hmac.compare_digest(self.digest, self._digest(invitation, secret))

    def check_version(self) -> None:
        if self.version != __version__:
            raise Unusable(
                f"the host at {self.address} runs stretto {self.version}, but this is {__version__}"
            )

    def _digest(self, invitation: Invitation, secret: bytes) -> bytes:
        signed = msgspec.msgpack.encode((invitation.nonce, self.version, self.address, self.pid))
        return hmac.digest(secret, b"stretto control hello " + signed, "sha256")


def new_nonce() -> str:
    return secrets.token_hex(16)


def reachable(address: str, port: int) -> str:
    """host:port, as ZeroMQ wants it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

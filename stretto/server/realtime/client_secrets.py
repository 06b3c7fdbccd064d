"""Client secrets: short-lived keys that the owner of an API key hands to a browser or a phone, to
open realtime sessions with. One store per server, on the event loop, in memory alone.

A secret stands for the key that made it: its sessions count as that key's, and when the key is
removed they end. Of a secret only a digest is held, so nothing that prints the store shows one."""

from __future__ import annotations

import heapq
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from stretto.server.keys import SECRET_PREFIX, digest_of_key
from stretto.server.openai.error_body import Refused
from stretto.server.shares import Shares

CLIENT_SECRET = "stretto.client_secret"  # where an ASGI scope has the one it was opened with
MAX_BYTES = 32 << 20  # of all secrets; one owner has half at most
OWN_BYTES = 2 << 10  # of a secret without its session
_NAME = 16  # hex digits by which a secret is found; the other 32 are compared


@dataclass(frozen=True, slots=True)
class ClientSecret:
    owner: str  # the API key that made it
    client: str  # who counts for its memory: the key or, without keys, an address
    kind: Literal["realtime", "transcription"]  # of sessions that it opens
    session: bytes  # their settings, as JSON that was checked
    expires_at: int
    digest: bytes

    @property
    def size(self) -> int:
        return OWN_BYTES + len(self.session)


@dataclass(slots=True)
class ClientSecrets:
    clock: Callable[[], float] = time.time
    shares: Shares = field(default_factory=lambda: Shares(MAX_BYTES))
    _by_name: dict[str, ClientSecret] = field(default_factory=dict)
    _expiries: list[tuple[int, str]] = field(default_factory=list)  # a heap

    def make(
        self,
        owner: str,
        client: str,
        kind: Literal["realtime", "transcription"],
        session: bytes,
        seconds: int,
    ) -> tuple[str, int]:
        """The secret, which is nowhere else from here on, and when it expires."""
        self._forget_expired()
        value = SECRET_PREFIX + secrets.token_hex(24)
        expires_at = int(self.clock()) + seconds
        secret = ClientSecret(owner, client, kind, session, expires_at, digest_of_key(value))
        if not self.shares.take(client, secret.size):
            raise Refused(
                429,
                "you have as many client secrets as fit; wait until some have expired",
                kind="rate_limit_error",
                code="too_many_client_secrets",
            )
        name = _name(value)
        self._by_name[name] = secret
        heapq.heappush(self._expiries, (expires_at, name))
        return value, expires_at

    def find(self, value: str) -> ClientSecret | None:
        """A secret may open several sessions until it expires. It is compared by its digest, in a
        time that does not depend on where a guess is wrong."""
        self._forget_expired()
        secret = self._by_name.get(_name(value))
        if secret is None or not hmac.compare_digest(secret.digest, digest_of_key(value)):
            return None
        return secret

    def _forget_expired(self) -> None:
        now = self.clock()
        while self._expiries and self._expiries[0][0] <= now:
            _, name = heapq.heappop(self._expiries)
            secret = self._by_name.pop(name)
            self.shares.give_back(secret.client, secret.size)


def _name(value: str) -> str:
    return value.removeprefix(SECRET_PREFIX)[:_NAME]

"""Who may come in, and how many at once. Used on the event loop, before anything of a request is read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from stretto.server.failures import Refused

NOBODY = "anyone"  # the owner of requests to a server without keys


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys, as digests: comparing them takes the same time however long and however wrong a guess is."""

    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Sequence[str]) -> Keys:
        return cls(tuple(_digest(k) for k in keys))

    def owner(self, headers: Headers) -> str:
        """Which key a request carries: `key1`, `key2` ..."""
        if not self.digests:
            return NOBODY
        guess = _key(headers)
        if guess is None:
            raise _unauthorized("an API key is needed: Authorization: Bearer KEY")
        digest, found = _digest(guess), 0
        for i, known in enumerate(self.digests, start=1):  # all of them, found or not
            found = i if hmac.compare_digest(digest, known) else found
        if not found:
            raise _unauthorized("this API key is not valid")
        return f"key{found}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key") or headers.get("x-api-key")


def _unauthorized(message: str) -> Refused:
    return Refused(
        401, message, kind="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
    )


@dataclass(slots=True)
class Admission:
    """Counts requests that are being answered; more than the limit are turned away, none waits here."""

    limit: int
    limit_per_owner: int  # 0: none
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _by_owner: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.idle.set()

    def check(self, owner: str) -> None:
        """Refuses whom there is no slot for now."""
        if self.running >= self.limit:
            raise self._full(f"the server answers {self.limit} requests at once, and does", "server_busy")
        if self.limit_per_owner and self._by_owner[owner] >= self.limit_per_owner:
            raise self._full(f"{self.limit_per_owner} requests of this API key run already", "rate_limit_exceeded")

    @contextmanager
    def slot(self, owner: str) -> Iterator[None]:
        """One of the slots, from when the request is there to when all work for it has ended."""
        self.check(owner)
        self.running += 1
        self.idle.clear()
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self.running -= 1
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]
            if not self.running:
                self.idle.set()

    @staticmethod
    def _full(message: str, code: str) -> Refused:
        return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)

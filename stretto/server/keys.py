"""The API keys, from the configuration or from a file that may change while the server runs. The
middleware asks `Keys.owner` for each request, on the event loop."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from starlette.datastructures import Headers

from stretto.errors import Invalid
from stretto.server.openai.error_body import Refused

log = logging.getLogger("stretto.server")

NOBODY = "anyone"  # the owner of requests to a server without keys
REREAD_S = 1.0  # the file is checked for changes no more often
SECRET_PREFIX = "ek_"  # of the client secrets that a key's owner may hand out


@dataclass(slots=True)
class Keys:
    """The keys, as digests: comparing them takes the same time however long and however wrong a
    guess is.

    Keys of the file are named by a part of their digest, so that an owner keeps its name when lines
    move."""

    configured: dict[str, bytes]
    file: Path | None = None
    clock: Callable[[], float] = monotonic
    _read: dict[str, bytes] = field(default_factory=dict)
    _stamp: tuple[int, int, int] | None = None  # of the file as it was read: time, size, inode
    _checked_at: float = 0.0

    @classmethod
    def of(
        cls, keys: Sequence[str], file: str | None = None, clock: Callable[[], float] = monotonic
    ) -> Keys:
        """Raises `Invalid` for a file that has none."""
        loaded = cls(
            {f"key{i}": digest_of_key(k) for i, k in enumerate(keys, start=1)},
            Path(file) if file else None,
            clock,
        )
        if loaded.file is not None:
            loaded._stamp = _stamped(loaded.file)
            loaded._read = _read(loaded.file)
            loaded._checked_at = clock()
        return loaded

    @property
    def needed(self) -> bool:
        return bool(self.configured or self.file)

    def owner(self, headers: Headers, other: str | None = None) -> str:
        """The name of the key that a request carries: `key1`, `key2` ... for those of the
        configuration, `key-` and eight letters for those of the file. `other` is a key that came
        outside the headers, from a client that cannot set any."""
        if not self.needed:
            return NOBODY
        self._reread_file()
        guess = key_in(headers) or other
        if guess is None:
            raise _unauthorized("an API key is needed: Authorization: Bearer KEY")
        digest = digest_of_key(guess)
        found = ""
        known = self.configured | self._read
        for name, known_digest in known.items():  # all of them, found or not
            if hmac.compare_digest(digest, known_digest):
                found = name
        if not found and guess.startswith(SECRET_PREFIX):
            raise _unauthorized("a client secret opens /v1/realtime alone, until it expires")
        if not found:
            raise _unauthorized("this API key is not valid")
        return found

    def still_valid(self, owner: str) -> bool:
        """Whether the owner's key is still valid: for connections that were opened with it and stay
        open."""
        if not self.needed:
            return True
        self._reread_file()
        return owner in self.configured or owner in self._read

    def _reread_file(self) -> None:
        """Read the file again if it changed. One that cannot be read, or has no keys, leaves those
        that were there."""
        if self.file is None or self.clock() - self._checked_at < REREAD_S:
            return
        self._checked_at = self.clock()
        stamp = _stamped(self.file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._read = _read(self.file)
        except Invalid as e:
            log.error("API keys stay as they were: %s", e)
        else:
            log.warning("API keys: %d in %s", len(self._read), self.file)


def _stamped(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: Path) -> dict[str, bytes]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise Invalid(
            f"{file}: cannot be read ({getattr(e, 'strerror', None) or 'not text'})", "api_key_file"
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise Invalid(f"{file}: has no keys; one a line, # begins a comment", "api_key_file")
    if not all(key.isascii() and " " not in key for key in keys):
        raise Invalid(f"{file}: keys are words of ASCII letters, one a line", "api_key_file")
    return {f"key-{digest_of_key(k).hex()[:8]}": digest_of_key(k) for k in keys}


def digest_of_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_in(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key") or headers.get("x-api-key")


def _unauthorized(message: str) -> Refused:
    return Refused(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )

"""Which web pages may call the server, and by which host names. The middleware asks `Callers` for
each request.

A web page can make a browser send requests from inside the user's network, with the user's address.
A page cannot forge two headers: `Origin`, which names the page, and `Host`, the name that it asked
for. Without an API key only the server's own page and pages of this machine may call, and a server
that listens on the loopback answers to loopback names alone: a page may let its own name point to
127.0.0.1 (DNS rebinding), but the name stays in `Host`. With an API key any page may call, since it
needs the key."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from starlette.datastructures import Headers

from stretto.config.server import HOST, ORIGIN, ServerConfig
from stretto.server.openai.error_body import Refused

ANY = "*"
PREFLIGHT_SECONDS = 600  # how long a browser may remember what it was allowed


@dataclass(frozen=True, slots=True)
class Callers:
    hosts: frozenset[str] | None  # names beside those of the loopback; None: any
    origins: frozenset[str] | None  # beside the server's own page; None: any
    local_pages: bool  # pages of this machine, whatever their port

    @classmethod
    def of(cls, config: ServerConfig) -> Callers:
        allowed_hosts = frozenset(h.lower() for h in config.allowed_hosts)
        any_host = ANY in allowed_hosts or (
            not allowed_hosts and (config.uds or config.needs_key or not on_loopback(config))
        )
        any_origin = ANY in config.allowed_origins or (
            not config.allowed_origins and config.needs_key
        )
        return cls(
            None if any_host else allowed_hosts | {config.host.lower(), f"[{config.host.lower()}]"},
            None if any_origin else frozenset(o.lower() for o in config.allowed_origins),
            not config.allowed_origins,
        )

    def check_host(self, headers: Headers) -> str:
        """The name and port the client asked for. HTTP demands exactly one: with two, others might
        read the other."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise Refused(
                400, f"a request needs one Host header, got {len(hosts)}", code="bad_host"
            )
        host = hosts[0].lower()
        name = _name_in_host(host)
        if name is None:
            raise Refused(400, f"the Host header {hosts[0][:100]!r} is not a name", code="bad_host")
        if self.hosts is not None and name not in self.hosts and not is_loopback(name):
            message = (
                f"this server is not called {name[:100]}; --allowed-hosts {name[:100]} would let "
                f"it be"
            )
            raise Refused(421, message, code="host_not_allowed")
        return host

    def check_origin(self, origin: str, host: str, scheme: str) -> None:
        """Refuse a page that may not call. `host` and `scheme` are those of the request itself."""
        if not self.allows(origin, host, scheme):
            message = (
                f"pages of {origin[:100]} may not call this server; --allowed-origins would let "
                f"them"
            )
            raise Refused(403, message, kind="permission_error", code="origin_not_allowed")

    def allows(self, origin: str, host: str, scheme: str) -> bool:
        origin = origin.lower()
        if self.origins is None or origin in self.origins:
            return True
        match = ORIGIN.fullmatch(origin)
        if match is None:  # "null" above all: a sandboxed frame, a file, a redirect of anyone
            return False
        # A proxy that speaks TLS to the browser may speak HTTP to us; the other way round it is
        # another page.
        own = match[2] == host and (match[1] == "https" or scheme == "http")
        return own or (self.local_pages and is_loopback(match[3]))

    def cors_headers(self, origin: str, host: str, scheme: str) -> list[tuple[bytes, bytes]]:
        """The headers that let a page of this origin read an answer; none if it may not."""
        if self.origins is None:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin and self.allows(origin, host, scheme):
            return [(b"access-control-allow-origin", origin.encode("latin-1")), _EXPOSED, _VARY]
        return [_VARY]


_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")
_VARY = (b"vary", b"origin")  # or a cache might give one page's answer to another


def preflight_headers(headers: Headers) -> dict[str, str]:
    """What a page may do: all that this server can. The origin was checked, and is named by
    `cors_headers`."""
    return {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }


FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Routes that take files, as forms do."""
VOICES = "/v1/audio/voices"
"""Takes either."""


def check_json(headers: Headers, path: str = "") -> None:
    """A body must say that it is JSON: a foreign page cannot, unless its browser asked us first.
    Forms it can send, and there its `Origin`, which browsers add to every foreign POST, has been
    looked at."""
    content_type = headers.get("content-type", "")
    if path in (*FORMS, VOICES) and is_form(content_type):
        return
    if path in FORMS:
        raise Refused(
            415,
            "a sound is sent as multipart/form-data, in the field file",
            code="unsupported_media_type",
        )
    if content_type.partition(";")[0].strip().lower() != "application/json":
        sent = repr(content_type[:100]) if content_type else "nothing"
        message = f"a request's Content-Type must be application/json, and {sent} was stated"
        raise Refused(415, message, code="unsupported_media_type")


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


@lru_cache(256)
def _name_in_host(host: str) -> str | None:
    match = HOST.fullmatch(host)
    return match[1] if match else None


@lru_cache(256)
def is_loopback(name: str) -> bool:
    """Whether this is this machine under its own name: localhost, 127.0.0.0/8 or ::1."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def on_loopback(config: ServerConfig) -> bool:
    return is_loopback(config.host.lower())


def warning(config: ServerConfig) -> str | None:
    """What to say at the start of a server that anyone on the network may use."""
    if config.uds or config.needs_key or on_loopback(config):
        return None
    return (
        f"listening on {config.host} without an API key: whoever reaches this address may use the "
        f"model; "
        "set a key with --api-key KEY or STRETTO_API_KEY"
    )

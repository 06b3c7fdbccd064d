"""How the server is run: one frozen record, checked when made. Imports nothing heavy.

Each field is also a flag of `stretto serve`, a key of its YAML file and, in capitals after STRETTO_, a variable of
the environment; `settings.py` reads them. The metadata holds what the help says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.errors import Invalid

# A Host header and an Origin header, in small letters. Browsers write both in this form and no other.
_NAME = r"(?:[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])"
HOST_NAME = re.compile(_NAME)
HOST = re.compile(rf"({_NAME})(?::\d{{1,5}})?")
ORIGIN = re.compile(rf"(https?)://(({_NAME})(?::\d{{1,5}})?)")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def setting(default: Any, group: str, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = setting(8000, "address", "0 picks a free port")
    uds: str | None = setting(None, "address", "listen on a Unix socket instead", "PATH")
    root_path: str = setting("", "address", "prefix under which a proxy serves this server", "PREFIX")
    ssl_certfile: str | None = setting(None, "address", "TLS certificate (npm's openai insists on TLS)", "FILE")
    ssl_keyfile: str | None = setting(None, "address", "TLS private key", "FILE")
    ssl_keyfile_password: str | None = setting(None, "address", "of the private key, if it is encrypted", "WORD")

    served_model_name: tuple[str, ...] = setting(
        (), "clients", "names clients may use for the model; the first is reported (default: the model's own)", "NAME"
    )
    api_key: tuple[str, ...] = setting((), "clients", "keys that open /v1 (default: open to all)", "KEY")
    allowed_origins: tuple[str, ...] = setting(
        (), "clients", "web pages that may call this server beside its own; *: any (default: those of this machine; "
        "with an API key, any)", "ORIGIN",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = setting(
        (), "clients", "names under which this server may be called beside localhost; *: any (default: any, but none "
        "without an API key on a loopback address)", "NAME",
    )  # fmt: skip

    max_concurrent: int = setting(64, "limits", "requests answered at once; more are told to come back (429)", "N")
    max_concurrent_per_key: int = setting(0, "limits", "the same for each API key; 0: no limit", "N")
    max_connections: int = setting(1024, "limits", "open connections; beyond, the longest idle one is closed", "N")
    max_header_kb: int = setting(64, "limits", "largest block of request headers, in KiB", "KIB")
    header_timeout: float = setting(10.0, "limits", "a request's headers must have arrived within so long", "SECONDS")
    max_body_mb: float = setting(64.0, "limits", "largest request, in MiB", "MIB")
    max_bodies_mb: float = setting(512.0, "limits", "of all requests that are being read or prepared, in MiB", "MIB")
    min_body_kb_s: float = setting(
        16.0, "limits", "a request must arrive at least so fast, in KiB a second; 0: at any rate", "KIB"
    )
    body_grace: float = setting(5.0, "limits", "before its rate counts, a request has so long", "SECONDS")
    send_timeout: float = setting(30.0, "limits", "a client that takes no data for so long is dropped", "SECONDS")
    body_timeout: float = setting(60.0, "limits", "a request must have arrived within so long", "SECONDS")
    drain_timeout: float = setting(30.0, "limits", "how long running requests may take after SIGTERM", "SECONDS")
    audio_lifetime: float = setting(3600.0, "limits", "how long an answer can be referred to by its id", "SECONDS")
    audio_kept: int = setting(4096, "limits", "how many answers can be referred to", "N")

    log_format: LogFormat = setting("text", "logging", "one line a request, as text or as JSON")  # noqa: RUF009
    log_level: LogLevel = setting("info", "logging", "how much to log")  # noqa: RUF009
    metrics: bool = setting(True, "logging", "serve Prometheus metrics at /metrics")

    def __post_init__(self) -> None:
        checks = {
            "port": 0 <= self.port <= 65535,
            "max_concurrent": self.max_concurrent >= 1,
            "max_concurrent_per_key": self.max_concurrent_per_key >= 0,
            "max_connections": self.max_connections >= 1,
            "max_header_kb": 1 <= self.max_header_kb <= 1024,
            "header_timeout": self.header_timeout > 0,
            "max_body_mb": 0 < self.max_body_mb <= 4096,
            "max_bodies_mb": self.max_bodies_mb >= self.max_body_mb,
            "min_body_kb_s": self.min_body_kb_s >= 0,
            "body_grace": self.body_grace > 0,
            "send_timeout": self.send_timeout > 0,
            "body_timeout": self.body_timeout > 0,
            "drain_timeout": self.drain_timeout >= 0,
            "audio_lifetime": self.audio_lifetime > 0,
            "audio_kept": self.audio_kept >= 0,
            "api_key": all(k.isascii() and k.strip() == k and k for k in self.api_key),
            "allowed_origins": all(o in ("*", "null") or ORIGIN.fullmatch(o.lower()) for o in self.allowed_origins),
            "allowed_hosts": all(h == "*" or HOST_NAME.fullmatch(h.lower()) for h in self.allowed_hosts),
            "served_model_name": all(self.served_model_name),
            "log_format": self.log_format in ("text", "json"),
            "log_level": self.log_level in ("debug", "info", "warning", "error"),
        }
        for name, fine in checks.items():
            if not fine:
                raise Invalid(f"{name} is out of range: {self._shown(name)}", name)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise Invalid("TLS needs both ssl_certfile and ssl_keyfile", "ssl_certfile")

    def _shown(self, name: str) -> str:
        return "(not shown)" if name == "api_key" else repr(getattr(self, name))

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @property
    def max_bodies_bytes(self) -> int:
        return int(self.max_bodies_mb * (1 << 20))

    @property
    def url(self) -> str:
        """How a client on this machine reaches the server."""
        if self.uds:
            return f"unix:{self.uds}"
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http{'s' if self.ssl_certfile else ''}://{host}:{self.port}"

"""How the server is run: one frozen record, checked when made. Imports nothing heavy.

Each field is also a flag of `stretto serve`, a key of its YAML file and, in capitals after
STRETTO_, a variable of the environment; `loader.py` reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Literal

from stretto.config.setting import check_finite, setting, tuning
from stretto.errors import Invalid
from stretto.params import ChunkSizes

# A Host header and an Origin header, in small letters. Browsers write both in this form and no
# other.
_NAME = r"(?:[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])"
HOST_NAME = re.compile(_NAME)
HOST = re.compile(rf"({_NAME})(?::\d{{1,5}})?")
MEDIA_DOMAIN = re.compile(r"(http://)?((?:[a-z0-9_-]+\.)+[a-z][a-z0-9-]*)(?::(\d{1,5}))?")
ORIGIN = re.compile(rf"(https?)://(({_NAME})(?::\d{{1,5}})?)")
# Without user and password: its key comes in OTEL_EXPORTER_OTLP_HEADERS.
COLLECTOR = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+(/[A-Za-z0-9._/~-]*)?")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

WHOLE = 8192
"""Frames in a packet that holds a whole answer: more than ten minutes, and still one chunk of a
link."""


def _is_key(word: str) -> bool:
    return bool(word) and word.isascii() and word.strip() == word


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting(
        "127.0.0.1", "address", "address to listen on; 0.0.0.0 opens the server to the network"
    )
    port: int = setting(8000, "address", "0 picks a free port")
    uds: str | None = setting(None, "address", "listen on a Unix socket instead", "PATH")
    root_path: str = setting(
        "", "address", "prefix under which a proxy serves this server", "PREFIX"
    )
    ssl_certfile: str | None = setting(
        None, "address", "TLS certificate (npm's openai insists on TLS)", "FILE"
    )
    ssl_keyfile: str | None = setting(None, "address", "TLS private key", "FILE")
    ssl_keyfile_password: str | None = setting(
        None, "address", "of the private key, if it is encrypted", "WORD"
    )

    served_model_name: tuple[str, ...] = setting(
        (),
        "model",
        "names clients may use for the model; the first is reported (default: the model's own)",
        "NAME",
    )
    api_key: tuple[str, ...] = setting(
        (), "clients", "keys that open /v1 (default: open to all)", "KEY"
    )
    api_key_file: str | None = setting(
        None,
        "clients",
        "more keys, one a line; read again when it changes, so that keys can be exchanged",
        "FILE",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "clients",
        "web pages that may call this server beside its own; *: any (default: those of this "
        "machine; with an API key, any)",
        "ORIGIN",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "clients",
        "names under which this server may be called beside localhost; *: any (default: any, "
        "but none without an API key on a loopback address)",
        "NAME",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "clients",
        "hosts, with all below them, from which pictures, sound and video that requests name by "
        "address are fetched: over https alone, or http too as http://NAME; public addresses "
        "only (default: nothing is fetched)",
        "NAME",
    )

    trusted_proxies: tuple[str, ...] = setting(
        (),
        "clients",
        "addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto say who "
        "calls; *: any (default: nobody's are believed)",
        "ADDRESS",
    )

    max_concurrent: int = setting(
        64, "limits", "requests answered at once (default: twice --max-rows)", "N"
    )
    max_concurrent_share: float = setting(
        0.875,
        "limits",
        "part of these places that one API key (without keys: address) may have, and one place at "
        "least; its other requests wait, so that others find a place",
        "PART",
    )
    max_live: int = setting(
        32,
        "limits",
        "texts that are read while they are written, at once; none of the API keys (without "
        "keys: addresses) has over half of them (default: --max-rows)",
        "N",
    )
    max_queue: int = setting(
        256,
        "limits",
        "requests that may wait for one of these places, in order; more are refused (429)",
        "N",
    )
    queue_timeout: float = setting(
        60.0,
        "limits",
        "time that a request may wait for a place; then it is refused (429)",
        "SECONDS",
    )
    max_concurrent_per_key: int = setting(
        0,
        "limits",
        "requests of one API key (without keys: address) answered at once; more are refused "
        "(429) and do not wait; 0: no limit, but when others wait the next place goes to "
        "whoever has the fewest",
        "N",
    )
    max_connections: int = setting(
        1024, "limits", "open connections; beyond, the longest idle one is closed", "N"
    )
    max_header_kb: int = tuning(64, "largest block of request headers, in KiB")
    header_timeout: float = setting(
        10.0, "limits", "time in which a request's headers must arrive", "SECONDS"
    )
    max_body_mb: float = setting(64.0, "limits", "largest request body, in MiB", "MIB")
    max_bodies_mb: float = setting(
        512.0,
        "limits",
        "bodies of all requests that are being read or prepared, in MiB; none holds over half",
        "MIB",
    )
    min_body_kb_s: float = tuning(
        16.0, "slowest rate at which a request body may arrive, in KiB a second; 0: any"
    )
    body_grace: float = tuning(5.0, "seconds before the rate of a request body is checked")
    send_timeout: float = setting(
        30.0, "limits", "time after which a client that takes no data is dropped", "SECONDS"
    )
    body_timeout: float = setting(
        60.0, "limits", "time in which a request's body must arrive", "SECONDS"
    )
    drain_timeout: float = setting(
        30.0, "limits", "time that running requests may take after SIGTERM", "SECONDS"
    )
    media_timeout: float = tuning(10.0, "seconds in which each remote file must arrive")
    media_fetches: int = tuning(16, "remote files that are fetched at once")
    audio_lifetime: float = setting(
        3600.0, "limits", "time for which a spoken answer can be referred to by its id", "SECONDS"
    )
    audio_kept: int = tuning(4096, "spoken answers that can be referred to by their ids")

    streaming: bool = setting(
        True, "speech", "send sound while speech is being made; off: when all of it is made"
    )
    first_frames: int = setting(1, "speech", "codec frames in the first packet of sound", "N")
    each_frames: int = setting(8, "speech", "most frames in a later packet", "N")
    packet_ramp: int = tuning(
        2, "factor by which packets of speech grow from the first to the largest; 0: at once"
    )

    realtime_sessions: int = setting(
        128, "realtime", "sessions at once; more are refused (429)", "N"
    )
    realtime_sessions_per_key: int = setting(
        0,
        "realtime",
        "sessions of one API key (without keys: address) at once; 0: its share, at most half",
        "N",
    )
    realtime_minutes: float = setting(
        60.0, "realtime", "longest time that a session may last", "MINUTES"
    )
    realtime_idle: float = setting(
        600.0, "realtime", "time after which a session without events is closed", "SECONDS"
    )
    realtime_held_mb: float = setting(
        256.0,
        "realtime",
        "sound and pictures that a session may hold, its conversation included, in MiB",
        "MIB",
    )
    realtime_total_mb: float = setting(
        2048.0,
        "realtime",
        "the same of all sessions, with messages that are still arriving, in MiB; none of the "
        "API keys (without keys: addresses) holds over half",
        "MIB",
    )
    realtime_lead: float = tuning(
        10.0, "seconds by which a realtime session may send sound ahead of its playback"
    )
    realtime_speculate: bool = setting(
        True,
        "realtime",
        "begin to answer at a short pause, before the turn has certainly ended; the answers are "
        "the same",
    )

    log_format: LogFormat = setting("text", "logging", "one line a request, as text or as JSON")  # noqa: RUF009
    log_level: LogLevel = setting("info", "logging", "how much to log")  # noqa: RUF009
    metrics: bool = setting(True, "logging", "serve Prometheus metrics at /metrics")
    metrics_port: int | None = setting(
        None,
        "logging",
        "serve them at this port of --host, and not where requests are taken; 0 picks a free one",
        "N",
    )
    metrics_key: tuple[str, ...] = setting(
        (), "logging", "keys that open /metrics (default: open to all)", "KEY"
    )

    otlp_endpoint: str | None = setting(
        None,
        "logging",
        "send traces of requests to this OpenTelemetry collector (OTLP over HTTP), such as "
        "http://127.0.0.1:4318; needs the extra stretto[otel]",
        "URL",
    )

    def __post_init__(self) -> None:
        check_finite(self)
        checks = {
            "port": 0 <= self.port <= 65535,
            "metrics_port": self.metrics_port is None or 0 <= self.metrics_port <= 65535,
            "max_concurrent": self.max_concurrent >= 1,
            "max_concurrent_share": 0 < self.max_concurrent_share <= 1,
            "max_live": self.max_live >= 2,
            "max_queue": self.max_queue >= 0,
            "queue_timeout": self.queue_timeout > 0,
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
            "media_timeout": self.media_timeout > 0,
            "media_fetches": self.media_fetches >= 2,
            "audio_lifetime": self.audio_lifetime > 0,
            "audio_kept": self.audio_kept >= 0,
            "first_frames": 1 <= self.first_frames <= self.each_frames,
            "packet_ramp": self.packet_ramp == 0 or self.packet_ramp >= 2,
            "realtime_sessions": self.realtime_sessions >= 1,
            "realtime_sessions_per_key": self.realtime_sessions_per_key >= 0,
            "realtime_minutes": self.realtime_minutes > 0,
            "realtime_idle": self.realtime_idle > 0,
            "realtime_held_mb": self.realtime_held_mb >= 1,
            "realtime_total_mb": self.realtime_total_mb >= self.realtime_held_mb,
            "realtime_lead": self.realtime_lead > 0,
            "api_key": all(map(_is_key, self.api_key)),
            "metrics_key": all(map(_is_key, self.metrics_key)),
            "allowed_origins": all(
                o in ("*", "null") or ORIGIN.fullmatch(o.lower()) for o in self.allowed_origins
            ),
            "allowed_media_domains": all(
                MEDIA_DOMAIN.fullmatch(d.lower()) for d in self.allowed_media_domains
            ),
            "trusted_proxies": all(a == "*" or _is_network(a) for a in self.trusted_proxies),
            "allowed_hosts": all(
                h == "*" or HOST_NAME.fullmatch(h.lower()) for h in self.allowed_hosts
            ),
            "otlp_endpoint": not self.otlp_endpoint
            or bool(COLLECTOR.fullmatch(self.otlp_endpoint)),
            "served_model_name": all(self.served_model_name),
            "log_format": self.log_format in ("text", "json"),
            "log_level": self.log_level in ("debug", "info", "warning", "error"),
        }
        for name, fine in checks.items():
            if not fine:
                raise Invalid(f"{name} is out of range: {self._shown(name)}", name)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise Invalid("TLS needs both ssl_certfile and ssl_keyfile", "ssl_certfile")

    @property
    def realtime_held_bytes(self) -> int:
        return int(self.realtime_held_mb * (1 << 20))

    @property
    def realtime_total_bytes(self) -> int:
        return int(self.realtime_total_mb * (1 << 20))

    @property
    def places_per_client(self) -> int:
        return max(1, int(self.max_concurrent * self.max_concurrent_share))

    @property
    def engine_requests(self) -> int:
        """How many requests the engine may have at once: those that are answered, texts that wait
        for more, and of each session one that reads ahead and one that transcribes."""
        return self.max_concurrent + self.max_live + 2 * self.realtime_sessions

    @property
    def packets(self) -> ChunkSizes:
        """Frames in the packets of each answer's sound."""
        if not self.streaming:
            return ChunkSizes(WHOLE, WHOLE, None)
        return ChunkSizes(self.first_frames, self.each_frames, self.packet_ramp or None)

    @property
    def needs_key(self) -> bool:
        return bool(self.api_key or self.api_key_file)

    def _shown(self, name: str) -> str:
        return "(not shown)" if name in ("api_key", "metrics_key") else repr(getattr(self, name))

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @property
    def max_bodies_bytes(self) -> int:
        return int(self.max_bodies_mb * (1 << 20))

    @property
    def url(self) -> str:
        """How a client on this machine reaches the server."""
        return f"unix:{self.uds}" if self.uds else self._url(self.port)

    @property
    def metrics_url(self) -> str | None:
        """And its metrics, if they have a port of their own."""
        return (
            None
            if self.metrics_port is None or not self.metrics
            else f"{self._url(self.metrics_port)}/metrics"
        )

    def _url(self, port: int) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.ssl_certfile else "http"
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{port}"

"""What the engine and its hosts send each other about a host's own life: what it is, how far it is,
which links it has, how it is. Messages about requests, and how all of them travel: `requests.py`.
Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from stretto.types import SECRET_BYTES, Wire

Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]

# -- engine to host


class Configure(Wire, frozen=True, tag="configure"):
    """The first message: what this host is. `build` names the function that makes its stages,
    `settings` are those of `HostSettings`, `links` all links of the pipeline, as sender and
    receiver, and `loading_later` the stages of each host that will load on the same card after this
    one."""

    model: str
    build: str
    stages: tuple[str, ...]
    settings: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    loading_later: tuple[tuple[str, ...], ...] = ()

    @property
    def others(self) -> bool:
        """Whether the pipeline has stages in other hosts."""
        return any(stage not in self.stages for link in self.links for stage in link)


class Listen(Wire, frozen=True, tag="listen"):
    link: str
    connector: str
    generation: int
    secret: Secret
    # address of this end, at which the other one reaches it
    host: str = "127.0.0.1"
    # settings of the connector
    details: dict[str, str] = msgspec.field(default_factory=dict)


class Connect(Wire, frozen=True, tag="connect"):
    link: str
    connector: str
    # as the listening host gave it: the engine only passes it on
    endpoint: bytes
    generation: int
    # as the listening host was given
    secret: Secret
    # address of this end
    host: str = "127.0.0.1"
    details: dict[str, str] = msgspec.field(default_factory=dict)


class Unlink(Wire, frozen=True, tag="unlink"):
    """Close this end of a link; its requests have been cancelled."""

    link: str


class Ping(Wire, frozen=True, tag="ping"):
    number: int


class Quit(Wire, frozen=True, tag="quit"):
    pass


LifeToHost = Configure | Listen | Connect | Unlink | Ping | Quit


# -- host to engine


class Loading(Wire, frozen=True, tag="loading"):
    stage: str
    what: str


class Ready(Wire, frozen=True, tag="ready"):
    stages: tuple[str, ...]
    load_s: float
    memory: dict[str, int] = msgspec.field(default_factory=dict)


class Broken(Wire, frozen=True, tag="broken"):
    """The host cannot go on (a bad checkpoint, no memory); it exits after this."""

    kind: str
    message: str


class Listening(Wire, frozen=True, tag="listening"):
    link: str
    # as the engine gave it: a link that is made anew has a higher one
    generation: int
    endpoint: bytes


class Linked(Wire, frozen=True, tag="linked"):
    link: str
    generation: int


class LinkDown(Wire, frozen=True, tag="link_down"):
    link: str
    generation: int
    message: str


class Stats(Wire, frozen=True, tag="stats"):
    # of the ping it answers
    number: int
    values: dict[str, float]
    # the host's monotonic clock when it answered
    clock: float = 0.0
    # where they are recorded: see `observe.recorder`
    spans: tuple[tuple[str, str, int, int], ...] = ()


LifeFromHost = Loading | Ready | Broken | Listening | Linked | LinkDown | Stats

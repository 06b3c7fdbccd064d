"""What the orchestrator and its hosts say to each other. Small and typed; no tensors but a prompt's features on their
way in and samples on their way out, which ride behind a message as raw bytes. Imports no torch.

A channel carries frames: `u32 header length | u32 blob length | header (msgpack) | blob`. It is a socket pair between
parent and child, so it has no name, nobody else can join it, and either side sees the other's death at once."""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from stretto.errors import WireError
from stretto.prompt.packed import Bytes, PromptMeta
from stretto.types import SECRET_BYTES, RequestId, SamplingParams

PREFIX = struct.Struct("<II")
MAX_HEADER = 64 << 20
MAX_BLOB = 1 << 30

Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# -- orchestrator to host


class Sampling(Wire, frozen=True):
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int

    @classmethod
    def of(cls, p: SamplingParams) -> Sampling:
        return cls(p.temperature, p.top_k, p.top_p, p.repetition_penalty, p.seed)

    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.seed)


class Configure(Wire, frozen=True, tag="configure"):
    """The first message: what this host is. `settings` is the engine's configuration, see `HostSettings`."""

    model: str
    stages: tuple[str, ...]
    settings: dict[str, Any]


class Listen(Wire, frozen=True, tag="listen"):
    link: str
    connector: str
    generation: int
    secret: Secret


class Connect(Wire, frozen=True, tag="connect"):
    link: str
    connector: str
    endpoint: bytes  # as the listening host gave it: the orchestrator only passes it on
    generation: int
    secret: Secret  # as the listening host was given


class Unlink(Wire, frozen=True, tag="unlink"):
    """Close this end of a link; its requests have been cancelled."""

    link: str


class Admit(Wire, frozen=True, tag="admit"):
    """A request is coming: every stage of it learns so at once."""

    request: RequestId
    prompt: PromptMeta
    speak: bool
    voice: str | None
    text: Sampling
    code0: Sampling
    residual: Sampling
    max_text_tokens: Positive
    max_frames: Positive
    min_text_tokens: int = 0
    min_frames: int = 0
    first_frames: Positive = 1
    each_frames: Positive = 1
    ramp: int | None = 2
    priority: int = 0
    want_codes: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    spoken: tuple[int, ...] | None = None  # read these tokens aloud; there is no thinker in it
    media: bytes = b""  # a digest of all media of the prompt, for the prefix caches
    cache_root: bytes = b""  # prefix caches are shared by requests of the same root: a digest of the owner, or nothing


class Features(Wire, frozen=True, tag="features"):
    """A piece of the features of a request that will be announced, behind this message. Pieces come in order; large
    features come so, and not behind `Admit`, so that other messages can go between them."""

    request: RequestId
    size: Positive  # of all pieces


class Cancel(Wire, frozen=True, tag="cancel"):
    request: RequestId


class StopText(Wire, frozen=True, tag="stop_text"):
    """The text is complete as it is (a stop string was found): end it here, and speak what has been said."""

    request: RequestId


class Throttle(Wire, frozen=True, tag="throttle"):
    """The listener is slow: make no more for now (or go on)."""

    request: RequestId
    on: bool


class Ping(Wire, frozen=True, tag="ping"):
    number: int


class Quit(Wire, frozen=True, tag="quit"):
    pass


ToHost = Configure | Listen | Connect | Unlink | Features | Admit | Cancel | StopText | Throttle | Ping | Quit


# -- host to orchestrator


class Loading(Wire, frozen=True, tag="loading"):
    stage: str
    what: str


class Ready(Wire, frozen=True, tag="ready"):
    stages: tuple[str, ...]
    load_s: float
    memory: dict[str, int] = {}


class Broken(Wire, frozen=True, tag="broken"):
    """The host cannot go on (a bad checkpoint, no memory); it exits after this."""

    kind: str
    message: str


class Listening(Wire, frozen=True, tag="listening"):
    link: str
    generation: int  # as the orchestrator gave it: a link that is made anew has a higher one
    endpoint: bytes


class Linked(Wire, frozen=True, tag="linked"):
    link: str
    generation: int


class LinkDown(Wire, frozen=True, tag="link_down"):
    link: str
    generation: int
    message: str


class Text(Wire, frozen=True, tag="text"):
    request: RequestId
    ids: tuple[TokenId, ...]


class Codes(Wire, frozen=True, tag="codes"):
    """Frames from `start` on; the blob holds int32 codes."""

    request: RequestId
    start: int


class Pcm(Wire, frozen=True, tag="pcm"):
    """Samples from `start` on; the blob holds float32."""

    request: RequestId
    start: int
    frames: int


class Ended(Wire, frozen=True, tag="ended"):
    """A stage is done with a request. `marks` are the times (monotonic clock) at which its outputs came."""

    request: RequestId
    stage: str
    reason: str
    begun: float
    marks: tuple[float, ...] = ()
    cached: int = 0
    chunks: tuple[float, ...] = ()  # when the prompt's chunks were done, but for the last


class Failed(Wire, frozen=True, tag="failed"):
    """A request cannot be finished; `kind` names the error class."""

    request: RequestId
    stage: str
    kind: str
    message: str


class Stats(Wire, frozen=True, tag="stats"):
    number: int  # of the ping it answers
    values: dict[str, float]


FromHost = Loading | Ready | Broken | Listening | Linked | LinkDown | Text | Codes | Pcm | Ended | Failed | Stats


_encoder = msgspec.msgpack.Encoder()
_to_host = msgspec.msgpack.Decoder(ToHost)
_from_host = msgspec.msgpack.Decoder(FromHost)


def encode(message: ToHost | FromHost, blob: Bytes = b"") -> bytes:
    """The frame of a message, up to its blob (send that right behind)."""
    header = _encoder.encode(message)
    return PREFIX.pack(len(header), len(blob)) + header


def lengths(prefix: Bytes) -> tuple[int, int]:
    header, blob = PREFIX.unpack(prefix)
    if header > MAX_HEADER or blob > MAX_BLOB:
        raise WireError(f"a control frame of {header} + {blob} bytes")
    return header, blob


def decode_to_host(header: Bytes) -> ToHost:
    message: ToHost = _decode(_to_host, header)
    return message


def decode_from_host(header: Bytes) -> FromHost:
    message: FromHost = _decode(_from_host, header)
    return message


def _decode(decoder: Any, header: Bytes) -> Any:
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:  # the last two come as they are
        raise WireError(f"not a control message: {e}") from None

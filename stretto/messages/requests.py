"""What the engine and its hosts say to each other. Small and typed; no tensors but a prompt's
features on their way in and samples on their way out, which ride behind a message as raw bytes.
Here are those about requests; those of a host's own life are in `hosts.py`. Imports no torch.

A channel carries frames: `u32 header length | u32 blob length | header (msgpack) | blob`. A host's
end is a socket pair between parent and child, so it has no name, nobody else can join it, and
either side sees the other's death at once. To another machine, an agent relays the same bytes
(`engine/remote_host.py`)."""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from stretto.errors import WireError
from stretto.messages.hosts import LifeFromHost, LifeToHost
from stretto.preprocess.packed_prompt import Bytes, PackedPiece, PackedPrompt
from stretto.types import RequestId, Wire

PREFIX = struct.Struct("<II")
MAX_HEADER = 64 << 20
MAX_BLOB = 1 << 30

Positive = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


# -- engine to host


class Admit(Wire, frozen=True, tag="admit"):
    """A request is coming: every stage of it learns so at once."""

    request: RequestId
    prompt: PackedPrompt
    # those of this host on its way, with their parameters: each stage knows its type
    stages: dict[str, msgspec.Raw]
    priority: int = 0
    # prefix caches are shared by requests of the same root: a digest of the owner, or nothing
    cache_root: bytes = b""
    # whose turn it is, where requests wait for each other: a digest
    client: bytes = b""
    # stages of other hosts on its way
    elsewhere: tuple[str, ...] = ()


class Features(Wire, frozen=True, tag="features"):
    """A piece of the features of a request that will be announced, behind this message. Pieces come
    in order; large features come so, and not behind `Admit`, so that other messages can go between
    them."""

    request: RequestId
    # of all pieces
    size: Positive


class MediaData(Wire, frozen=True, tag="supply"):
    """Features that a stage asked for (`MediaRequest`), behind this message or ahead of it like
    those of an announcement."""

    request: RequestId
    stage: str
    pieces: tuple[PackedPiece, ...]


class Cancel(Wire, frozen=True, tag="cancel"):
    request: RequestId


class StepInputs(Wire, frozen=True, tag="step_inputs"):
    """More tokens for the steps of a stage: of a text that is read aloud while it is written."""

    request: RequestId
    stage: str
    ids: tuple[TokenId, ...]
    last: bool = False


class Finish(Wire, frozen=True, tag="finish"):
    """What a stage has made is all there shall be (a stop string was found): it ends here, in good
    order, and the stages behind it go on with what they have got."""

    request: RequestId
    stage: str


class Throttle(Wire, frozen=True, tag="throttle"):
    """The listener is slow: make no more for now (or go on)."""

    request: RequestId
    on: bool


ToHost = LifeToHost | Features | Admit | MediaData | StepInputs | Cancel | Finish | Throttle


# -- host to engine


class Text(Wire, frozen=True, tag="text"):
    request: RequestId
    ids: tuple[TokenId, ...]
    # Of each id, if the request asks: its log probability, and the likeliest ids with theirs.
    logprobs: tuple[tuple[float, tuple[tuple[TokenId, float], ...]], ...] = ()


class Codes(Wire, frozen=True, tag="codes"):
    """Frames from `start` on; the blob holds int32 codes, `width` for each."""

    request: RequestId
    start: int
    width: Positive


class Pcm(Wire, frozen=True, tag="pcm"):
    """Samples from `start` on; the blob holds float32."""

    request: RequestId
    start: int
    frames: int


class ProductData(Wire, frozen=True, tag="product"):
    """What a request has made that is neither text nor sound, in the blob: a voice."""

    request: RequestId


class Ended(Wire, frozen=True, tag="ended"):
    """A stage is done with a request. `marks` are the times (monotonic clock) at which its outputs
    came."""

    request: RequestId
    stage: str
    reason: str
    begun: float
    marks: tuple[float, ...] = ()
    cached: int = 0
    # when the prompt's chunks were done, but for the last
    chunks: tuple[float, ...] = ()
    # pieces of media that it ran through its encoders
    encoded: int = 0
    # when the last of them was handed to the device; on a CPU, when it was done
    encoded_at: float = 0.0


class Working(Wire, frozen=True, tag="working"):
    """Nothing came of a request yet, but a stage is at it."""

    request: RequestId
    stage: str


class MediaRequest(Wire, frozen=True, tag="lacking"):
    """A stage needs the features of these pieces of a prompt, which were not along."""

    request: RequestId
    stage: str
    digests: tuple[bytes, ...]


class Failed(Wire, frozen=True, tag="failed"):
    """A request cannot be finished; `kind` names the error class, `param` the field that is at
    fault."""

    request: RequestId
    stage: str
    kind: str
    message: str
    param: str | None = None


FromHost = LifeFromHost | Text | Codes | Pcm | ProductData | Ended | Working | MediaRequest | Failed


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
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
    ) as e:
        # the last two come as they are
        raise WireError(f"not a control message: {e}") from None

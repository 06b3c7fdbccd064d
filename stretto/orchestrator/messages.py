"""What the orchestrator and its hosts say to each other. Small and typed; no tensors but a prompt's features on their
way in and samples on their way out, which ride behind a message as raw bytes. Imports no torch.

A channel carries frames: `u32 header length | u32 blob length | header (msgpack) | blob`. It is a socket pair between
parent and child, so it has no name, nobody else can join it, and either side sees the other's death at once."""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.errors import WireError
from stretto.prompt.prompt import AudioClip, Patches, Prompt
from stretto.types import RequestId, SamplingParams

PREFIX = struct.Struct("<II")
MAX_HEADER = 64 << 20
MAX_BLOB = 1 << 30
MAX_PATCHES = 64  # of a picture, for each token of the prompt: more than any model merges into one

Positive = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Bytes = bytes | memoryview


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# -- prompts


class ArrayMeta(Wire, frozen=True):
    """A float32 array in the blob."""

    shape: tuple[int, ...]
    offset: int


class PatchMeta(Wire, frozen=True):
    grid: tuple[int, int, int]
    seconds: float
    values: ArrayMeta | None  # None: the host needs the grid alone


class PromptMeta(Wire, frozen=True):
    ids: tuple[int, ...]
    audios: tuple[ArrayMeta | None, ...] = ()
    images: tuple[PatchMeta, ...] = ()
    videos: tuple[PatchMeta, ...] = ()
    audio_in_video: bool = False


def pack_prompt(prompt: Prompt, features: bool) -> tuple[PromptMeta, bytes]:
    """A prompt as a message part and a blob; without `features` only what tells the positions."""
    parts: list[bytes] = []
    size = 0

    def put(a: npt.NDArray[np.float32]) -> ArrayMeta | None:
        nonlocal size
        if not features:
            return None
        meta = ArrayMeta(a.shape, size)
        parts.append(np.ascontiguousarray(a).tobytes())
        size += a.nbytes
        return meta

    meta = PromptMeta(
        prompt.ids,
        tuple(put(a.mel) for a in prompt.audios),
        tuple(PatchMeta(p.grid, p.seconds_per_grid, put(p.values)) for p in prompt.images),
        tuple(PatchMeta(p.grid, p.seconds_per_grid, put(p.values)) for p in prompt.videos),
        prompt.audio_in_video,
    )
    return meta, b"".join(parts)


def media_digest(prompt: Prompt) -> bytes:
    """What the ids of a prompt do not tell: a digest of all its media together (coarse, and never wrong)."""
    if not (prompt.audios or prompt.images or prompt.videos):
        return b""
    digest = blake2b(digest_size=16)
    for clip in prompt.audios:
        digest.update(np.ascontiguousarray(clip.mel).data)
    for p in (*prompt.images, *prompt.videos):
        digest.update(repr((p.grid, p.seconds_per_grid)).encode())
        digest.update(np.ascontiguousarray(p.values).data)
    return digest.digest()


def unpack_prompt(meta: PromptMeta, blob: bytes) -> Prompt:
    none = np.empty((0, 0), np.float32)

    def get(a: ArrayMeta | None) -> npt.NDArray[np.float32]:
        if a is None:
            return none
        count = math.prod(a.shape)
        if min(a.offset, *a.shape) < 0 or a.offset + 4 * count > len(blob):
            raise WireError(f"array {a.shape} at {a.offset} is not within a blob of {len(blob)} bytes")
        # A copy: torch wants memory that it may write to.
        return np.frombuffer(blob, np.float32, count, a.offset).reshape(a.shape).copy()

    def patches(p: PatchMeta) -> Patches:
        # A grid is laid out before it is compared with the prompt, so it must not be out of all proportion to it.
        if min(p.grid) < 1 or math.prod(p.grid) > MAX_PATCHES * len(meta.ids):
            raise WireError(f"a grid of {p.grid} for a prompt of {len(meta.ids)} tokens")
        return Patches(get(p.values), p.grid, p.seconds)

    return Prompt(
        meta.ids,
        tuple(AudioClip(get(a)) for a in meta.audios),
        tuple(map(patches, meta.images)),
        tuple(map(patches, meta.videos)),
        meta.audio_in_video,
    )


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
    secret: bytes = b""
    host: str = "127.0.0.1"


class Connect(Wire, frozen=True, tag="connect"):
    link: str
    connector: str
    endpoint: bytes  # as the listening host gave it: the orchestrator only passes it on
    generation: int
    secret: bytes = b""


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


ToHost = Configure | Listen | Connect | Unlink | Admit | Cancel | StopText | Throttle | Ping | Quit


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


def encode(message: ToHost | FromHost, blob: bytes = b"") -> bytes:
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

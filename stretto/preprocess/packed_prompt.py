"""A prompt between processes: token ids and the sizes of its media as one small typed struct, the
media's features as raw bytes behind it.

`pack` makes it, in the prompt worker or in a thread of the engine. The engine passes it on as it
is; only the host of a stage makes a `Prompt` of it again (`PackedPrompt.unpack`). Plain numpy and
msgspec; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.errors import WireError
from stretto.preprocess.pool.memfile import MemFileSlice
from stretto.preprocess.prompt import DIGEST_BYTES, AudioClip, Patches, Piece, Prompt
from stretto.types import Wire

Bytes = bytes | bytearray | memoryview
MAX_PATCHES = 64  # of a picture, for each token of the prompt: more than any model merges into one


class PackedPiece(Wire, frozen=True):
    """Float32 features, and where they lie among the bytes behind the prompt."""

    shape: tuple[int, ...]
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    offset: int | None  # None: they are not sent along; a stage that needs them asks for them


class PackedPatches(Wire, frozen=True):
    grid: tuple[int, int, int]
    seconds: float
    values: PackedPiece


class PromptFeatures:
    """The features of a prompt in the engine's process. A `MemFileSlice` closes its file when the
    last reference to it goes.

    `on_demand`: pieces that stages may ask for by digest, since not all are among `data`."""

    def __init__(
        self, data: Bytes | MemFileSlice, on_demand: Mapping[bytes, Piece] | None = None
    ) -> None:
        self.data = data
        self.on_demand = on_demand or {}


class PackedPrompt(Wire, frozen=True):
    """Token ids are packed once, by whoever built the prompt, and unpacked once by each host."""

    token_ids: bytes  # int32, little-endian
    audios: tuple[tuple[PackedPiece, ...], ...] = ()
    images: tuple[PackedPatches, ...] = ()
    videos: tuple[PackedPatches, ...] = ()
    audio_in_video: bool = False
    # of a text that is read aloud and stands beside the prompt, packed like `token_ids`
    tts_token_ids: bytes | None = None
    # Never on the wire: messages to hosts are made of `for_host`, and the bytes follow them.
    features: PromptFeatures | None = None

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> PackedPrompt:
        """A prompt of text alone."""
        return cls(pack_ids(ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def ids(self) -> tuple[int, ...]:
        return unpack_ids(self.token_ids)

    @property
    def tts_ids(self) -> tuple[int, ...] | None:
        return None if self.tts_token_ids is None else unpack_ids(self.tts_token_ids)

    def for_host(self, *, with_features: bool) -> PackedPrompt:
        """The prompt as it is announced to a host. A host that encodes nothing does not learn where
        features lie: it needs only the digests, to tell positions and media apart."""
        prompt = msgspec.structs.replace(self, features=None, tts_token_ids=None)
        return prompt if with_features or not self.pieces() else prompt._without_offsets()

    def _without_offsets(self) -> PackedPrompt:
        def bare(p: PackedPiece) -> PackedPiece:
            return PackedPiece(p.shape, p.digest, None)

        def bare_patches(p: PackedPatches) -> PackedPatches:
            return PackedPatches(p.grid, p.seconds, bare(p.values))

        return msgspec.structs.replace(
            self,
            audios=tuple(tuple(map(bare, clip)) for clip in self.audios),
            images=tuple(map(bare_patches, self.images)),
            videos=tuple(map(bare_patches, self.videos)),
        )

    def pieces(self) -> list[PackedPiece]:
        return [
            *(p for clip in self.audios for p in clip),
            *(p.values for p in (*self.images, *self.videos)),
        ]

    def feature_bytes(self) -> bytes:
        """A copy of all features that are sent along."""
        return bytes(self.features.data) if self.features is not None else b""

    def check(self) -> None:
        """Refuses ids and places that cannot be: the prompt may come from another process."""
        size = len(self.features.data) if self.features is not None else 0
        for p in self.pieces():
            _check_place(p, size)
        for ids in (self.token_ids, self.tts_token_ids or b""):
            _check_ids(ids)

    def media(self) -> Prompt:
        """The media by what is known of them: no ids, no features."""

        def known(p: PackedPiece) -> Piece:
            return Piece(p.shape, p.digest, None)

        def patches(p: PackedPatches) -> Patches:
            return Patches(known(p.values), p.grid, p.seconds)

        audios = tuple(AudioClip(tuple(map(known, clip))) for clip in self.audios)
        return Prompt(
            (), audios, tuple(map(patches, self.images)), tuple(map(patches, self.videos))
        )

    def unpack(self, features: Bytes) -> Prompt:
        """The prompt, with arrays that are views of `features` (see `unpack_pieces`)."""
        pieces = iter(unpack_pieces(self.pieces(), features))
        ids = self.ids

        def patches(p: PackedPatches) -> Patches:
            # A grid is laid out before it is compared with the prompt, so it must not be out of
            # all proportion to it.
            if min(p.grid) < 1 or math.prod(p.grid) > MAX_PATCHES * len(ids):
                raise WireError(f"a grid of {p.grid} for a prompt of {len(ids)} tokens")
            return Patches(next(pieces), p.grid, p.seconds)

        return Prompt(
            ids,
            tuple(AudioClip(tuple(islice(pieces, len(clip)))) for clip in self.audios),
            tuple(map(patches, self.images)),
            tuple(map(patches, self.videos)),
            self.audio_in_video,
        )


def pack(
    prompt: Prompt,
    tts_ids: Sequence[int] | None = None,
    known: Container[bytes] = (),
    on_demand: Mapping[bytes, Piece] | None = None,
) -> PackedPrompt:
    """Pack a prompt, with its features in memory of this process, but for those whose digests are
    `known`."""
    packed, arrays = lay_out(prompt, tts_ids, known)
    features = PromptFeatures(b"".join(a.tobytes() for a in arrays), on_demand)
    return msgspec.structs.replace(packed, features=features)


def lay_out(
    prompt: Prompt, tts_ids: Sequence[int] | None = None, known: Container[bytes] = ()
) -> tuple[PackedPrompt, list[npt.NDArray[np.float32]]]:
    """The prompt without its features, and their arrays in the order in which they are to lie."""
    arrays: list[npt.NDArray[np.float32]] = []
    size = 0

    def put(p: Piece) -> PackedPiece:
        nonlocal size
        if p.values is None or p.digest in known:
            return PackedPiece(p.shape, p.digest, None)
        packed = PackedPiece(p.shape, p.digest, size)
        arrays.append(np.ascontiguousarray(p.values))
        size += p.values.nbytes
        return packed

    packed = PackedPrompt(
        pack_ids(prompt.ids),
        tuple(tuple(map(put, clip.pieces)) for clip in prompt.audios),
        tuple(PackedPatches(p.grid, p.seconds_per_grid, put(p.piece)) for p in prompt.images),
        tuple(PackedPatches(p.grid, p.seconds_per_grid, put(p.piece)) for p in prompt.videos),
        prompt.audio_in_video,
        None if tts_ids is None else pack_ids(tts_ids),
    )
    return packed, arrays


def pack_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    _check_ids(data)
    return tuple(np.frombuffer(data, "<i4").tolist())


def unpack_pieces(packed: Sequence[PackedPiece], features: Bytes) -> list[Piece]:
    """The arrays are views of `features`, unless these are read-only: torch wants memory that it
    may write to."""
    memory = bytearray(features) if memoryview(features).readonly else features

    def get(p: PackedPiece) -> Piece:
        count = _check_place(p, len(memory))
        values = None
        if p.offset is not None:
            values = np.frombuffer(memory, np.float32, count, p.offset).reshape(p.shape)
        return Piece(p.shape, p.digest, values)

    return [get(p) for p in packed]


def _check_ids(data: bytes) -> None:
    if len(data) % 4:
        raise WireError(f"token ids in {len(data)} bytes")


def _check_place(p: PackedPiece, size: int) -> int:
    """The number of values of a piece that lies within `size` bytes."""
    if min(p.shape, default=0) < 0:
        raise WireError(f"features {p.shape} have a negative size")
    count = math.prod(p.shape)
    if p.offset is not None and (p.offset < 0 or p.offset % 4 or p.offset + 4 * count > size):
        raise WireError(f"features {p.shape} at {p.offset} are not within a blob of {size} bytes")
    return count

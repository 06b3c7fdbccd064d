"""The wire format: a fixed prefix, a typed header, raw aligned blobs. `docs/wire.md` is its
description.

Encodes a chunk directly into a given buffer (a link's slot) and decodes one as views of it, without
an intermediate bytes object. A chunk has exactly one encoding. The decoder refuses every other (a
table with another layout, non-minimal integers, padding that is not zero), so what it accepts
encodes to the same bytes again. Nothing in a chunk is executed.

The prefix holds what changes from chunk to chunk; the header (request and tensor table) is the same
for many. So a header is encoded and checked once, then kept as a `_CheckedHeader` and looked up by
its bytes (decoding) or by its content (encoding). The caches are bounded, and what they lose is
made again. Any thread."""

from __future__ import annotations

import ctypes
import re
import struct
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import torch

from stretto.transport.contract import (
    MAX_COUNT,
    WIRE_VERSION,
    Chunk,
    ChunkHeader,
    CopyEvent,
    Corrupt,
    Count,
    Dtype,
    Lease,
    Name,
    PutFailed,
    TensorMeta,
    VersionMismatch,
)
from stretto.types import Mark, RequestId, Span

MAGIC = b"STRT"
ALIGN = 64  # a cache line, and enough for any vector load or DMA engine
BLOB_CHECKSUM = 1  # the only flag
MAX_HEADER = 16 << 10
MAX_TENSORS = 16
MAX_DIMS = 8
MAX_BYTES = 1 << 30

# magic, version, zero, checksum of what follows up to the first blob
_START = struct.Struct("<4sHHI")
# flags, mark, header bytes, blob crc32, blob bytes, seq, start, stop
_REST = struct.Struct("<HHIIQQQQ")
_PREFIX = struct.Struct(_START.format + _REST.format[1:])
PREFIX_BYTES = _PREFIX.size
_REST_AT = _START.size

DTYPES: Mapping[Dtype, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in Dtype}
_NAMES: Mapping[torch.dtype, Dtype] = {dtype: name for name, dtype in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MARKS = tuple(Mark(value) for value in range(len(Mark)))
_LAST_MARK = len(Mark) - 1
_ZEROS = bytes(ALIGN)
_COUNT_BITS = MAX_COUNT.bit_length() - 1
_MAX_CACHED = 1024  # headers, of each kind
_MAX_CACHED_BYTES = 2048  # larger headers are not cached
_VIEWS = 64  # layouts that a page knows its views for

_unpack_prefix = _PREFIX.unpack_from
_pack_start = _START.pack
_pack_rest = _REST.pack
_crc32 = zlib.crc32
# Two ways to copy: the first releases the interpreter's lock, which pays for large blobs. After a
# small one the thread would wait for the lock behind a busy stage loop, for milliseconds.
_memmove = ctypes.memmove
_memmove_small = ctypes.PyDLL(None).memmove
_memmove_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_small.restype = None
_SMALL = 64 << 10

# A received frame may be read-only memory. Nobody writes to a taken chunk, so torch's warning does
# not apply.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header as it is on the wire; the counters are in the prefix."""

    version: Count
    request: Name
    tensors: tuple[TensorMeta, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)
_Key = TypeVar("_Key")


class _Blob(NamedTuple):
    """One tensor of a layout. `start` counts from the chunk's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where a table's blobs lie in a chunk whose first blob begins at `at`. Compared by identity:
    each is made once."""

    at: int
    blobs: tuple[_Blob, ...]
    gaps: tuple[tuple[int, int], ...]  # between blobs: zeros
    bools: tuple[_Blob, ...]
    blob_bytes: int
    size: int  # of the whole chunk


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedHeader:
    """A header that was checked: its content, its encoding, and the layout that follows from
    them."""

    request: RequestId
    version: int
    tensors: tuple[TensorMeta, ...]
    head: bytes  # with the zeros up to the first blob
    length: int  # without them
    layout: _Layout
    allowed: bool  # whether it is within the limits, but for the room in a slot


class Page:
    """Memory that holds one chunk at a time: a slot. Keeps its address, the views made of it, and
    the header of the chunk that is being written to it.

    Every chunk of the same layout gets the same views. That is safe for the reason that the memory
    can be reused: nobody uses a chunk's tensors after its release."""

    __slots__ = ("address", "checked", "memory", "size", "views")

    def __init__(self, memory: bytearray | memoryview) -> None:
        self.memory = memoryview(memory)
        self.size = len(self.memory)
        self.address = 0 if self.memory.readonly or not len(memory) else _address_of(self.memory)
        self.views: dict[_Layout, Mapping[str, torch.Tensor]] = {}
        self.checked: _CheckedHeader | None = None


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _aligned(n: int) -> int:
    return (n + ALIGN - 1) & -ALIGN


def _nbytes(meta: TensorMeta) -> int:
    return prod(meta.shape) * DTYPES[meta.dtype].itemsize


def _reasonable(shape: tuple[int, ...]) -> bool:
    # Counting a 0 as a 1 keeps strides in range too: (0, huge, huge) has no bytes but would
    # overflow them.
    return len(shape) <= MAX_DIMS and prod(max(dim, 1) for dim in shape) <= MAX_BYTES


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorMeta, ...]:
    """The tensor table: in the mapping's order, each at the next aligned offset."""
    return _table(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]))


@lru_cache(maxsize=1024)  # a link sends few shapes, over and over
def _table(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[TensorMeta, ...]:
    table: list[TensorMeta] = []
    stop = 0
    for name, dtype, shape in tensors:
        if dtype not in _NAMES or not _reasonable(shape) or not _NAME.fullmatch(name):
            raise ValueError(f"tensor {name!r}: {dtype} {tuple(shape)} has no place on the wire")
        meta = TensorMeta(name, _NAMES[dtype], tuple(shape), _aligned(stop))
        stop = meta.offset + _nbytes(meta)
        table.append(meta)
    return tuple(table)


@lru_cache(maxsize=1024)
def _laid_out(table: tuple[TensorMeta, ...], at: int) -> _Layout:
    blobs, gaps, end = [], [], at
    for meta in table:
        blob = _Blob(meta.name, DTYPES[meta.dtype], meta.shape, at + meta.offset, _nbytes(meta))
        if blob.start > end:
            gaps.append((end, blob.start))
        end = blob.start + blob.nbytes
        blobs.append(blob)
    bools = tuple(blob for blob in blobs if blob.dtype is torch.bool and blob.nbytes)
    return _Layout(at, tuple(blobs), tuple(gaps), bools, end - at, end)


def chunk(
    request: RequestId,
    span: Span,
    mark: Mark,
    tensors: Mapping[str, torch.Tensor],
    *,
    seq: int = 0,
    lease: Lease | None = None,
    event: torch.cuda.Event | None = None,
) -> Chunk:
    """A chunk around `tensors`, with its header filled in."""
    table = layout(tensors)
    header = ChunkHeader(WIRE_VERSION, request, seq, span.start, span.stop, mark, table)
    return Chunk(header, tensors, lease, event)


def blob_bytes(header: ChunkHeader) -> int:
    """Size of the blob area: up to the last blob's last byte."""
    return header.tensors[-1].offset + _nbytes(header.tensors[-1]) if header.tensors else 0


@dataclass(slots=True)
class _HeaderCache:
    """Headers by their bytes (decoding), and by their content (encoding: request, and the table's
    identity)."""

    by_bytes: dict[bytes, _CheckedHeader] = field(default_factory=dict)
    by_content: dict[tuple[str, int, int], _CheckedHeader] = field(default_factory=dict)

    def read(self, head: bytes, length: int) -> _CheckedHeader:
        """Check a header that is not known yet, and the zeros behind it."""
        try:
            content = _decoder.decode(head[:length])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"header: {error}") from error
        request = RequestId(content.request)
        if content.version != WIRE_VERSION:
            raise VersionMismatch(
                f"header version {content.version}, this end speaks {WIRE_VERSION}"
            )
        if _encoder.encode(content) != head[:length]:
            raise Corrupt("header is not in its one form", request=request)
        if any(head[length:]):
            raise Corrupt("padding is not zero", request=request)
        _check_table(content.tensors, request)
        plan = _laid_out(content.tensors, PREFIX_BYTES + len(head))
        checked = _CheckedHeader(
            request, content.version, content.tensors, head, length, plan, allowed=True
        )
        _remember(self.by_bytes, head, checked)
        return checked

    def write(self, header: ChunkHeader) -> _CheckedHeader:
        """Encode a header that is not known yet."""
        table = header.tensors
        raw = _encoder.encode(_Head(header.version, header.request, table))
        end = PREFIX_BYTES + len(raw)
        at = _aligned(end) if blob_bytes(header) else end
        plan = _laid_out(table, at)
        allowed = plan.size <= MAX_BYTES and len(raw) <= MAX_HEADER and len(table) <= MAX_TENSORS
        checked = _CheckedHeader(
            header.request, header.version, table, raw + bytes(at - end), len(raw), plan, allowed
        )
        # By identity, since comparing tables costs as much as encoding them. The checked keeps the
        # table alive, so its id is not reused.
        _remember(self.by_content, (header.request, id(table), header.version), checked)
        return checked


def _remember(cache: dict[_Key, _CheckedHeader], key: _Key, checked: _CheckedHeader) -> None:
    if len(checked.head) <= _MAX_CACHED_BYTES:
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[key] = checked


_headers = _HeaderCache()
_by_content = _headers.by_content
_by_bytes = _headers.by_bytes


def encoded_size(chunk: Chunk) -> int:
    """Bytes that `encode_into` will write."""
    return _checked_header(chunk.header).layout.size


def _checked_header(header: ChunkHeader) -> _CheckedHeader:
    key = (header.request, id(header.tensors), header.version)
    return _by_content.get(key) or _headers.write(header)


def encode(chunk: Chunk, *, checksum: bool = False) -> bytearray:
    """The chunk as an object of its own: for `zero_copy` off, and for tests."""
    buffer = bytearray(encoded_size(chunk))
    encode_into(buffer, chunk, checksum=checksum)
    return buffer


def encode_into(
    buffer: bytearray | memoryview | Page,
    chunk: Chunk,
    *,
    checksum: bool = False,
    zero_copy: bool = True,
) -> int:
    """Write the chunk at the start of `buffer`; returns the number of bytes. Waits for copies from
    a device.

    `zero_copy=False` goes through a bytes object of its own: the same bytes, kept as an oracle."""
    page = buffer if isinstance(buffer, Page) else Page(buffer)
    if not zero_copy:
        whole = encode(chunk, checksum=checksum)
        if len(whole) > page.size:
            raise _does_not_fit(chunk, len(whole), page.size)
        page.memory[: len(whole)] = whole
        return len(whole)
    copied = write_blobs(page, chunk)
    if copied is not None:
        copied.synchronize()
    return write_head(page, chunk.header, checksum=checksum)


class Copies(Protocol):
    """Starts copies from a device to a slot. Tests without a device replace `DeviceCopies`."""

    def start(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None
    ) -> CopyEvent:
        """Begin to copy each second tensor to the first, behind `after`. The event fires when all
        are there."""
        ...


class DeviceCopies:
    """Copies on the caller's current stream, at full speed if the slot is page-locked."""

    def start(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None
    ) -> CopyEvent:
        stream = torch.cuda.current_stream(pairs[0][1].device)
        if after is not None:
            stream.wait_event(after)
        # Blocking: a courier that waits for it sleeps, since the stage loop needs the core.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        try:
            for place, tensor in pairs:
                place.copy_(tensor, non_blocking=True)
            copied.record(stream)
        except RuntimeError:
            # copies that were started must not write to a slot that is used for another chunk
            stream.synchronize()
            raise
        return copied


_device_copies = DeviceCopies()


def write_blobs(page: Page, chunk: Chunk, copies: Copies = _device_copies) -> CopyEvent | None:
    """The first half of encoding: all but prefix and header. Device tensors are still being copied
    when this returns an event: neither the page nor the chunk may change until it has fired."""
    header = chunk.header
    page.checked = checked = _checked_header(header)
    plan = checked.layout
    if plan.size > page.size or not checked.allowed:
        raise _does_not_fit(chunk, plan.size, page.size)
    if not page.address:
        raise ValueError("memory that cannot be written")
    for start, stop in plan.gaps:
        page.memory[start:stop] = _ZEROS[: stop - start]
    on_device: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors = chunk.tensors
    for name, dtype, shape, start, nbytes in plan.blobs:
        tensor = tensors[name]
        if tensor.dtype is not dtype or tensor.shape != shape:
            # copy_ would convert or broadcast
            raise ValueError(f"tensor {name!r} is not the one in the header")
        if not nbytes:
            continue
        if not tensor.is_cpu:
            on_device.append((_views(page, plan)[name], tensor))
        elif tensor.is_contiguous():
            # most rows: one plain copy, no views
            copy = _memmove_small if nbytes <= _SMALL else _memmove
            copy(page.address + start, tensor.data_ptr(), nbytes)
        else:
            _views(page, plan)[name].copy_(tensor)
    return copies.start(on_device, chunk.event) if on_device else None


def write_head(page: Page, header: ChunkHeader, *, checksum: bool = False) -> int:
    """The second half, when all blobs of the chunk are written. Returns the chunk's size."""
    checked = page.checked
    assert checked is not None, "the blobs come first"
    plan = checked.layout
    crc = flags = 0
    if checksum:
        flags = BLOB_CHECKSUM
        crc = _crc32(page.memory[plan.at : plan.size])
    rest = _pack_rest(
        flags,
        header.mark,
        checked.length,
        crc,
        plan.blob_bytes,
        header.seq,
        header.start,
        header.stop,
    )
    rest += checked.head
    page.memory[: plan.at] = _pack_start(MAGIC, WIRE_VERSION, 0, _crc32(rest)) + rest
    return plan.size


def _does_not_fit(chunk: Chunk, size: int, room: int) -> PutFailed:
    return PutFailed(
        f"a chunk of {size} bytes does not fit: {room} bytes of room", request=chunk.header.request
    )


def decode(buffer: bytes | bytearray | memoryview, lease: Lease | None = None) -> Chunk:
    """The chunk that fills `buffer` exactly, as views of it. Raises `Corrupt` or
    `VersionMismatch`."""
    view = memoryview(buffer)
    return read(Page(view), len(view), lease)


def read(page: Page, size: int, lease: Lease | None = None) -> Chunk:
    """The chunk that fills the first `size` bytes of `page` exactly, as views of it, or `Corrupt`
    or `VersionMismatch`. No allocation depends on a number in the page before that was checked
    against `size`."""
    memory = page.memory
    if size < PREFIX_BYTES or size > page.size:
        raise Corrupt(f"{size} bytes are less than a prefix, or more than there are")
    prefix = _unpack_prefix(memory)
    magic, version, zero, head_crc, flags, mark, length, crc, blobs, seq, start, stop = prefix
    if magic != MAGIC or version != WIRE_VERSION:
        raise _foreign(magic, version)
    if length > MAX_HEADER or blobs > MAX_BYTES:
        raise Corrupt(f"outside the limits: header {length}, blobs {blobs}")
    at = PREFIX_BYTES + length
    if blobs:
        at = (at + ALIGN - 1) & -ALIGN
    if at + blobs != size:
        raise Corrupt(f"{at + blobs} bytes announced, {size} there")
    rest = memory[_REST_AT:at].tobytes()
    if _crc32(rest) != head_crc:
        raise Corrupt("header checksum does not match")
    head = rest[_REST.size :]
    checked = _by_bytes.get(head)
    if checked is None or checked.length != length:
        checked = _headers.read(head, length)
    plan = checked.layout
    request = checked.request
    if plan.blob_bytes != blobs or plan.at != at:
        raise Corrupt("the tensor table does not describe the blobs", request=request)
    if zero or flags > BLOB_CHECKSUM or mark > _LAST_MARK or (crc and not flags):
        raise Corrupt("prefix outside its one form", request=request)
    if (seq | stop) >> _COUNT_BITS or start > stop:
        raise Corrupt("counters outside the limits", request=request)
    for begin, end in plan.gaps:
        if memory[begin:end] != _ZEROS[: end - begin]:
            raise Corrupt("padding is not zero", request=request)
    for blob in plan.bools:
        if max(memory[blob.start : blob.start + blob.nbytes]) > 1:
            raise Corrupt(f"tensor {blob.name!r}: a bool that is neither", request=request)
    if flags and _crc32(memory[at:size]) != crc:
        raise Corrupt("blob checksum does not match", request=request)
    header = ChunkHeader(WIRE_VERSION, request, seq, start, stop, _MARKS[mark], checked.tensors)
    return Chunk(header, page.views.get(plan) or _views(page, plan), lease)


def _foreign(magic: bytes, version: int) -> Corrupt | VersionMismatch:
    if magic != MAGIC:
        return Corrupt("not a chunk: no magic")
    return _other_version(version, "wire")


def _other_version(version: int, what: str) -> VersionMismatch:
    return VersionMismatch(f"{what} version {version}, this end speaks {WIRE_VERSION}")


def _check_table(table: tuple[TensorMeta, ...], request: RequestId) -> None:
    if len(table) > MAX_TENSORS or len({meta.name for meta in table}) != len(table):
        raise Corrupt("a table with too many tensors, or one of them twice", request=request)
    stop = 0
    for meta in table:
        if not _reasonable(meta.shape):
            raise Corrupt(f"tensor {meta.name!r}: shape outside the limits", request=request)
        if meta.offset != _aligned(stop):
            raise Corrupt(f"tensor {meta.name!r} is not where it belongs", request=request)
        stop = meta.offset + _nbytes(meta)


def _views(page: Page, plan: _Layout) -> Mapping[str, torch.Tensor]:
    views = page.views.get(plan)
    if views is None:
        if len(page.views) >= _VIEWS:
            page.views.clear()
        views = MappingProxyType({blob.name: _view(page.memory, blob) for blob in plan.blobs})
        page.views[plan] = views
    return views


def _view(memory: memoryview, blob: _Blob) -> torch.Tensor:
    if not blob.nbytes:
        return torch.empty(blob.shape, dtype=blob.dtype)
    count = blob.nbytes // blob.dtype.itemsize
    return torch.frombuffer(memory, dtype=blob.dtype, count=count, offset=blob.start).view(
        blob.shape
    )

"""The wire format: a fixed prefix, a typed header, raw aligned blobs. `docs/wire.md` is its description.

Encodes a chunk straight into a given buffer (a slot of a ring) and decodes one as views of it, so that no bytes
object stands between a tensor and its slot. There is exactly one encoding of a chunk: the decoder refuses every
other (a table that is not laid out as the encoder would, non-minimal integers, padding that is not zero), so what
it accepts encodes to the same bytes again. Nothing in a chunk is executed. Pure functions; any thread."""

from __future__ import annotations

import ctypes
import re
import struct
import warnings
import zlib
from collections.abc import Mapping
from functools import lru_cache
from math import prod

import msgspec
import torch

from stretto.connector.contract import (
    WIRE_VERSION,
    Chunk,
    ChunkHeader,
    Corrupt,
    Dtype,
    Lease,
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

# magic, version, flags, header bytes, tensors, blob bytes, blob crc32; then the crc32 of all this and the header.
_PREFIX = struct.Struct("<4sHHIIQI")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CRC.size

DTYPES: Mapping[Dtype, torch.dtype] = {
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT64: torch.float64,
    Dtype.INT8: torch.int8,
    Dtype.INT16: torch.int16,
    Dtype.INT32: torch.int32,
    Dtype.INT64: torch.int64,
    Dtype.UINT8: torch.uint8,
    Dtype.BOOL: torch.bool,
}
_NAMES: Mapping[torch.dtype, Dtype] = {dtype: name for name, dtype in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ZEROS = bytes(ALIGN)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChunkHeader)

# A received frame may be read-only memory. We never write to a taken chunk, so torch's warning would only be noise.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _nbytes(meta: TensorMeta) -> int:
    return prod(meta.shape) * DTYPES[meta.dtype].itemsize


def _reasonable(shape: tuple[int, ...]) -> bool:
    # Counting a 0 as a 1 keeps strides in range too: (0, huge, huge) has no bytes but would overflow them.
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


def chunk(
    request: RequestId,
    span: Span,
    mark: Mark,
    tensors: Mapping[str, torch.Tensor],
    *,
    epoch: int = 0,
    segment: int = 0,
    seq: int = 0,
    lease: Lease | None = None,
    event: torch.cuda.Event | None = None,
) -> Chunk:
    """A chunk around `tensors`, with its header filled in."""
    table = layout(tensors)
    header = ChunkHeader(WIRE_VERSION, request, epoch, segment, seq, span.start, span.stop, mark, table)
    return Chunk(header, tensors, lease, event)


def blob_bytes(header: ChunkHeader) -> int:
    """Size of the blob area: up to the last blob's last byte."""
    return header.tensors[-1].offset + _nbytes(header.tensors[-1]) if header.tensors else 0


def _blobs_at(header_bytes: int, blobs: int) -> int:
    return _aligned(PREFIX_BYTES + header_bytes) if blobs else PREFIX_BYTES + header_bytes


def encoded_size(chunk: Chunk) -> int:
    """Bytes that `encode_into` will write."""
    blobs = blob_bytes(chunk.header)
    return _blobs_at(len(_encoder.encode(chunk.header)), blobs) + blobs


def encode_into(buffer: bytearray | memoryview, chunk: Chunk, *, checksum: bool = False, zero_copy: bool = True) -> int:
    """Write the chunk at the start of `buffer`; returns the number of bytes.

    Device tensors are copied into the buffer on the caller's current stream, behind the chunk's event, and waited
    for: a courier's business. They go at full speed where the buffer is page-locked.
    `zero_copy=False` goes through a bytes object of its own: the same bytes, kept as an oracle."""
    if not zero_copy:
        whole = encode(chunk, checksum=checksum)
        if len(whole) > len(buffer):
            raise _does_not_fit(chunk, len(whole), len(buffer))
        buffer[: len(whole)] = whole
        return len(whole)
    header = chunk.header
    head = _encoder.encode(header)
    blobs = blob_bytes(header)
    at = _blobs_at(len(head), blobs)
    if at + blobs > min(len(buffer), MAX_BYTES) or len(head) > MAX_HEADER or len(header.tensors) > MAX_TENSORS:
        raise _does_not_fit(chunk, at + blobs, len(buffer))
    end = PREFIX_BYTES + len(head)
    buffer[PREFIX_BYTES:end] = head
    if blobs:
        area = torch.frombuffer(buffer, dtype=torch.uint8, count=blobs, offset=at)
        stream = _stream_of(chunk)
        for meta in header.tensors:
            start = at + meta.offset
            buffer[end:start] = _ZEROS[: start - end]
            end = start + _nbytes(meta)
            _write(area, meta, chunk.tensors[meta.name])
        if stream is not None:
            stream.synchronize()
    crc = 0
    if checksum and blobs:
        with memoryview(buffer)[at : at + blobs] as written:
            crc = zlib.crc32(written)
    flags = BLOB_CHECKSUM if checksum else 0
    prefix = _PREFIX.pack(MAGIC, WIRE_VERSION, flags, len(head), len(header.tensors), blobs, crc)
    buffer[: _PREFIX.size] = prefix
    buffer[_PREFIX.size : PREFIX_BYTES] = _CRC.pack(zlib.crc32(head, zlib.crc32(prefix)))
    return at + blobs


def _stream_of(chunk: Chunk) -> torch.cuda.Stream | None:
    """The stream that device tensors are copied on, made to wait until they are there; None if all are here."""
    for tensor in chunk.tensors.values():
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if chunk.event is not None:
                stream.wait_event(chunk.event)
            return stream
    return None


def encode(chunk: Chunk, *, checksum: bool = False) -> bytearray:
    """The chunk as an object of its own, for tests and where there is no slot."""
    buffer = bytearray(encoded_size(chunk))
    encode_into(buffer, chunk, checksum=checksum)
    return buffer


def _write(area: torch.Tensor, meta: TensorMeta, tensor: torch.Tensor) -> None:
    if tensor.shape != meta.shape or tensor.dtype is not DTYPES[meta.dtype]:
        raise ValueError(f"tensor {meta.name!r} is not the one in the header")  # copy_ would convert or broadcast
    nbytes = _nbytes(meta)
    if not nbytes:
        return
    if tensor.is_cpu and tensor.is_contiguous():
        # Most rows: one plain copy, where torch would make two views first.
        ctypes.memmove(area.data_ptr() + meta.offset, tensor.data_ptr(), nbytes)
    else:
        slot = area[meta.offset : meta.offset + nbytes].view(tensor.dtype).view(meta.shape)
        slot.copy_(tensor, non_blocking=True)


def _does_not_fit(chunk: Chunk, size: int, room: int) -> PutFailed:
    return PutFailed(f"a chunk of {size} bytes does not fit: {room} bytes of room", request=chunk.header.request)


def decode(buffer: bytes | bytearray | memoryview, lease: Lease | None = None) -> Chunk:
    """The chunk that fills `buffer` exactly, as views of it. Raises `Corrupt` or `VersionMismatch`.

    No allocation depends on a number in the buffer before that number was checked against the buffer's length."""
    view = memoryview(buffer)
    at, blobs, crc, header = _decode_header(view)
    request = header.request
    _check_table(header, blobs)
    end = at
    tensors: dict[str, torch.Tensor] = {}
    for meta in header.tensors:
        start = at + meta.offset
        if view[end:start] != _ZEROS[: start - end]:
            raise Corrupt("padding is not zero", request=request)
        end = start + _nbytes(meta)
        tensors[meta.name] = _read(view, start, meta, request)
    if crc is not None and zlib.crc32(view[at : at + blobs]) != crc:
        raise Corrupt("blob checksum does not match", request=request)
    return Chunk(header, tensors, lease)


def _decode_header(view: memoryview) -> tuple[int, int, int | None, ChunkHeader]:
    """Where the blobs start, how long they are, their checksum if there is one, and the header."""
    if len(view) < PREFIX_BYTES:
        raise Corrupt(f"{len(view)} bytes are less than a prefix")
    magic, version, flags, length, count, blobs, crc = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise Corrupt("not a chunk: no magic")
    if version != WIRE_VERSION:
        raise VersionMismatch(f"wire version {version}, this end speaks {WIRE_VERSION}")
    if length > MAX_HEADER or count > MAX_TENSORS or blobs > MAX_BYTES:
        raise Corrupt(f"outside the limits: header {length}, tensors {count}, blobs {blobs}")
    at = _blobs_at(length, blobs)
    if at + blobs != len(view):
        raise Corrupt(f"{at + blobs} bytes announced, {len(view)} there")
    head = view[PREFIX_BYTES : PREFIX_BYTES + length]
    (head_crc,) = _CRC.unpack_from(view, _PREFIX.size)
    if zlib.crc32(head, zlib.crc32(view[: _PREFIX.size])) != head_crc:
        raise Corrupt("header checksum does not match")
    try:
        header = _decoder.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"header: {error}") from error
    if header.version != WIRE_VERSION:
        raise VersionMismatch(f"header version {header.version}, this end speaks {WIRE_VERSION}")
    if flags & ~BLOB_CHECKSUM or (crc and not flags) or count != len(header.tensors):
        raise Corrupt("prefix and header disagree", request=header.request)
    if _encoder.encode(header) != head or header.start > header.stop:
        raise Corrupt("header is not in its one form", request=header.request)
    if view[PREFIX_BYTES + length : at] != _ZEROS[: at - PREFIX_BYTES - length]:
        raise Corrupt("padding is not zero", request=header.request)
    return at, blobs, crc if flags & BLOB_CHECKSUM else None, header


def _check_table(header: ChunkHeader, blobs: int) -> None:
    stop = 0
    for meta in header.tensors:
        if not _reasonable(meta.shape):
            raise Corrupt(f"tensor {meta.name!r}: shape outside the limits", request=header.request)
        if meta.offset != _aligned(stop):
            raise Corrupt(f"tensor {meta.name!r} is not where it belongs", request=header.request)
        stop = meta.offset + _nbytes(meta)
    if stop != blobs or len({meta.name for meta in header.tensors}) != len(header.tensors):
        raise Corrupt("the tensor table does not describe the blobs", request=header.request)


def _read(view: memoryview, start: int, meta: TensorMeta, request: RequestId) -> torch.Tensor:
    count = prod(meta.shape)
    if not count:
        return torch.empty(meta.shape, dtype=DTYPES[meta.dtype])
    if meta.dtype is Dtype.BOOL and max(view[start : start + count]) > 1:
        raise Corrupt(f"tensor {meta.name!r}: a bool that is neither", request=request)
    flat = torch.frombuffer(view, dtype=DTYPES[meta.dtype], count=count, offset=start)
    return flat if len(meta.shape) == 1 else flat.view(meta.shape)

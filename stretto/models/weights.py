"""How the tensors of checkpoint files get into a model.

Owns the copy from file to device: in file order, through two staging buffers of fixed size, so host
memory stays bounded whatever the checkpoint's size. What is to be float8 is quantised as it lands,
a few rows at a time, so it is never wide all at once. Called once per stage at start, on the
stage's main thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn
from tqdm import tqdm

from stretto import cpu
from stretto.errors import CheckpointError
from stretto.kernels.reference.packed import PackedWeight
from stretto.kernels.reference.quantized import finite
from stretto.layers.targets import Float8Rows, Target, targets
from stretto.models.checkpoint import ITEM_BYTES, CheckpointFiles, StoredTensor
from stretto.models.quantised.loading import Landing, QuantisedLoad, Widening, ZeroPoints
from stretto.models.quantised.recognise import QuantisedTensor

M = TypeVar("M", bound=nn.Module)

STAGING = 64 << 20
READERS, READ_PART = 4, 8 << 20  # a span is read by a few threads at once, this much each at least
SHOWN = 5  # offenders named in one error

LOADABLE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
STAGED = LOADABLE | {"I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
"""Codes of quantised matrices too."""


def prepare_device(device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """Get a device ready for a model's weights, in their type or the device's usual one, which is
    returned. Comes before anything is computed."""
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cpu.prepare(device.type, str(dtype).removeprefix("torch."))
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # float32 is asked for to be exact
        # Shapes are few (captured sizes), and what cuDNN guesses for some of them is ten times
        # slower.
        torch.backends.cudnn.benchmark = dtype != torch.float32
    return dtype


@dataclass(frozen=True, slots=True)
class LoadReport:
    bytes: int
    seconds: float
    tensors: int


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Consecutive elements of a tensor and the part of its destination they fill."""

    source: StoredTensor
    start: int  # in the file
    nbytes: int
    into: Landing


@dataclass(slots=True)
class _Span:
    """Pieces that lie side by side in one file and fit into one staging buffer."""

    start: int
    nbytes: int = 0
    pieces: list[_Piece] = field(default_factory=list)


def load(
    files: CheckpointFiles,
    destinations: Mapping[str, Target],
    prefixes: Sequence[str],
    progress: bool = True,
    label: str = "weights",
    staging_bytes: int = STAGING,
    quantised: Mapping[str, QuantisedTensor] = MappingProxyType({}),
) -> LoadReport:
    """Fill `destinations` (checkpoint name -> view) from the checkpoint, converting dtypes where
    they differ.

    Float8 rows are made from the numbers in the file, which must be finite: quantising would hide
    that they are not. Every destination must be in the checkpoint, and every checkpoint tensor
    under one of `prefixes` must have a destination; shapes must agree. Otherwise nothing is read,
    and one error names the offenders. `quantised`: of the checkpoint's matrices, those that come
    in several tensors."""
    _check_fit(files, destinations, prefixes, quantised)
    began = time.perf_counter()
    narrow = {name: (quantised[name], d) for name, d in destinations.items() if name in quantised}
    wide: dict[str, Landing] = {}
    for name, into in destinations.items():
        if name not in narrow:
            assert not isinstance(into, PackedWeight), f"{name} is not packed in the checkpoint"
            wide[name] = into
    packed = QuantisedLoad.of(narrow)
    tensors = [files.tensors[name] for name in wide]
    for q, _ in narrow.values():
        tensors += [part for part in (q.codes, q.scale, q.zero) if part is not None]
    total = sum(t.nbytes for t in tensors)
    devices = {d.device for d in destinations.values()} or {torch.device("cpu")}
    assert len(devices) == 1, f"a stage lives on one device, got {devices}"
    assert staging_bytes >= 8, staging_bytes  # the largest item must fit
    # Staged whole: a row to be quantised, and what is widened.
    widest = max((8 * t.shape[-1] for t in wide.values() if isinstance(t, Float8Rows)), default=8)
    largest = max(
        (p.nbytes for q, _ in narrow.values() for p in (q.codes, q.zero) if p is not None),
        default=0,
    )
    staging_bytes = min(max(staging_bytes, widest, largest), max(total, 8))
    buffers = [_Staging(staging_bytes, device) for device in (*devices, *devices)]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(READERS, thread_name_prefix="weights"))
        bar = stack.enter_context(
            tqdm(
                total=total,
                desc=label,
                unit="B",
                unit_scale=True,
                disable=None if progress else True,
            )
        )
        opened: tuple[Path, int] | None = None
        for n, span in enumerate(_all_spans(files, wide, packed, staging_bytes)):
            path = span.pieces[0].source.file
            if opened is None or opened[0] != path:
                opened = path, _open_file(path, stack)
            buffers[n % 2].fill(opened[1], span, pool)
            bar.update(span.nbytes)
        for b in buffers:
            b.wait()
    packed.finish()
    _check_finite(files, wide)
    return LoadReport(total, time.perf_counter() - began, len(tensors))


def _all_spans(
    files: CheckpointFiles, wide: Mapping[str, Landing], packed: QuantisedLoad, limit: int
) -> Iterator[_Span]:
    """What has a place as it is; then file by file what is widened, after its scales."""
    yield from _spans(files, {**wide, **packed.direct}, limit)
    for batch in packed.batches():
        yield from _spans(files, batch.first, limit)
        yield from _spans(files, batch.then, limit)


def _open_file(path: Path, stack: ExitStack) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    stack.callback(os.close, fd)
    return fd


def _check_fit(
    files: CheckpointFiles,
    destinations: Mapping[str, Target],
    prefixes: Sequence[str],
    quantised: Mapping[str, QuantisedTensor],
) -> None:
    problems: list[str] = []
    parts: set[str] = set()
    for name, into in destinations.items():
        stored = files.tensors.get(name)
        if name in quantised:
            q = quantised[name]
            parts.update(part.name for part in q.parts)
            if q.shape != tuple(into.shape):
                problems.append(
                    f"{q.codes.name} ({q.codes.file.name}) is a matrix of {list(q.shape)}, the "
                    f"model needs {list(into.shape)}"
                )
        elif stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != tuple(into.shape):
            problems.append(
                f"{name} ({stored.file.name}) has shape {list(stored.shape)}, the model needs "
                f"{list(into.shape)}"
            )
        elif stored.dtype not in LOADABLE:
            problems.append(
                f"{name} ({stored.file.name}) has dtype {stored.dtype}, which is not supported"
            )
    for name, stored in files.tensors.items():
        known = name in destinations or name in parts
        if not known and name.startswith(tuple(prefixes)):
            problems.append(
                f"{name} ({stored.file.name}) is unexpected: the model has no place for it"
            )
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{files.directory}: does not fit the model: {'; '.join(problems[:SHOWN])}{more}"
        )


def _check_finite(files: CheckpointFiles, destinations: Mapping[str, Landing]) -> None:
    rows = {name: into.scale for name, into in destinations.items() if isinstance(into, Float8Rows)}
    if rows and not finite(torch.cat(list(rows.values()))):
        name = next(name for name, scale in rows.items() if not finite(scale))
        raise CheckpointError(
            f"{files.tensors[name].file}: tensor {name}: holds infinities or NaN, and cannot be "
            f"made float8"
        )


def _spans(
    files: CheckpointFiles, destinations: Mapping[str, Landing], limit: int
) -> Iterator[_Span]:
    """Gather pieces in file order; only bytes that some destination needs are ever in a span."""
    tensors = sorted(
        (files.tensors[name] for name in destinations), key=lambda t: (t.file, t.start)
    )
    span: _Span | None = None
    file: Path | None = None
    for stored in tensors:
        item = ITEM_BYTES[stored.dtype]
        at = stored.start
        for into in _pieces(destinations[stored.name], limit // item):
            piece = _Piece(stored, at, into.numel() * item, into)
            at += piece.nbytes
            if (
                span is None
                or file != stored.file
                or piece.start != span.start + span.nbytes
                or span.nbytes + piece.nbytes > limit
                or span.nbytes % item  # a staged tensor must start where its dtype may
            ):
                if span is not None:
                    yield span
                span, file = _Span(piece.start), stored.file
            span.pieces.append(piece)
            span.nbytes += piece.nbytes
    if span is not None:
        yield span


def _pieces(into: Landing, limit: int) -> Iterator[Landing]:
    """Parts of a destination of at most `limit` elements, in the order of the file's elements."""
    if into.numel() <= limit:
        yield into
    elif isinstance(into, Float8Rows):
        yield from into.split(limit // into.shape[-1])
    elif not isinstance(into, torch.Tensor):
        raise AssertionError(f"staging of {limit} items is too small for {into.numel()}")
    elif into.is_contiguous():
        yield from torch.split(into.view(-1), limit)
    else:
        rows = limit // into[0].numel()
        for part in torch.split(into, rows) if rows else into.unbind():
            yield from _pieces(part, limit)


class _Staging:
    """One buffer between file and device; pinned, so that the copy runs while the other buffer is
    filled."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.memory = memoryview(self.buffer.numpy())  # type: ignore[arg-type]
        self.copied: torch.cuda.Event | None = None

    def fill(self, fd: int, span: _Span, pool: ThreadPoolExecutor) -> None:
        """Read the span and start its copies."""
        self.wait()  # the copies of the span before last still read this buffer
        step = max(READ_PART, -(-span.nbytes // READERS))
        cuts = range(0, span.nbytes, step)
        list(pool.map(lambda cut: self._read(fd, span, cut, min(cut + step, span.nbytes)), cuts))
        for piece in span.pieces:
            at = piece.start - span.start
            staged = self.buffer[at : at + piece.nbytes].view(STAGED[piece.source.dtype])
            _copy(piece.into, staged.view(piece.into.shape))
        if self.device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def _read(self, fd: int, span: _Span, start: int, stop: int) -> None:
        while start < stop:
            try:
                got = os.preadv(fd, [self.memory[start:stop]], span.start + start)
            except OSError as e:
                raise _unreadable(span, start, os.strerror(e.errno or 0)) from None
            if got == 0:
                raise _unreadable(span, start, "the file ended early")
            start += got


def _unreadable(span: _Span, at: int, why: str) -> CheckpointError:
    piece = next(p for p in reversed(span.pieces) if p.start <= span.start + at)
    return CheckpointError(
        f"{piece.source.file}: tensor {piece.source.name}: cannot be read ({why})"
    )


def _copy(into: Landing, staged: torch.Tensor) -> None:
    if isinstance(into, Float8Rows | Widening | ZeroPoints):
        into.fill(staged.to(into.device, non_blocking=True))
        return
    if into.is_cuda and (into.dtype != staged.dtype or not into.is_contiguous()):
        # Left to itself copy_ would convert on the host, in memory of its own, and wait.
        staged = staged.to(into.device, non_blocking=True)
    into.copy_(staged, non_blocking=True)


def build(factory: Callable[[], M], device: torch.device | str, dtype: torch.dtype) -> M:
    """Make a module whose uninitialised weights lie on the device in that dtype from the start."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return factory()
    finally:
        torch.set_default_dtype(before)


def tensor_shapes(module: nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that a module takes from a checkpoint, as they lie on
    disk. A module on the meta device is enough (`build`)."""
    return {name: tuple(view.shape) for name, view in targets(module, prefix).items()}

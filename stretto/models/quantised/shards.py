"""Safetensors files that are written tensor by tensor, so that their size does not matter, and are
whole or not there: a file has its name only when all of it is on the disk. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from stretto.errors import StrettoError
from stretto.models.checkpoint import ITEM_BYTES
from stretto.models.quantised.scheme import Entry

PART = 16 << 20  # that is copied at a time
ALIGNMENT = 8  # of the data behind the header, as the format's own library writes it


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where each tensor of a file lies: the widest items first, so that all are aligned."""

    header: bytes
    # offset in the file and bytes
    places: Mapping[str, tuple[int, int]]
    nbytes: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> ShardLayout:
        order = sorted(entries, key=lambda e: (-ITEM_BYTES[e[1]], e[0]))
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, dtype, shape in order:
            start, end = end, end + prod(shape) * ITEM_BYTES[dtype]
            table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
            spans[name] = start, end - start
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        places = {name: (len(header) + start, n) for name, (start, n) in spans.items()}
        return cls(header, places, len(header) + end)

    def is_at(self, path: Path) -> bool:
        """Whether a whole file of this layout is there."""
        try:
            with open(path, "rb") as f:
                same = f.read(len(self.header)) == self.header
                return same and os.fstat(f.fileno()).st_size == self.nbytes
        except OSError:
            return False


@dataclass(slots=True, eq=False)
class NewFile:
    """A context in which a file is written under another name; it gets its own at the end, unless
    something is raised."""

    path: Path
    _part: Path = field(init=False)
    _file: BinaryIO = field(init=False)

    def __enter__(self) -> NewFile:
        self._part = self.path.with_name(f".{self.path.name}.part")
        with writing(self.path):
            self._file = open(self._part, "wb")
        return self

    def put(self, data: bytes | memoryview, at: int) -> None:
        with writing(self.path):
            self._file.seek(at)
            self._file.write(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with writing(self.path):
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                self._file.close()
                if kind is None:
                    os.replace(self._part, self.path)
        finally:
            self._part.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the disk are one sentence."""
    try:
        yield
    except OSError as e:
        raise StrettoError(f"{path}: cannot be written ({e.strerror or e})") from None


def write_file(path: Path, data: bytes) -> None:
    with NewFile(path) as new:
        new.put(data, 0)


def copy_file(source: Path, path: Path) -> None:
    """In parts of bounded size."""
    at = 0
    with NewFile(path) as new:
        try:
            with open(source, "rb") as f:
                while part := f.read(PART):
                    new.put(part, at)
                    at += len(part)
        except OSError as e:
            raise StrettoError(f"{source}: cannot be read ({e.strerror or e})") from None

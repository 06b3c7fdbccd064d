"""`stretto quantize`: a wide checkpoint becomes a quantised one, a tensor at a time.

The new checkpoint has the old one's shards, with other tensors in them. A run that was killed goes
on: a shard has its name only when it is whole, a file of the run's settings says what the others
are made of, and `config.json` comes last. Found by `registry.py`; runs on the command's main
thread."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto import __version__, cpu
from stretto._validation import read_json_file
from stretto.errors import CheckpointError, Invalid, StrettoError
from stretto.hardware import card_of
from stretto.kernels.reference.packed import PackedWeight, empty, pack
from stretto.models.checkpoint import INDEX, SINGLE, CheckpointFiles, StoredTensor
from stretto.models.quantised.recognise import OWN_SUFFIXES
from stretto.models.quantised.scheme import Entry, Scheme, SchemeName
from stretto.models.quantised.settings import speaks_of_quantisation
from stretto.models.quantised.shards import NewFile, ShardLayout, copy_file, write_file, writing
from stretto.models.weights import LOADABLE

STATE = ".stretto-quantize.json"
"""In an unfinished checkpoint: what it is made of, and how."""
CONFIG = "config.json"
PART = 16 << 20  # bytes of a tensor that is copied, at a time
SPARE_BYTES = 64 << 20  # of the disk that stays free

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    sources: Sequence[StoredTensor]  # in the order in which they lie in the file
    layout: ShardLayout

    @property
    def nbytes(self) -> int:
        """That are read."""
        return sum(t.nbytes for t in self.sources)


@dataclass(slots=True, eq=False)
class QuantiseJob:
    source: Path
    out: Path
    scheme: Scheme
    names: frozenset[str]  # of the matrices that are quantised
    files: CheckpointFiles
    device: torch.device
    shards: Sequence[_Shard] = field(init=False)
    entries: dict[str, list[Entry]] = field(init=False)  # by the source's name

    def __post_init__(self) -> None:
        tensors = self.files.tensors.values()
        self.entries = {
            t.name: self.scheme.entries(t) if t.name in self.names else [(t.name, t.dtype, t.shape)]
            for t in tensors
        }
        by_file: dict[Path, list[StoredTensor]] = {}
        for t in sorted(tensors, key=lambda t: (t.file.name, t.start)):
            by_file.setdefault(t.file, []).append(t)
        self.shards = [
            _Shard(file.name, some, ShardLayout.of(e for t in some for e in self.entries[t.name]))
            for file, some in by_file.items()
        ]

    @classmethod
    def open(
        cls,
        source: Path,
        out: Path,
        parts: Mapping[str, Sequence[str]],
        name: SchemeName,
        group: int,
        symmetric: bool,
        device: str | None,
    ) -> QuantiseJob:
        """`parts`: names of matrices. `device`: None for a GPU, if there is one. Refuses what
        cannot be done before anything is written."""
        scheme, where = Scheme(name, group, symmetric), _device(device)
        config = read_json_file(source / CONFIG)
        files = CheckpointFiles.open(source)
        _refuse_quantised(source, config, files)
        names = [name for part in parts.values() for name in part]
        if missing := next((n for n in names if n not in files.tensors), None):
            raise CheckpointError(f"{source}: {missing} is missing")
        job = cls(source, out, scheme, frozenset(names), files, where)
        _check_out(source, out)
        job._check_disk()
        return job

    # ---- before

    @property
    def total(self) -> int:
        """Bytes of weights that are read."""
        return sum(s.nbytes for s in self.shards)

    @property
    def written(self) -> int:
        """Bytes of weights that there are in the end."""
        return sum(n for s in self.shards for _, n in s.layout.places.values())

    def _check_disk(self) -> None:
        there = next(p for p in (self.out, *self.out.absolute().parents) if p.exists())
        left = sum(s.layout.nbytes for s in self.shards if not s.layout.is_at(self.out / s.name))
        left += sum(f.stat().st_size for f, to in self._others() if not to.exists())
        free = shutil.disk_usage(there).free
        if free < left + SPARE_BYTES:
            raise StrettoError(
                f"{self.out}: {left / 2**30:.1f} GiB are to be written, but {free / 2**30:.1f} GiB "
                f"are free there"
            )

    def _others(self) -> Iterator[tuple[Path, Path]]:
        """Files that stay as they are, and where they go: tokenizer, template, voices."""
        ours = {CONFIG, INDEX, SINGLE, STATE, *(s.name for s in self.shards)}
        for folder, folders, names in os.walk(self.source):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            below = Path(folder).relative_to(self.source)
            for file in (Path(folder) / name for name in sorted(names)):
                if file.is_file() and (below != Path() or file.name not in ours):
                    yield file, self.out / below / file.name

    # ---- the work

    def run(self, tick: Tick) -> None:
        """`tick` is called with the bytes of weights that are done."""
        cpu.prepare(self.device.type, "float32")
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with self._claimed():
            for file, to in self._others():
                if not to.exists():
                    with writing(to):
                        to.parent.mkdir(parents=True, exist_ok=True)
                    copy_file(file, to)
            for shard in self.shards:
                if shard.layout.is_at(self.out / shard.name):
                    tick(shard.nbytes)
                else:
                    self._write(shard, tick)
            self._write_index()
            config = read_json_file(self.source / CONFIG)
            config["quantization_config"] = self.scheme.config(self._ignored())
            write_file(self.out / CONFIG, _json(config))
            with writing(self.out):
                (self.out / STATE).unlink()

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """The directory is this run's, and of these settings."""
        settings = {
            "stretto": __version__,
            "model": str(self.source.absolute()),
            "scheme": asdict(self.scheme),
            "matrices": len(self.names),
            "files": {s.name: _stamp(self.source / s.name) for s in self.shards},
        }
        path = self.out / STATE
        with writing(path):
            f = open(path, "a+b")  # noqa: SIM115
        with f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StrettoError(f"{self.out}: another run writes there") from None
            f.seek(0)
            found = f.read()
            if found and found != _json(settings):
                raise Invalid(
                    f"{self.out}: holds an unfinished run of other settings, or of a model that "
                    f"has changed since: remove it, or name another directory",
                    "out",
                )
            if not found:
                with writing(path):
                    f.write(_json(settings))
                    f.flush()
            yield

    def _write(self, shard: _Shard, tick: Tick) -> None:
        with NewFile(self.out / shard.name) as new, open(self.source / shard.name, "rb") as f:
            new.put(shard.layout.header, 0)
            for stored in shard.sources:
                if stored.name in self.names:
                    for name, made in self._quantised(stored, f.fileno()).items():
                        new.put(_bytes(made), shard.layout.places[name][0])
                    tick(stored.nbytes)
                else:
                    at, _ = shard.layout.places[stored.name]
                    for start, data in _read(stored, f.fileno(), PART):
                        new.put(data, at + start)
                        tick(len(data))

    def _quantised(self, stored: StoredTensor, fd: int) -> dict[str, torch.Tensor]:
        """The tensors that stand for it."""
        raw = bytearray().join(data for _, data in _read(stored, fd, stored.nbytes))
        wide = torch.frombuffer(raw, dtype=LOADABLE[stored.dtype])
        wide = wide.view(stored.shape).to(self.device)
        if not bool(wide.isfinite().all()):
            raise CheckpointError(f"{stored.file}: tensor {stored.name}: holds infinities or NaN")
        w = empty(self.scheme.format_for(stored), *stored.shape, device=self.device)
        w.fill(wide)
        made = _tensors(w)
        return {
            name: made[name.rpartition(".")[2]].view(shape)
            for name, _, shape in self.entries[stored.name]
        }

    # ---- what comes last

    def _write_index(self) -> None:
        if [s.name for s in self.shards] == [SINGLE]:
            return
        where = {name: s.name for s in self.shards for name in s.layout.places}
        index = {
            "metadata": {"total_size": self.written},
            "weight_map": dict(sorted(where.items())),
        }
        write_file(self.out / INDEX, _json(index))

    def _ignored(self) -> list[str]:
        """The linear maps that stay wide, as llm-compressor lists them: by name."""
        return sorted(
            t.name.removesuffix(".weight")
            for t in self.files.tensors.values()
            if t.name.endswith(".weight") and len(t.shape) == 2 and t.name not in self.names
        )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise Invalid(f"--device must be cpu, cuda or cuda:N, got {name}", "device")
    card, count = card_of(name), torch.cuda.device_count()
    if card is not None and card >= count:
        raise Invalid(f"--device {name}: PyTorch sees {count} GPUs", "device")
    return torch.device(name)


def _refuse_quantised(source: Path, config: Mapping[str, Any], files: CheckpointFiles) -> None:
    for name, stored in files.tensors.items():
        if name.rpartition(".")[2] in OWN_SUFFIXES or stored.dtype.startswith("F8"):
            raise Invalid(f"{source}: is quantised already ({name})", "model")
    if where := speaks_of_quantisation(source, config):
        raise Invalid(f"{source}: is quantised already ({where})", "model")


def _check_out(source: Path, out: Path) -> None:
    """A new directory, an empty one, or one of an unfinished run."""
    real = out.resolve()
    if real == source.resolve() or source.resolve() in real.parents:
        raise Invalid(f"{out}: lies in MODEL: name another directory", "out")
    try:
        unusable = out.exists() and (
            not out.is_dir() or (any(out.iterdir()) and not (out / STATE).exists())
        )
    except OSError as e:
        raise Invalid(f"{out}: cannot be read ({e.strerror})", "out") from None
    if unusable:
        raise Invalid(f"{out}: is there already: name a new or an empty directory", "out")


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _read(stored: StoredTensor, fd: int, limit: int) -> Iterator[tuple[int, bytes]]:
    """Pieces of a tensor, and where in it they begin."""
    at = 0
    while at < stored.nbytes:
        try:
            data = os.pread(fd, min(limit, stored.nbytes - at), stored.start + at)
        except OSError as e:
            raise _unreadable(stored, e.strerror or str(e)) from None
        if not data:
            raise _unreadable(stored, "the file ended early")
        yield at, data
        at += len(data)


def _unreadable(stored: StoredTensor, why: str) -> CheckpointError:
    return CheckpointError(f"{stored.file}: tensor {stored.name}: cannot be read ({why})")


def _tensors(w: PackedWeight) -> dict[str, torch.Tensor]:
    """By the names that compressed-tensors gives them."""
    codes = "weight" if w.format.kind == "float8" else "weight_packed"
    made = {codes: w.codes, "weight_scale": w.scale, "weight_shape": torch.tensor(w.shape)}
    if w.zero is not None:
        half = 1 << w.format.bits - 1
        # Words run along the outputs, whose last may be of the middle's numbers.
        numbers = torch.nn.functional.pad(w.zero.T + half, (0, -len(w.zero) % 8), value=half)
        made["weight_zero_point"] = pack(numbers, w.format.bits).T
    return made


def _bytes(t: torch.Tensor) -> memoryview:
    data: Any = t.cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(data).cast("B")

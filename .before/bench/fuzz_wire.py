"""Fuzzes everything that crosses a process: chunks and control messages, and those who read them.

    python bench/fuzz_wire.py --inputs 1000000 --out bench/results/fuzz_wire.json
    python bench/fuzz_wire.py --table                         # what docs/faults.md shows of that file

**Chunks**, 40 % of the inputs: mutated golden chunks go to the wire decoder, and each must be refused or be a chunk in
its one encoding. Half of the mutants are blind (bits, bytes, cuts, splices), half are mended: the header is decoded,
changed and encoded again with the right lengths and checksums, so that they get past the checks that stop the blind
ones. **Inboxes**, 20 %: chunks of few requests in no order, some of them damaged, among announcements, interruptions
and ends; what comes out must follow what came out before, and no chunk may be kept, or let go of twice. **Control
messages**, 40 %: see `fuzz_control.py`. One process, one seed, one count per outcome. It stops at the first broken rule
with the input in hexadecimal, or after ten minutes without progress, and fails if its memory grows."""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import re
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto.connector import wire
from stretto.connector.contract import Chunk, ChunkHeader, Corrupt, VersionMismatch
from stretto.stage.inbox import Gap, Inboxes, Unannounced
from stretto.types import Mark, RequestId, Span

INTERESTING = [0, 1, 2, 63, 64, 65, 127, 128, 255, 256, 4095, 2**15, 2**16, 2**30, 2**31, 2**32 - 1, 2**53, 2**63]
REST = struct.Struct("<HHIIQQQQQQ")  # the prefix behind its checksum
NAMES = ["ids", "", "x" * 64, "x" * 65, "a/b", "..", "é", "ids\n"]
DTYPES = [*(str(dtype.value) for dtype in wire.DTYPES), "float8_e4m3fn", "object", "", "int128"]


def golden() -> list[bytes]:
    """Chunks of every shape: no tensors, one, many, every dtype, scalar, empty; with and without a checksum."""
    torch.manual_seed(0)
    r = RequestId("r-42")
    rows = {
        "ids": torch.tensor([7, 8], dtype=torch.int32),
        "media": torch.tensor([[5, 6]]),
        "hidden": torch.randn(1, 32).to(torch.bfloat16),
    }
    kinds = {f"t{i}": torch.randint(0, 2, (3,)).to(dtype) for i, dtype in enumerate(wire.DTYPES.values())}
    shapes = {
        "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 8),
        "deep": torch.ones(1, 2, 1, 2, dtype=torch.bool),
    }
    chunks = [
        wire.chunk(r, Span(9, 9), Mark.REQUEST_END, {}, epoch=1, segment=2, seq=3),
        wire.chunk(r, Span(0, 4), Mark.MORE, {"codes": torch.arange(64, dtype=torch.int32).view(4, 16)}),
        wire.chunk(r, Span(4, 6), Mark.SEGMENT_END, rows, epoch=1, seq=2),
        wire.chunk(r, Span(0, 3), Mark.MORE, kinds),
        wire.chunk(r, Span(0, 1), Mark.MORE, shapes, epoch=2**40),
    ]
    return [bytes(wire.encode(chunk, checksum=checksum)) for chunk in chunks for checksum in (False, True)]


def blind(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Changes that know nothing of the format."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(8):
            case 0 if out:
                out[at] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out += rng.randbytes(rng.choice((1, 4, 63, 64, 200)))
            case 4:
                del out[at : at + rng.choice((1, 2, 8, 64))]
            case 5:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 6:
                other = rng.choice(corpus)
                out[at:] = other[rng.randrange(len(other)) :]
            case _:
                width, form = rng.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
                where = rng.randrange(0, wire.PREFIX_BYTES)
                value = rng.choice(INTERESTING) % 2 ** (8 * width)
                out[where : where + width] = struct.pack(form, value)
    return bytes(out)


def mended(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Changes of the header's or the prefix's meaning, with lengths and checksums made right again."""
    flags, mark, length, _crc, blobs, *counters = REST.unpack_from(data, 12)
    head: dict[str, Any] = msgspec.msgpack.decode(data[wire.PREFIX_BYTES : wire.PREFIX_BYTES + length])
    area = bytearray(data[len(data) - blobs :]) if blobs else bytearray()
    for _ in range(rng.choice((1, 1, 2, 3))):
        _twist(rng, head, area)
    raw = msgspec.msgpack.encode(head)
    if rng.random() < 0.15:  # the same meaning in other bytes, or bytes with no meaning
        raw = _respell(rng, raw)
    at = wire.PREFIX_BYTES + len(raw)
    pad = bytes(-at % wire.ALIGN) if area else b""
    if pad and rng.random() < 0.05:
        pad = rng.randbytes(len(pad))
    if rng.random() < 0.05:
        flags = rng.randrange(2**16)
    crc = zlib.crc32(area) if flags & 1 and area and rng.random() < 0.9 else rng.choice((0, 0, 0, 7))
    if rng.random() < 0.1:
        mark = rng.choice((0, 1, 2, 3, 2**16 - 1))
    if rng.random() < 0.1:
        counters[rng.randrange(len(counters))] = rng.choice(INTERESTING)
    zero = rng.choice((0,) * 30 + (1, 2**15))
    rest = REST.pack(flags, mark, len(raw), crc, len(area), *counters) + raw + pad
    start = struct.pack("<4sHHI", wire.MAGIC, wire.WIRE_VERSION, zero, zlib.crc32(rest))
    return start + rest + bytes(area)


def _twist(rng: random.Random, head: dict[str, Any], area: bytearray) -> None:
    table = head.get("tensors")
    entry = rng.choice(table) if isinstance(table, list) and table and isinstance(table[0], dict) else None
    match rng.randrange(9):
        case 0:
            head[rng.choice(list(head))] = _value(rng)
        case 1:
            head.pop(rng.choice(list(head)), None)
        case 2:
            head[rng.choice(("extra", "Version", "request "))] = _value(rng)
        case 3 if entry is not None:
            entry[rng.choice(("name", "dtype", "shape", "offset", "extra"))] = _value(rng)
        case 4 if entry is not None and isinstance(entry.get("shape"), list):
            entry["shape"] = [rng.choice((-1, 0, 1, 2, 3, *INTERESTING)) for _ in range(rng.randrange(10))]
        case 5 if entry is not None:
            entry["offset"] = rng.choice((0, 64, 128, 192, -64, 1, len(area), 2**40))
        case 6 if isinstance(table, list):
            head["tensors"] = table * rng.choice((0, 2, 17))
        case 7 if area:
            area[rng.randrange(len(area))] = rng.randrange(256)
        case _:
            if area and rng.random() < 0.5:
                del area[rng.randrange(len(area)) :]
            else:
                area += rng.randbytes(rng.choice((1, 4, 64)))


def _value(rng: random.Random) -> Any:
    picks: list[Callable[[], Any]] = [
        lambda: rng.choice(INTERESTING),
        lambda: -rng.choice(INTERESTING),
        lambda: rng.choice(NAMES),
        lambda: rng.choice(DTYPES),
        lambda: rng.choice((None, True, 1.0, float("nan"), b"ids", [], {}, [1, 2], [[]], {"name": "ids"})),
        lambda: [rng.choice(INTERESTING) for _ in range(rng.randrange(5))],
    ]
    return rng.choice(picks)()


def _respell(rng: random.Random, raw: bytes) -> bytes:
    """Non-minimal integers, doubled keys, trailing or missing bytes."""
    at = rng.randrange(len(raw))
    match rng.randrange(4):
        case 0:
            return raw[:at] + b"\xcc" + raw[at:]  # perhaps a small integer, now in two bytes
        case 1:
            return raw + rng.randbytes(rng.choice((1, 3)))
        case 2:
            return raw[:at]
        case _:
            return raw[:at] + rng.randbytes(1) + raw[at + 1 :]


def judge(data: bytes, corpus: dict[bytes, ChunkHeader], was_blind: bool) -> str:
    """The outcome's name. Raises AssertionError if a rule is broken, or whatever escaped from the decoder."""
    try:
        chunk = wire.decode(bytearray(data))
    except VersionMismatch:
        return "version"
    except Corrupt as error:
        return "corrupt: " + re.sub(r"'.*?'|[0-9]+", "_", error.message).split(":")[0]
    checksum = bool(struct.unpack_from("<H", data, 12)[0] & 1)
    assert wire.encode(chunk, checksum=checksum) == data, "accepted, but its encoding is another"
    if data in corpus:
        return "accepted: unchanged"
    if was_blind:
        assert not checksum, "a blind change went past the blob checksum"
        assert chunk.header in corpus.values(), "a blind change went past the header checksum"
        return "accepted: blob bytes only"
    return "accepted: another valid chunk"


def fuzz(inputs: int, seed: int, step: Callable[[], None] = lambda: None) -> tuple[Counter[str], float]:
    """How often each outcome came, and the longest that one input took."""
    rng, corpus, outcomes, longest = random.Random(seed), golden(), Counter[str](), 0.0
    headers = {data: wire.decode(bytearray(data)).header for data in corpus}
    for index in range(inputs):
        source = rng.choice(corpus)
        was_blind = index % 2 == 0
        data = (blind if was_blind else mended)(rng, source, corpus)
        start = time.process_time()  # of this process: others may have the core for a while
        try:
            outcomes[judge(data, headers, was_blind)] += 1
        except Exception as error:
            raise SystemExit(f"input {index}: {error!r}\n{data.hex()}") from error
        longest = max(longest, time.process_time() - start)
        step()
    return outcomes, longest


# -- inboxes

LATEST = 6  # requests that chunks come for: early ones, open ones, and ones that are over


@dataclass(slots=True)
class Slot:
    """Held by one chunk, and let go of once."""

    held: list[Slot]

    def release(self) -> None:
        self.held.remove(self)


@dataclass(slots=True)
class Reader:
    """A link's inboxes among chunks in no order, and what must be true of what they give out."""

    rng: random.Random
    boxes: Inboxes = field(default_factory=lambda: Inboxes(early_chunks=16, early_bytes=4096))
    held: list[Slot] = field(default_factory=list)  # one for each chunk that was not let go of
    given: dict[RequestId, tuple[int, int, int, int]] = field(default_factory=dict)  # epoch, segment, seq and stop
    names: int = 0

    def chunk(self) -> Chunk:
        """Often the next of a request that is open, else anything near it; sometimes damaged on its way."""
        rng = self.rng
        request = self.request()
        epoch, segment, seq, stop = rng.randrange(3), rng.randrange(3), rng.randrange(4), rng.randrange(9)
        if request in self.boxes and rng.random() < 0.7:
            box = self.boxes[request]
            epoch, segment, seq, stop = box.epoch, box.segment, len(box._stops), box.stop
            if box.mark is not Mark.MORE:
                segment, seq, stop = segment + 1, 0, 0
        span = Span(stop, stop + rng.randrange(4))
        tensors = {"rows": torch.arange(len(span), dtype=torch.int32)} if rng.random() < 0.9 else {}
        mark = rng.choice((Mark.MORE, Mark.MORE, Mark.MORE, Mark.SEGMENT_END, Mark.REQUEST_END))
        made = wire.chunk(request, span, mark, tensors, epoch=epoch, segment=segment, seq=seq)
        data = wire.encode(made, checksum=True)
        if rng.random() < 0.05:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        slot = Slot(self.held)
        chunk = wire.decode(data, slot)
        self.held.append(slot)
        return chunk

    def request(self) -> RequestId:
        """One of the latest."""
        return RequestId(f"r-{max(0, self.names - self.rng.randrange(LATEST))}")

    def act(self) -> str:
        rng, boxes, request = self.rng, self.boxes, self.request()
        what = rng.randrange(40)
        if what < 3:
            boxes.forget(RequestId(f"r-{self.names - LATEST}"))
            self.names += 1
        elif what < 9 and request not in boxes:
            boxes.announce(request)  # a stage announces each once; here also what is over
        elif what == 9:
            boxes.forget(request)
            self.given.pop(request, None)
        elif what == 10 and request in boxes:
            boxes.interrupt(request, boxes[request].epoch + rng.randrange(1, 3), rng.randrange(3))
        elif what < 16 and request in boxes:
            self.pop(request)
        else:
            return boxes.push(self.chunk()).name.lower()
        return "no chunk"

    def pop(self, request: RequestId) -> None:
        chunk = self.boxes[request].pop()
        if chunk is None:
            return
        h = chunk.header
        epoch, segment, seq, stop = self.given.get(request, (0, 0, -1, 0))
        assert (h.epoch, h.segment) >= (epoch, segment), "an older chunk after a newer one"
        if (h.epoch, h.segment) == (epoch, segment):
            assert (h.seq, h.start) == (seq + 1, stop), "a gap, or a repeat"
        else:
            assert (h.seq, h.start) == (0, 0), "a segment that does not begin at its beginning"
        self.given[request] = (h.epoch, h.segment, h.seq, h.stop)
        chunk.release()

    def check(self) -> None:
        boxes = self.boxes
        assert boxes.num_early <= boxes.early_chunks
        assert len(self.held) == boxes.num_early + sum(map(len, boxes)), "a chunk that nobody has, or a slot too many"


def fuzz_inboxes(inputs: int, seed: int, step: Callable[[], None]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    reader = Reader(random.Random(seed))
    while outcomes.total() < inputs:
        try:
            what = reader.act()
        except (Corrupt, VersionMismatch):
            what = "refused"
        except (Gap, Unannounced) as error:
            what = type(error).__name__.lower()
            reader.boxes.forget(error.request or RequestId(""))  # as a stage does with a request that fails
            reader.given.pop(error.request or RequestId(""), None)
        reader.check()
        if what != "no chunk":
            outcomes[f"inbox: {what}"] += 1
            step()
    for request in [box.request for box in reader.boxes] + list(reader.boxes._early):
        reader.boxes.forget(request)
    assert not reader.held, "chunks that were never let go of"
    return outcomes


# -- all of it

PARTS = {"chunks": 0.4, "inboxes": 0.2, "control messages": 0.4}
PATIENCE_S = 600
MOST_BYTES = 4 << 30  # of memory: what asks for more fails, and does not take the machine with it
SAMPLES = 200
FLAT = 0.02  # KiB per input
UNREAD = ("corrupt", "version", "frame")


def table(result: dict[str, Any]) -> str:
    head = f"{result['inputs']:,} inputs at {result['env']['commit']}, seed {result['seed']}"
    rows = [
        f"{head}; problems: {len(result['problems'])}.",
        "",
        "| | inputs | could be read | seconds |",
        "|---|---|---|---|",
    ]
    for part, p in result["parts"].items():
        rows.append(f"| {part} | {p['inputs']:,} | {p['read']:,} | {p['seconds']:.0f} |")
    return "\n".join(rows)


def run(inputs: int, seed: int) -> dict[str, Any]:
    from env import describe  # here and below, since a test imports this module from elsewhere

    result: dict[str, Any] = {"env": describe(), "inputs": inputs, "seed": seed, "parts": {}, "problems": [], "raw": {}}
    fuzz(1000, seed)  # warm up
    for part, share in PARTS.items():
        told, samples, problems = run_part(part, round(inputs * share), seed)
        result["parts"][part], result["raw"][part] = told, samples
        result["problems"] += problems
    return result


def run_part(part: str, inputs: int, seed: int) -> tuple[dict[str, Any], list[Any], list[str]]:
    from fuzz_control import fuzz_control
    from pool import Memory, trend
    from tqdm import tqdm

    done, every = 0, max(1, inputs // SAMPLES)
    memory = Memory.of([part], 2 + inputs // every)
    start, longest = time.perf_counter(), 0.0
    with tqdm(total=inputs, desc=part, mininterval=1.0) as bar:

        def step() -> None:
            nonlocal done
            done += 1
            if done % every == 0:
                bar.update(every)
                memory.sample(done, [None])
                faulthandler.dump_traceback_later(PATIENCE_S, exit=True)

        match part:
            case "chunks":
                outcomes, longest = fuzz(inputs, seed, step)
            case "inboxes":
                outcomes = fuzz_inboxes(inputs, seed, step)
            case _:
                outcomes = fuzz_control(inputs, seed, step)
    faulthandler.cancel_dump_traceback_later()
    grown = trend(memory.taken[:, 0], memory.taken[:, 1])
    told = {
        "inputs": inputs,
        "seconds": round(time.perf_counter() - start, 1),
        "longest_cpu_ms": round(longest * 1e3, 2) if longest else None,
        "read": sum(n for what, n in outcomes.items() if not what.startswith(UNREAD) and "refused" not in what),
        "memory_mib": asdict(grown) | {"flat": grown.flat(FLAT)},
        "outcomes": dict(outcomes.most_common()),
    }
    problems = [] if grown.flat(FLAT) else [f"memory grows with {part}: {grown}"]
    problems += [] if done == inputs else [f"{done} of {inputs} {part}"]
    return told, memory.taken.tolist(), problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="print what the documentation shows of a result, and end")
    args = parser.parse_args()
    here = Path(__file__).parent
    if args.table:
        print(table(json.loads((args.out or here / "results/fuzz_wire.json").read_text())))
        return
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    from pool import store

    store(run(args.inputs, args.seed), args.out)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()

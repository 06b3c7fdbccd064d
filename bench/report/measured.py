"""The files in bench/results as the pictures and tables need them, and what a step has to read and
to compute.

A file that is not there is None; what would come from it is left out. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness.results import RESULTS, read

PEAK_FLOPS = 790e12
"""bf16 products that an H200 does in practice (its data sheet says 989e12)."""
BANDWIDTH = 4.28e12
"""Bytes per second of a large copy, where no file says what was measured."""
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder that matter for bytes and FLOPs."""

    layers: int
    hidden: int
    qkv: int
    o: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    expert: int
    shared: int
    vocab: int


THINKER = Shape(48, 2048, 5120, 4096, 32, 4, 128, 8, 768, 0, 152064)
TALKER = Shape(20, 1024, 2560, 2048, 16, 2, 128, 6, 384, 768, 3072)
PREDICTOR_LAYERS, PREDICTOR_PASSES = 5, 15
PREDICTOR_LAYER = 4096 * 1024 + 1024 * 2048 + 3 * 3072 * 1024  # weights
PREDICTOR_HEAD = 2048 * 1024


def distinct(shape: Shape, rows: int) -> float:
    """Experts that rows read together if each chooses by itself."""
    return shape.experts * (1 - (1 - shape.top_k / shape.experts) ** rows)


def layer_bytes(
    shape: Shape, rows: int, experts: float, context: int = CONTEXT
) -> dict[str, float]:
    """The fewest bytes that each part of a layer reads, bf16."""
    one = 2.0 * shape.expert * shape.hidden
    return {
        "qkv": 2.0 * shape.qkv * shape.hidden,
        "attention": rows * context * shape.kv_heads * 128 * 4.0,
        "o": 2.0 * shape.o * shape.hidden,
        "router": 2.0 * shape.experts * shape.hidden,
        "up": 2 * (experts + shape.shared / shape.expert) * one,
        "down": (experts + shape.shared / shape.expert) * one,
    }


def row_flops(shape: Shape, context: int = CONTEXT) -> float:
    """Of one row through a decoder and its head."""
    weights = shape.qkv * shape.hidden + shape.o * shape.hidden + shape.experts * shape.hidden
    weights += 3 * (shape.top_k * shape.expert + shape.shared) * shape.hidden
    attention = 4.0 * context * shape.heads * 128
    return shape.layers * (2.0 * weights + attention) + 2.0 * shape.vocab * shape.hidden


def step_flops(what: str, batch: int) -> float:
    if what.startswith("thinker"):
        return batch * row_flops(THINKER)
    passes = (
        PREDICTOR_PASSES + 1
    ) * PREDICTOR_LAYERS * PREDICTOR_LAYER + PREDICTOR_PASSES * PREDICTOR_HEAD
    return batch * (row_flops(TALKER) + 2.0 * passes)


@cache
def _read(path: Path, changed: int) -> Any:
    """Once, unless it has changed: some are megabytes, and many tables are made of each."""
    return read(path)


@dataclass(frozen=True, slots=True)
class Results:
    folder: Path = RESULTS

    def file(self, name: str) -> Any:
        path = self.folder / f"{name}.json"
        return _read(path, path.stat().st_mtime_ns) if path.exists() else None

    def serving(self) -> list[Any]:
        """The run over HTTP, and its repetition if there is one."""
        return [found for name in ("h200", "h200_again") if (found := self.file(name)) is not None]

    def starts(self) -> list[Any]:
        """Every start of a server that was timed, once. (A file that holds no more than a second
        pass over the server of another has that one's start in it.)"""
        found: list[Any] = []
        for s in self.serving():
            for one in s.get("starts") or filter(None, [s.get("start")]):
                if one not in found:
                    found.append(one)
        return found

    def same_server(self) -> bool:
        """Both files over HTTP are from one server."""
        return len(self.serving()) == 2 and len(self.starts()) == 1

    def step(self, what: str, batch: int, file: str = "steps_h200") -> Any:
        steps = (self.file(file) or {}).get("steps", [])
        return next((s for s in steps if s["what"] == what and s["batch"] == batch), None)

    def bandwidth(self) -> float:
        return float((self.file("steps_h200") or {}).get("copy_bytes_per_s", BANDWIDTH))

    def tuned(self) -> dict[tuple[str, tuple[int, ...]], float]:
        """Best time of each kernel by itself, µs."""
        times = (self.file("tune_h200") or {}).get("times", [])
        return {(t["kernel"], tuple(t["key"])): t["us"] for t in times}

    def prompts(self) -> dict[str, float]:
        """Passes and kernels of prompts: what, µs."""
        times: dict[str, float] = (self.file("prefill_h200") or {}).get("times_us", {})
        return times


def found_in(serving: Any, part: str) -> list[Any]:
    found: list[Any] = serving.get("parts", {}).get(part, {}).get("found", [])
    return found


def level(serving: Any, part: str, workload: str, streams: int) -> Any:
    return next(
        (
            f
            for f in found_in(serving, part)
            if f["workload"] == workload and f["streams"] == streams
        ),
        None,
    )


# ---- a step's kernels over time


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel of a step. Kernels begin before the one in front has ended, so what one adds to the
    step is the time from the end of all before it to its own (`adds`)."""

    name: str
    start: float  # µs from the step's first kernel
    took: float
    adds: float

    @property
    def stop(self) -> float:
        return self.start + self.took


def second(timeline: Sequence[Any]) -> list[Any]:
    """Of several recorded steps the second (the first may have begun cold), from its `_begin` on;
    of one, that one."""
    begins = [i for i, e in enumerate(timeline) if e[0].startswith("_begin")]
    if not begins:
        return []
    first = begins[1] if len(begins) > 1 else begins[0]
    after = next((b for b in begins if b > first), len(timeline))
    return [(name, round(start, 2), round(took, 2)) for name, start, took in timeline[first:after]]


def one_step(timeline: list[Any]) -> list[Ran]:
    events = second(timeline)
    if not events:
        return []
    zero, end, ran = events[0][1], events[0][1], []
    for name, start, took in events:
        ran.append(Ran(name, start - zero, took, max(0.0, start + took - end)))
        end = max(end, start + took)
    return ran


NAMES = {
    "decode": "attention", "route": "router", "top": "router, choice", "up_vector": "up",
    "up_matrix": "up", "down_vector": "down", "down_matrix": "down", "add_slots": "down, sum",
}  # fmt: skip


def layers(step: list[Ran]) -> Iterator[list[tuple[str, Ran]]]:
    """Kernels of each layer with what they are. Products are known by their place: qkv stands
    before attention, o and the router's behind it."""
    places = [i for i, r in enumerate(step) if r.name == "_decode"]
    for here, following in zip(places, [*places[1:], None], strict=True):
        if following is None:  # the last one: as long as the others
            if len(places) < 2:
                return
            following = min(here + places[-1] - places[-2], len(step))
        after = iter(("o", "router"))
        named: list[tuple[str, Ran]] = []
        for r in step[here - 1 : following - 1]:
            if r.name in ("_vector", "_matrix", "_split"):
                named.append(("qkv" if not named else next(after, "product"), r))
            else:
                named.append((NAMES.get(r.name.lstrip("_"), r.name.lstrip("_")), r))
        yield named

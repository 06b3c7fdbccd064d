"""Times of the sampling kernels at the sizes of the real model, inside CUDA graphs.

A graph holds the kernel some times in a row, on inputs that rotate, so that neither the launch nor a warm cache line
decides the number; the time reported is that of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from stretto.kernels.fast import sampling
from stretto.types import CODE0, GREEDY, RESIDUAL, SamplingParams

INPUTS, REPLAYS = 8, 100
TEXT = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top_p": SamplingParams(temperature=0.7, top_p=0.9),
    "penalty": SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1),
    "all": SamplingParams(temperature=3.0, top_k=5000, top_p=0.99),
}


def run(report: Callable[[str, float], None]) -> None:
    """Report (name, µs per call), at 1, 8, 32 and 64 rows."""
    for batch in (1, 8, 32, 64):
        for name, p in TEXT.items():
            report(f"pick_text {name} rows={batch}", _text(batch, p))
        report(f"pick_code0 rows={batch}", _code0(batch))
        report(f"pick_residual greedy rows={batch}", _residual(batch, GREEDY))
        for warps in (4, 8):
            for shortlist in (2, 128):  # 2: as good as none
                name = f"pick_residual sampled rows={batch} warps={warps} shortlist={shortlist}"
                with _tuned(warps=warps, shortlist=shortlist):
                    report(name, _residual(batch, RESIDUAL))


@contextmanager
def _tuned(**values: int) -> Iterator[None]:
    usual = sampling.config
    sampling.config = lambda kernel, key, default: usual(kernel, key, default) | values
    try:
        yield
    finally:
        sampling.config = usual


def _columns(batch: int, p: SamplingParams) -> sampling.Columns:
    floats = torch.tensor([[p.temperature], [p.top_p], [p.repetition_penalty]]).repeat(1, batch + 1)
    ints = torch.stack([torch.full((batch + 1,), p.top_k), torch.arange(batch + 1)])
    return sampling.Columns(floats.cuda(), ints.cuda())


def _inputs(batch: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, sampling.Answer]:
    """Logits to rotate, rows, positions, answers so far."""
    logits = [(torch.randn(batch, size, device="cuda") * 3).bfloat16() for _ in range(INPUTS)]
    rows, positions = torch.randperm(batch, device="cuda"), torch.arange(batch, device="cuda")
    seen = torch.zeros(batch + 1, size, dtype=torch.bool, device="cuda")
    floor = torch.zeros(batch + 1, dtype=torch.int64, device="cuda")
    return logits, rows, positions, sampling.Answer(seen, floor, end=2150)


def _text(batch: int, p: SamplingParams) -> float:
    logits, rows, positions, answer = _inputs(batch, 152_064)
    params, next = _columns(batch, p), torch.zeros(batch + 1, dtype=torch.int64, device="cuda")
    return _per_call(lambda i: sampling.pick_text(logits[i], rows, positions, params, answer, next))


def _code0(batch: int) -> float:
    logits, rows, positions, answer = _inputs(batch, 3072)
    suppress = torch.arange(3072, device="cuda") >= 2048
    table, x, out = _frame(batch, 3072)
    params = _columns(batch, CODE0)
    return _per_call(lambda i: sampling.pick_code0(logits[i], rows, positions, params, answer, suppress, table, x, out))


def _residual(batch: int, p: SamplingParams) -> float:
    logits, rows, positions, _ = _inputs(batch, 2048)
    table, x, out = _frame(batch, 2048)
    params = _columns(batch, p)
    return _per_call(lambda i: sampling.pick_residual(logits[i], rows, positions, params, 1 + i, table, x, out))


def _frame(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor, sampling.FrameOut]:
    table = torch.randn(size, 1024, device="cuda").bfloat16()
    x = torch.empty(batch, 1024, dtype=torch.bfloat16, device="cuda")
    codes = torch.zeros(batch, 16, dtype=torch.int64, device="cuda")
    return table, x, sampling.FrameOut(codes, torch.zeros(batch, 1024, device="cuda"))


def _per_call(call: Callable[[int], object]) -> float:
    """Median µs of one call, from graphs of one call per input."""
    for i in range(INPUTS):
        call(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(INPUTS):
            call(i)
    for _ in range(10):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
    return times[REPLAYS // 2] * 1000 / INPUTS


if __name__ == "__main__":
    run(lambda name, us: print(f"{name:60s} {us:8.2f} µs"))

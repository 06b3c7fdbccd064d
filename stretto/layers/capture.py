"""Capturing a pass as CUDA graphs, one per size it comes in.

Owns what all captures have in common: the warm-ups, the memory pool that the graphs of one owner
share, the stream they are captured on, and a first replay of each. Called once at start by whoever
owns the graphs, before anything runs on that stream; filling inputs and replaying are the
owner's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Key = TypeVar("Key")
Result = TypeVar("Result")
Captured = tuple[torch.cuda.CUDAGraph, Result]
"""A graph, and what its pass returned: a replay writes there anew."""


@torch.inference_mode()
def capture_graphs(
    keys: Sequence[Key],
    prepare: Callable[[Key], Callable[[], Result]],
    stream: torch.cuda.Stream,
    warmups: int = 1,
) -> dict[Key, Captured[Result]]:
    """A graph for each key, in their order: largest first, so that the smaller ones reuse its
    memory. All or none.

    `prepare` makes what one graph alone reads, and returns the pass over it. A graph keeps nothing
    alive of what it reads: the owner has it already, or the pass returns it."""
    # what all graphs read was made there
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    graphs: dict[Key, Captured[Result]] = {}
    pool = None
    for key in keys:
        try:
            with torch.cuda.stream(stream):
                run = prepare(key)
                # Kernels are compiled, libraries choose theirs and their workspaces outside of the
                # capture.
                for _ in range(warmups):
                    run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = run()
        except RuntimeError as e:
            # out of memory among others
            e.add_note(f"while capturing {key}")
            raise
        pool = pool or graph.pool()
        graphs[key] = graph, result
    with torch.cuda.stream(stream):
        for graph, _ in graphs.values():
            # its first replay sends it to the device: the first request need not wait for that
            graph.replay()
    return graphs

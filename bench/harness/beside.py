"""Other servers on the device of the one that is measured, each with listeners of its own. Imports
no torch."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import checkpoint
from bench.harness.crowd import Crowd, Questions, told
from bench.harness.serving import GpuWatch, serving
from bench.harness.workload import WORKLOADS
from stretto.loadtest.runner import Closed
from stretto.preprocess.template import Tokenizer

LISTENERS = 8
ROUND_S = 8.0
SHARE = "0.04"  # of the device's memory, for each
Found = list[dict[str, Any]]


@contextmanager
def tiny_servers(
    args: argparse.Namespace, count: int, folder: Path, gpu: GpuWatch
) -> Iterator[Callable[[], Found]]:
    """Servers of the tiny model, under load until the block ends. Yields a function that says what
    their listeners heard so far, a level for each server and round."""
    found: Found = []
    stop = threading.Event()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(1, count)))
        directory = stack.enter_context(checkpoint("tiny"))
        own = argparse.Namespace(
            **{
                **vars(args),
                "model": "tiny",
                "max_rows": LISTENERS,
                "serve": ["--memory-share", SHARE],
            }
        )
        crowds = []
        for i in range(count):
            (place := folder / f"beside-{i}").mkdir()
            server = stack.enter_context(serving(own, directory, place))
            crowds.append(Crowd(server, place, gpu, processes=1))
        for crowd in crowds:
            crowd.server.wait(args.start_timeout)
        questions = Questions("tiny", Tokenizer.open(directory))

        def listen(index: int, crowd: Crowd) -> None:
            while not stop.is_set():
                bodies = questions.bodies(WORKLOADS["small"], 100 * LISTENERS)
                level, extra, _ = crowd.listen(
                    Closed(LISTENERS), bodies, warmup=LISTENERS, seconds=ROUND_S
                )
                found.append(told(level, extra) | {"workload": "small", "server": index})

        jobs = [pool.submit(listen, i, crowd) for i, crowd in enumerate(crowds)]
        try:
            yield lambda: list(found)
        finally:
            stop.set()
            for job in jobs:
                job.result()

"""A host of some checkout, stage models stubbed, in a process of its own: measured by turns with
those of others.

Run as a script in that checkout, which comes first on the module path. Reads one number of streams
a line, answers with the JSON of one measurement a line; nothing else goes to stdout. Knows how
hosts were measured in checkouts from before `bench/harness` (commit ab1147a, for one)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

PROMPT, TEXT, FRAMES, ROWS = 100, 64, 125, 128
Measure = Callable[[int], dict[str, Any]]


def of_now(directory: Any) -> Measure:
    from bench.harness.host import Asker
    from bench.harness.workload import WORKLOADS
    from bench.host.measured import MeasuredHost
    from stretto.config.engine import HostSettings
    from stretto.models.qwen3_omni.config import OmniConfig
    from stretto.models.qwen3_omni.prompts import PromptBuilder

    blocks = {"thinker": 16 * ROWS, "talker": 16 * ROWS}
    host = MeasuredHost(
        directory, HostSettings(max_rows=ROWS, blocks=blocks), stub=True, phases=False
    )
    asker, workload = (
        Asker(PromptBuilder.open(directory, OmniConfig.read(directory))),
        WORKLOADS["text-100"],
    )
    assert (workload.prompt.text_tokens, workload.text_tokens, workload.frames) == (
        PROMPT,
        TEXT,
        FRAMES,
    )
    return lambda streams: host.run(asker.round(workload, streams))


def of_before(directory: Any) -> Measure:
    from stretto.engine.settings import HostSettings  # type: ignore[import-not-found]

    from bench.host import Bench, requests, stub_codec, stub_runner  # type: ignore[attr-defined]
    from stretto.models.qwen3_omni.config import OmniConfig
    from stretto.preprocess.build import PromptBuilder  # type: ignore[import-not-found]

    class Plain(Bench):  # type: ignore[misc]
        """Without its stopwatches."""

        def _instrument(self, stub: bool) -> None:
            self.send, self.push = self.channel.post, self.channel.push
            for name, node in self.host.nodes.items():
                stub_codec(node.stage) if name == "code2wav" else stub_runner(node.stage.runner)

    settings = HostSettings(max_rows=ROWS, thinker_blocks=16 * ROWS, talker_blocks=16 * ROWS)
    host = Plain(directory, settings, True)
    builder = PromptBuilder.open(directory, OmniConfig.read(directory))
    given, rounds = (
        argparse.Namespace(prompt=PROMPT, text=TEXT, frames=FRAMES),
        iter(range(1 << 30)),
    )

    def measure(streams: int) -> dict[str, Any]:
        found: dict[str, Any] = host.run(requests(builder, given, streams, next(rounds)), False)
        return found

    return measure


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody else prints
    # The checkout's own, even where it is no regular package and another one is installed.
    bench = ModuleType("bench")
    bench.__path__ = [str(Path.cwd() / "bench")]
    sys.modules["bench"] = bench
    if (Path.cwd() / "bench" / "harness").exists():
        from bench.harness.checkpoint import checkpoint

        make = of_now
    else:
        from bench.pipeline import checkpoint  # type: ignore[import-not-found, no-redef]

        make = of_before
    try:
        from stretto.stage.host.process import settle_down
    except ImportError:  # an older tree
        from stretto.stage.host.host import settle_down  # type: ignore[attr-defined, no-redef]

    with checkpoint("tiny") as directory:
        measure = make(directory)
        settle_down()  # as a host's process does
        measure(1)  # warm
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(int(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

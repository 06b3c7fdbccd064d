"""Compiles every kernel that a server launches for cards that are not here, and checks their
limits.

    python -m bench kernels --parts cards --jobs 4 --out bench/results/compile_table.json
    python -m bench kernels --parts cards --cards sm_86 --stages talker --kernels _split,_wide

No device is needed. The steps that a host captures run at full width with two layers, on tensors
without memory, and each launch is recorded instead of made: what differs in launch parameters,
types, sizes that Triton specialises by or alignment is a variant. Each is compiled to machine code
for each card. It must have no more shared memory than one block may have there, and its registers
must fit a multiprocessor. Exit status 1: some do not.

Of the stages thinker and talker of Qwen3-Omni with wide and with quantised weights, with the
settings of `serve`."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.harness.env import describe
from bench.harness.results import parser, write
from stretto.kernels import triton as kernels
from stretto.kernels.triton import device as launching
from stretto.kernels.triton.device import CARDS
from stretto.models import source as weights
from stretto.models.compile_ahead import ALIKE, StageModel, run_tasks, tasks_of
from stretto.models.qwen3_omni.build import small
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.talker import TalkerAdapter
from stretto.models.qwen3_omni.thinker import ThinkerAdapter
from stretto.stage.runner import prefill_graphs
from stretto.stage.runner.graphs import sizes_for
from stretto.testing.qwen3_omni import released_config, released_formats

STAGES = ("thinker", "talker", "thinker int4", "talker int4-talker", "thinker fp8", "talker fp8")
"""Stages of the released model, and how their weights are stored where they are not wide."""
ROWS, CONTEXT, BLOCKS, BLOCK = 128, 4096, 16, 16
REGISTERS = 64 << 10  # of a multiprocessor, on all of these cards
SHOWN = ("BM", "BN", "BK", "M", "N", "K", "S", "SPLITS", "num_warps", "num_stages")


class Place:
    """A tensor as far as a compiler sees it: its type, and how its address is aligned."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._at

    @property
    def key(self) -> tuple[str, bool]:
        return str(self.dtype), self._at % 16 == 0


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(slots=True)
class Recorder:
    """Takes the place of launching."""

    variants: dict[Any, Variant] = field(default_factory=dict)

    def run(self, kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        options = {k: placed(v) for k, v in options.items() if k not in ("grid", "warmup")}
        places = tuple(map(placed, args))
        constants = tuple((k, v.key if isinstance(v, Place) else v) for k, v in options.items())
        key = kernel, tuple(map(key_of, places)), constants
        self.variants.setdefault(key, Variant(kernel, places, options))


def placed(value: Any) -> Any:
    return Place(value) if isinstance(value, torch.Tensor) else value


def key_of(value: Any) -> Any:
    """Of an argument: those that are alike to the compiler have the same."""
    if isinstance(value, Place):
        return value.key
    return (value == 1, value % ALIKE == 0) if type(value) is int else type(value)


def record(stage: str) -> list[Variant]:
    """The launches of one stage's steps."""
    recorder = Recorder()
    launch = JITFunction.run
    JITFunction.run = lambda kernel, *a, **o: recorder.run(kernel, *a, **o)  # type: ignore[method-assign,assignment]
    weights.fill_dummy = lambda model, seed, prefix: None  # type: ignore[assignment]
    try:
        tasks = tasks_of(stage.split()[0], sizes_for(ROWS), prefill_graphs.SIZES)
        run_tasks(small_stage(stage), tasks)
    finally:
        JITFunction.run = launch  # type: ignore[method-assign]
    return list(recorder.variants.values())


def small_stage(stage: str) -> StageModel:
    stage, _, weights_format = stage.partition(" ")
    config = small(parse(released_config())).with_formats(
        released_formats(weights_format or "bf16")
    )
    source = Source(config, None, torch.device("meta"), torch.bfloat16, progress=False)
    if stage == "thinker":
        thinker = source.thinker()
        lane = ThinkerAdapter(thinker, thinker.cache(BLOCKS, BLOCK), ROWS, CONTEXT)
        return StageModel(lane, thinker.model, lane.prompts)
    width = config.thinker.text.hidden_size
    talker = source.talker(torch.zeros(1, width, device="meta", dtype=source.dtype))
    adapter = TalkerAdapter(talker, talker.cache(BLOCKS, BLOCK), ROWS, CONTEXT)
    return StageModel(adapter, talker.model, adapter.prompts)


class Offline:
    """Triton's driver for a card that is not here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def registers_of(cubin: bytes) -> int:
    """Of one thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.findall(r"REG:(\d+)", said.stdout)[0])


def compiled(variant: Variant, card: str) -> dict[str, Any]:
    start = time.monotonic()
    shown = {k: v for k, v in variant.options.items() if k in SHOWN}
    found: dict[str, Any] = {"kernel": variant.kernel.__name__, "launch": shown}
    try:
        made = variant.kernel.run(*variant.args, grid=None, warmup=True, **variant.options)
        found["shared_bytes"] = made.metadata.shared
        found["registers"] = registers_of(made.asm["cubin"])
        found["warps"] = made.metadata.num_warps
        found["problem"] = problem(found, card)
    except Exception as e:  # noqa: BLE001  a compiler's errors are the finding
        found["problem"] = f"{type(e).__name__}: {str(e).strip().splitlines()[-1][:200]}"
    found["seconds"] = round(time.monotonic() - start, 2)
    return found


def problem(found: dict[str, Any], card: str) -> str:
    most = CARDS[card].shared_bytes
    if found["shared_bytes"] > most:
        return f"{found['shared_bytes']:,} bytes of shared memory, {most:,} are there"
    wanted = 8 * math.ceil(found["registers"] / 8) * 32 * found["warps"]
    return f"{wanted:,} registers, {REGISTERS:,} are there" if wanted > REGISTERS else ""


def as_card(card: str) -> None:
    """For the rest of this process kernels are launched, though not run, as on that card."""
    os.environ["STRETTO_KERNELS_CARD"] = card
    launching.limits.cache_clear()
    kernels.able = lambda device: True  # type: ignore[assignment]
    launching.pdl = lambda x: launching.limits(x.device).dependent_launch


def table(card: str, stage: str, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """In a process of its own."""
    as_card(card)
    variants = record(stage)
    driver.set_active(Offline(int(card.removeprefix("sm_"))))
    chosen = [v for v in variants if not wanted or v.kernel.__name__ in wanted]
    return [compiled(v, card) for v in chosen]


def words(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(given: Sequence[str]) -> int:
    p = parser("kernels --parts cards", __doc__)
    p.add_argument("--cards", type=words, default=list(CARDS), help="default: %(default)s")
    p.add_argument("--stages", type=words, default=list(STAGES), help="default: %(default)s")
    p.add_argument("--kernels", type=words, default=[], help="names (default: all)")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    args = p.parse_args(given)
    result: dict[str, Any] = {"env": describe(), "limits": {c: CARDS[c] for c in args.cards}}
    result["limits"] = {c: CARDS[c].shared_bytes for c in args.cards}
    problems = 0
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        work = [(c, s, pool.submit(table, c, s, args.kernels)) for c in args.cards
                for s in args.stages]  # fmt: skip
        for card, stage, future in work:
            found = future.result()
            bad = [f for f in found if f["problem"]]
            problems += len(bad)
            most = max((f.get("shared_bytes", 0) for f in found), default=0)
            print(f"{card:7} {stage:18} {len(found):4} variants, {len(bad)} with a problem; most: "
                  f"{most:,} bytes of shared memory", flush=True)  # fmt: skip
            for f in bad:
                print(f"  {f['kernel']} {f['launch']}: {f['problem']}")
            result[f"{card} {stage}"] = found
            write(args.out, result)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

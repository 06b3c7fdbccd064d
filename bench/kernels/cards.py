"""Compiles every kernel that a server launches for cards that are not here, and checks their
limits.

    python -m bench kernels --parts cards --jobs 4 --out bench/results/compile_table.json
    python -m bench kernels --parts cards --cards sm_86 --stages talker --kernels _split,_wide

No device is needed. `launches` finds the variants; each is compiled to machine code for each card.
It must have no more shared memory than one block may have there, its registers must fit a
multiprocessor, and a thread may spill no more than 256 bytes of them. Exit status 1: some do
not."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from bench.harness.env import describe
from bench.harness.results import parser, read, write
from bench.kernels.launches import STAGES, Variant, record
from stretto.kernels import triton as kernels
from stretto.kernels.triton import device as launching
from stretto.kernels.triton.device import CARDS

REGISTERS = 64 << 10  # of a multiprocessor, on all of these cards
SPILLED = 256  # bytes of a thread, at most
SHOWN = (
    "BM", "BN", "BK", "M", "N", "K", "S", "SPLITS", "SWAP", "KIND", "GROUP", "num_warps",
    "num_stages",
)  # fmt: skip


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


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of the stack of one thread, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", said.stdout)
    return {"registers": int(registers), "stack_bytes": int(stack)}


def compiled(variant: Variant, card: str) -> dict[str, Any]:
    start = time.monotonic()
    shown = {k: v for k, v in variant.options.items() if k in SHOWN}
    found: dict[str, Any] = {"kernel": variant.kernel.__name__, "launch": shown}
    try:
        made = variant.kernel.run(*variant.args, grid=None, warmup=True, **variant.options)
        found["shared_bytes"] = made.metadata.shared
        found |= usage(made.asm["cubin"])
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
    if wanted > REGISTERS:
        return f"{wanted:,} registers, {REGISTERS:,} are there"
    spilled = found["stack_bytes"]
    return f"{spilled:,} bytes of registers are spilled" if spilled > SPILLED else ""


def as_card(card: str) -> None:
    """For the rest of this process kernels are launched, though not run, as on that card."""
    os.environ["STRETTO_KERNELS_CARD"] = card
    launching.limits.cache_clear()
    kernels.able = lambda device: True  # type: ignore[assignment]
    launching.pdl = lambda x: launching.limits(x.device).dependent_launch


def table(card: str, stage: str, wanted: Sequence[str], step: int) -> list[dict[str, Any]]:
    """Every `step`-th of the variants of one stage, in a process of its own."""
    as_card(card)
    variants = record(stage)
    driver.set_active(Offline(int(card.removeprefix("sm_"))))
    chosen = [v for v in variants if not wanted or v.kernel.__name__ in wanted]
    return [compiled(v, card) for v in chosen[::step]]


def words(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def lasting(found: dict[str, Any]) -> dict[str, Any]:
    """What is the same each time."""
    return {k: v for k, v in found.items() if k != "seconds" and v != ""}


def of_card(result: dict[str, Any], card: str) -> list[dict[str, Any]]:
    """All variants so far, each once."""
    parts = result["variants"].items()
    return [f for name, found in parts if name.startswith(f"{card} ") for f in found]


def summary(card: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one card, over all stages."""
    return {
        "variants": len(found),
        "problems": sum("problem" in f for f in found),
        "limit_bytes": CARDS[card].shared_bytes,
        **{most: max((f.get(most, 0) for f in found), default=0)
           for most in ("shared_bytes", "registers", "stack_bytes")},
    }  # fmt: skip


def results(
    pool: ProcessPoolExecutor, cards: Sequence[str], stages: Sequence[str], wanted: Sequence[str],
    step: int,
) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:  # fmt: skip
    work = [(c, s, pool.submit(table, c, s, wanted, step)) for c in cards for s in stages]
    for card, stage, future in work:
        yield card, stage, future.result()


def main(given: Sequence[str]) -> int:
    p = parser("kernels --parts cards", __doc__)
    p.add_argument("--cards", type=words, default=list(CARDS), help="default: %(default)s")
    p.add_argument("--stages", type=words, default=list(STAGES), help="default: %(default)s")
    p.add_argument("--kernels", type=words, default=[], help="names (default: all)")
    p.add_argument("--every", type=int, default=1, metavar="N", help="each N-th of a stage alone")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    p.add_argument("--add", action="store_true", help="to what is in --out already")
    args = p.parse_args(given)
    result: dict[str, Any] = {"env": describe(), "cards": {}, "variants": {}}
    if args.add and args.out is not None and args.out.exists():
        result |= {k: v for k, v in read(args.out).items() if k != "env"}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for card, stage, found in results(pool, args.cards, args.stages, args.kernels, args.every):
            result["variants"].pop(f"{card} {stage}", None)
            before = of_card(result, card)
            fresh = [f for f in map(lasting, found) if f not in before]
            bad = [f for f in found if f["problem"]]
            print(f"{card:7} {stage:24} {len(found):4} variants, {len(bad)} with a problem",
                  flush=True)  # fmt: skip
            for f in bad:
                print(f"  {f['kernel']} {f['launch']}: {f['problem']}")
            result["variants"][f"{card} {stage}"] = fresh
            result["cards"][card] = summary(card, of_card(result, card))
            write(args.out, result)
    return int(any(result["cards"][card]["problems"] for card in args.cards))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The decode kernels at the sizes of the released models, and the launch parameters to try for
each. For the parts `alone` and `in_step`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.kernels.reference.quantized import FLOAT8
from stretto.kernels.triton import attention, experts, experts_many, grouped, tuning
from stretto.kernels.triton.candidates import nearby
from stretto.kernels.triton.descent import Tuned, chosen
from stretto.kernels.triton.experts_choice import choose, route
from stretto.kernels.triton.linear import COUNTERS, MANY, Gained, project, project_onto, tile_rows
from stretto.kernels.triton.tuning import config, name_of
from stretto.kernels.triton.untuned import matrix_defaults

CHAIN = 24
BESIDE = {
    "decode": "soon",
    "split": "fetch",
}  # of these, what only shows beside other kernels; `alone` leaves it out

LINEARS = [  # rows of w, inputs, norm, add, glu
    (5120, 2048, True, False, False),  # thinker: qkv, o, head
    (2048, 4096, False, True, False),
    (152064, 2048, False, False, False),
    (2560, 1024, True, False, False),  # talker: qkv, o (also the predictor's), head
    (1024, 2048, False, True, False),
    (3072, 1024, False, False, False),
    (4096, 1024, True, False, False),  # predictor: qkv, gate and up, down, head
    (6144, 1024, True, False, True),
    (1024, 3072, False, True, False),
    (2048, 1024, True, False, False),
    (4096, 2048, True, False, False),  # Qwen3-TTS 1.7B, talker: qkv, o, gate and up, down, head
    (2048, 2048, False, True, False),
    (12288, 2048, True, False, True),
    (2048, 6144, False, True, False),
    (3072, 2048, False, False, False),
]
ROUTERS = [(128, 2048, True, False, False), (129, 1024, True, False, False)]
MIXTURES = {"thinker": (2048, 128, 768, 8, 0), "talker": (1024, 128, 384, 6, 2)}
ATTENTIONS = {"thinker": (32, 4), "talker": (16, 2)}


@dataclass(slots=True)
class Case:
    kernel: str
    key: tuple[int, ...]
    candidates: list[Tuned]
    make: Callable[[], Callable[[Tuned, int], Any]]  # -> run(candidate, index in the chain)
    bytes: float  # read per launch


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def copies(nbytes: float) -> int:
    """How many copies of the weights it takes for each to be out of the cache when it is used
    again, within limits."""
    return max(2, min(CHAIN, int(400e6 / nbytes) + 1))


def linear_case(
    rows: int, outputs: int, inputs: int, norm: bool, add: bool, glu: bool, kind: str
) -> Case:
    nbytes = outputs * inputs * 2.0

    def make() -> Callable[[Tuned, int], Any]:
        ws = [rand(outputs, inputs, scale=0.02) for _ in range(copies(nbytes))]
        x, gain = rand(rows, inputs), rand(inputs)
        residual = rand(rows, outputs) if add else None

        gained = Gained(x, torch.ones(64, rows, device="cuda"), 1e-6)
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")
        next_gain = rand(outputs)

        def run(c: Tuned, i: int) -> Any:
            w = ws[i % len(ws)]
            if norm and rows > 1:
                return project(gained, w, glu=glu, counters=counters, tuned=c)
            if residual is not None and rows > 1:
                return project_onto(residual, x, w, (next_gain, 1e-6), None, counters, c)
            return project(
                x,
                w,
                norm=(gain, 1e-6) if norm else None,
                add=residual,
                glu=glu,
                counters=counters,
                tuned=c,
            )

        return run

    found: list[Tuned] = []
    if kind == "vector":
        chunks = [c for c in (4096, 2048, 1024) if inputs % c == 0][:2]
        for bn, bk, warps in itertools.product((2, 4, 8, 16), chunks, (2, 4, 8)):
            per_thread = bn * bk * 2 * (2 if glu else 1) / (warps * 32)
            if 32 <= per_thread <= 256:
                found.append({"BN": bn, "BK": bk, "warps": warps})
        return Case("vector", (outputs, inputs), found, make, nbytes)
    tile = tile_rows(rows)
    if outputs >= MANY:
        for bn, bk, warps, stages in (
            (64, 128, 4, 4),
            (64, 64, 4, 5),
            (128, 64, 4, 4),
            (128, 64, 8, 4),
            (32, 128, 4, 4),
        ):
            if stages * bk * 2 * (bn + tile) < 210_000:
                found.append({"BN": bn, "BK": bk, "warps": warps, "stages": stages})
        return Case("wide", (tile, outputs, inputs), found, make, nbytes)
    if kind == "split":
        return Case(
            "split",
            (tile, outputs, inputs),
            split_candidates(tile, outputs, inputs, glu),
            make,
            nbytes,
        )
    for bn, (bk, sides, warps) in itertools.product(
        (16, 32),
        (
            (64, 4, 4),
            (128, 4, 4),
            (256, 4, 4),
            (64, 8, 8),
            (128, 8, 8),
            (256, 8, 8),
            (128, 8, 4),
            (64, 16, 8),
        ),
    ):
        per_thread = (
            sides * bk * (bn * (2 if glu else 1) + tile) / (warps * 32)
        )  # bf16 values held at once
        if inputs % (bk * sides) == 0 and per_thread <= 320:
            found.append({"BN": bn, "BK": bk, "S": sides, "warps": warps})
    return Case("matrix", (tile, outputs, inputs), found, make, nbytes)


def split_candidates(tile: int, outputs: int, inputs: int, glu: bool) -> list[Tuned]:
    """Ways to split a product along K; the first is no split (`matrix`, as tuned so far)."""
    found: list[Tuned] = [
        {"SPLITS": 0, **config("matrix", (tile, outputs, inputs), matrix_defaults(tile, inputs))}
    ]
    rows = outputs // (2 if glu else 1)
    for bn, (bk, stages), splits in itertools.product(
        (32, 64), ((64, 5), (128, 4)), (1, 2, 3, 4, 6, 8, 16)
    ):
        share, programs = inputs // splits, rows // bn * splits
        held = stages * bk * 2 * (bn * (2 if glu else 1) + tile)
        if (
            inputs % splits
            or share % bk
            or share // bk < 2
            or not min(60, rows // 4) <= programs <= 340
            or held > 200_000
        ):
            continue
        found.append({"SPLITS": splits, "BN": bn, "BK": bk, "warps": 4, "stages": stages})
    return found


def weights_of(model: str, count: int, float8: bool) -> list[experts.ExpertWeights]:
    hidden, num, size, top_k, pieces = MIXTURES[model]

    def one() -> experts.ExpertWeights:
        wide = experts.ExpertWeights(
            rand(hidden), 1e-6, rand(num + (pieces > 0), hidden, scale=0.02), rand(num, 2 * size,
            hidden, scale=0.02),
            rand(num, hidden, size, scale=0.02), top_k, True,
            *((rand(2 * pieces * size, hidden), rand(hidden, pieces * size)) if pieces else ()),
        )  # fmt: skip
        if not float8:
            return wide
        return replace(
            wide,
            gate_up=wide.gate_up.to(FLOAT8),
            down=wide.down.to(FLOAT8),
            scales=(
                torch.ones(num, 2 * size, device="cuda"),
                torch.ones(num, hidden, device="cuda"),
            ),
        )

    return [one() for _ in range(count)]


def route_case(rows: int, outputs: int, inputs: int) -> Case:
    """The router of several rows."""
    model = next(m for m, sizes in MIXTURES.items() if sizes[0] == inputs)
    nbytes = outputs * inputs * 2.0

    def make() -> Callable[[Tuned, int], Any]:
        ws = weights_of(model, 4, False)
        gained = Gained(rand(rows, inputs), torch.ones(64, rows, device="cuda"), 1e-6)
        return lambda c, i: route(gained, ws[i % 4], c)

    found = [
        {"BN": bn, "BK": bk, "warps": warps}
        for bn, bk, warps in itertools.product((16, 32, 64), (64, 128, 256), (1, 2, 4))
        if bk * (bn + tile_rows(rows)) <= 256 * warps * 32
    ]
    return Case("route", (tile_rows(rows), outputs, inputs), found, make, nbytes)


def mixture_case(model: str, rows: int, part: str, float8: bool = False) -> Case:
    hidden, num, size, top_k, pieces = MIXTURES[model]
    tile = tile_rows(rows)
    distinct = top_k if rows == 1 else num * (1 - (1 - top_k / num) ** rows)
    nbytes = (
        (distinct + pieces) * size * hidden * (1.0 if float8 else 2.0) * (2 if part == "up" else 1)
    )
    kind = "_float8" if float8 else ""

    def make() -> Callable[[Tuned, int], Any]:
        ws = weights_of(model, 4, float8)
        x = rand(rows, hidden)
        logits = [rand(rows, num + (pieces > 0)) for _ in range(8)]
        h = rand(rows, top_k + pieces, size)
        gained = Gained(x, torch.ones(64, rows, device="cuda"), 1e-6)
        choices = [choose(one[None].float(), gained, ws[0]) for one in logits] if rows > 1 else []

        def run(c: Tuned, i: int) -> Any:
            w = ws[i % 4]
            if rows == 1 and part == "up":
                return experts.up_one(x, logits[i % 8], w, tuned=c)
            if rows == 1:
                return experts.down_one(h[0], logits[i % 8], w, x, tuned=c)
            if part == "up":
                return experts_many.up(gained, choices[i % 8], w, c)
            return experts_many.down(h, choices[i % 8], w, x, tuned=c)

        return run

    found: list[Tuned] = []
    if rows == 1 and part == "up":
        for bn, warps in itertools.product((2, 4, 8, 16), (2, 4, 8)):
            if 64 <= bn * hidden * 4 / (warps * 32) <= 512:
                found.append({"BN": bn, "warps": warps})
        return Case(f"up_vector{kind}", (size, hidden), found, make, nbytes)
    if rows == 1:
        for bn, bk, warps in itertools.product((1, 2, 4, 8), (128, 256), (2, 4, 8)):
            if size % bk == 0 and 32 <= bn * bk * 8 * 2 / (warps * 32) <= 256:
                found.append({"BN": bn, "BK": bk, "warps": warps})
        return Case(f"down_vector{kind}", (hidden, size), found, make, nbytes)
    inner, width = (hidden, size) if part == "up" else (size, hidden)
    plain = (
        (32, 256, 4, 3),
        (32, 128, 4, 4),
        (64, 128, 4, 3),
        (64, 64, 4, 4),
        (128, 64, 4, 4),
        (64, 256, 4, 3),
    )
    swapped = (
        (64, 128, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (128, 64, 8, 4),
        (64, 256, 4, 3),
    )
    for swap, sizes in enumerate((plain, swapped)):
        for bn, bk, warps, stages in sizes:
            shared = stages * bk * ((1 if float8 else 2) * bn * (2 if part == "up" else 1) + 2 * 16)
            if inner % bk == 0 and width % bn == 0 and shared < 200_000:
                found.append({"BN": bn, "BK": bk, "warps": warps, "stages": stages, "swap": swap})
    return Case(
        f"{part}_matrix{kind}",
        (tile, *((size, hidden) if part == "up" else (hidden, size))),
        found,
        make,
        nbytes,
    )


def prompt_case(model: str, rows: int, part: str) -> Case:
    """Products of a prompt pass with float8 weights. (Those with wide ones: prompts.py.)"""
    hidden, num, size, top_k, _ = MIXTURES[model]
    distinct = num * (1 - (1 - top_k / num) ** rows)

    def make() -> Callable[[Tuned, int], Any]:
        ws = weights_of(model, 4, True)
        x, h = rand(rows, hidden), rand(rows * top_k, size)
        routed = grouped.route(
            rand(rows, num), top_k, True, torch.tensor([rows], dtype=torch.int32, device="cuda")
        )

        def run(c: Tuned, i: int) -> Any:
            w = ws[i % 4]
            assert w.scales is not None
            if part == "gate_up":
                return grouped.gate_up(x, w.gate_up, routed, c, w.scales[0])
            return grouped.down(h, w.down, routed, c, w.scales[1])

        return run

    average = grouped.per_expert(rows * top_k, num)
    wide = 2 if part == "down" else 1
    tiles = {
        8: ((16, 64, 128), (16, 32, 128), (16, 32, 256)),
        32: ((32, 64, 128), (32, 64, 64), (64, 64, 64)),
        64: ((64, 64, 64), (64, 128, 64)),
        256: ((128, 128, 64), (64, 128, 64)),
    }
    found = [
        {
            "M": m,
            "N": n * wide,
            "K": k,
            "SWAP": swap,
            "HALF": int(m == 128),
            "num_warps": warps,
            "num_stages": stages,
        }
        for (m, n, k), swap, (warps, stages) in itertools.product(
            tiles[average], (0, 1), ((4, 4),) if average <= 64 else ((8, 3),)
        )
    ]
    nbytes = distinct * size * hidden * (2.0 if part == "gate_up" else 1.0)
    return Case(f"prefill_{part}_float8", (num, hidden, size, average), found, make, nbytes)


def attention_case(model: str, rows: int, context: int = 1024) -> Case:
    heads, kv_heads = ATTENTIONS[model]
    width = context // 16 + 1

    def make() -> Callable[[Tuned, int], Any]:
        count = min(12, max(2, int(400e6 / (rows * width * 16 * kv_heads * 512))))
        caches = [rand(2, rows * width + 1, kv_heads, 16, 128) for _ in range(count)]
        tables = (torch.randperm(rows * width, device="cuda").to(torch.int32) + 1).view(rows, width)
        lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        slots = tables[:, (context - 1) // 16].long() * 16 + (context - 1) % 16
        qkv, gain, turn = rand(rows, (heads + 2 * kv_heads) * 128), rand(128), rand(rows, 128)
        counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device="cuda")

        def run(c: Tuned, i: int) -> Any:
            cache = caches[i % count]
            return attention.decode(
                qkv,
                (gain, gain, 1e-6),
                turn,
                turn,
                cache,
                slots,
                tables,
                lengths,
                counters,
                heads,
                tuned=c,
            )

        return run

    found = []
    for block, splits, warps in itertools.product(
        (16, 32, 64, 128), (1, 2, 4, 8, 16, 32), (2, 4, 8)
    ):
        programs = rows * kv_heads * splits
        fits = 32 <= programs <= 1024 or (programs > 1024 and splits == 1)
        if fits and splits * block <= 2 * context and 8 <= block * 4 / warps <= 128:
            found.append({"BLOCK": block, "SPLITS": splits, "warps": warps})
    key = (1 << (rows - 1).bit_length(), heads, kv_heads)
    return Case("decode", key, found, make, rows * context * kv_heads * 512.0)


def cases(only: list[str], batches: list[int], kernels: tuple[str, ...] = ("",)) -> Iterator[Case]:
    """The kinds in `only`; of these, those whose names (kernel/key) begin with one of `kernels`."""
    return (
        case for case in _cases(only, batches) if name_of(case.kernel, case.key).startswith(kernels)
    )


def _cases(only: list[str], batches: list[int]) -> Iterator[Case]:
    if "vector" in only:
        for linear in (*LINEARS, *ROUTERS):
            yield linear_case(1, *linear, kind="vector")
        for model in MIXTURES:
            for part in ("up", "down"):
                yield mixture_case(model, 1, part)
        for model in ATTENTIONS:
            yield attention_case(model, 1)
    if "matrix" in only:
        for rows in batches:
            for linear in LINEARS:
                yield linear_case(rows, *linear, kind="matrix")
            for model in MIXTURES:
                for part in ("up", "down"):
                    yield mixture_case(model, rows, part)
            for model in ATTENTIONS:
                yield attention_case(model, rows)
    if "split" in only:
        for rows in batches:
            for linear in LINEARS:
                if linear[0] < MANY:
                    yield linear_case(rows, *linear, kind="split")
            for outputs, inputs, *_ in ROUTERS:
                yield route_case(rows, outputs, inputs)
    if "float8" in only:
        yield from float8_cases(batches)


def float8_cases(batches: list[int]) -> Iterator[Case]:
    """The thinker's experts alone can be float8."""
    for rows in (1, *batches):
        for part in ("up", "down"):
            yield mixture_case("thinker", rows, part, float8=True)
    for rows in (100, 512, 1024, 2500):
        for part in ("gate_up", "down"):
            yield prompt_case("thinker", rows, part)


class Candidates:
    """What to try for a kernel: as `alone` does, with a few more."""

    def __init__(self, batch: int, tiny: bool, most: int) -> None:
        self.tiny, self.most = tiny, most
        batches = [
            n for n in (batch, 2 * batch) if n > 1
        ]  # a frame begins with two positions per row
        self.cases: dict[str, Case] = {}
        for case in cases(["vector", "matrix", "split", "float8"], batches):
            self.cases.setdefault(tuning.name_of(case.kernel, case.key), case)

    def __call__(self, asked: tuning.TuningQuestion) -> list[Tuned]:
        case = self.cases.get(tuning.name_of(asked.kernel, asked.key))
        if case is not None:
            found = list(case.candidates)
        elif asked.kernel == "frame" or (self.tiny and not asked.kernel.startswith("pick")):
            found = nearby(asked.found)
        else:
            return []
        switch = BESIDE.get(asked.kernel)
        if switch is not None:
            found = [c | {switch: n} for c in [asked.found, *found] for n in (0, 1)]
        others = [asked.default | c for c in found if asked.default | c != asked.found]
        return chosen(others, asked.found, self.most - 1)

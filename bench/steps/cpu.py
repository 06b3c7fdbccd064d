"""What a frame of speech costs a CPU: talker, predictor and vocoder of a speech model, by type of
weights and rows.

    # the 0.6B shape, some minutes
    python -m bench steps --parts cpu --out bench/results/tts_cpu_frames.json
    python -m bench steps --parts cpu --model tts-1.7b --rows 1 --frames 4
    # a checkpoint, such as a tiny one
    python -m bench steps --parts cpu --model DIR --dtypes float32 --rows 1 2

Random weights, one thread. Taken are the CPU time of that thread, which other load on the machine
changes little, and wall time. Types and rows take turns, so that such load meets all of them
alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.checkpoint import SPEAKING, checkpoint, load_format
from bench.harness.env import describe
from bench.harness.results import arguments, parser, quantile, write
from stretto.models.qwen3_tts.load import Source
from stretto.models.qwen3_tts.talker import TalkerAdapter
from stretto.stage.runner.adapter import decode_step
from stretto.stage.runner.columns import SamplingMode

FRAME_S = 0.08
CONTEXT = 64  # rows before the frames that are timed
PUSH = 8  # frames that the vocoder takes at once, as in a stream that has begun

Work = Callable[[], Any]


def parts(
    directory: Path, format: Any, dtype: torch.dtype, rows: Sequence[int]
) -> dict[tuple[str, int], Work]:
    """What is timed: by part and rows, a function that does it once for all of its rows."""
    source = Source.open(directory, "cpu", dtype, format, progress=False)
    most = max(rows)
    talker, vocoder = source.talker(), source.vocoder()
    blocks = -(-2 * CONTEXT // 16)
    adapter = TalkerAdapter(talker, talker.cache(most * blocks + 1, 16), most, 2 * CONTEXT)
    adapter.rows.tables[:most] = torch.arange(most * blocks, dtype=torch.int32).view(most, blocks)
    state, quantizers = vocoder.state(most, PUSH), vocoder.config.num_quantizers
    drawn = SamplingMode(True, True)
    found: dict[tuple[str, int], Work] = {}
    for n in rows:
        numbers, at, words = (
            torch.arange(n),
            torch.full((n,), CONTEXT),
            torch.zeros(n, dtype=torch.int64),
        )
        hidden = torch.randn(n, talker.frames.decoder.hidden_size).to(dtype)
        codes, lengths = torch.zeros(n, quantizers, PUSH, dtype=torch.int64), torch.full((n,), PUSH)

        def frame(
            numbers: torch.Tensor = numbers, at: torch.Tensor = at, words: torch.Tensor = words
        ) -> Any:
            return decode_step(adapter, numbers, at, words, drawn)

        def predict(
            numbers: torch.Tensor = numbers, at: torch.Tensor = at, hidden: torch.Tensor = hidden
        ) -> Any:
            return adapter.pick(numbers, at, hidden, drawn)

        def sound(
            numbers: torch.Tensor = numbers,
            codes: torch.Tensor = codes,
            lengths: torch.Tensor = lengths,
        ) -> Any:
            return vocoder.step(state, codes, lengths, numbers)

        found |= {("frame", n): frame, ("predictor", n): predict, ("vocoder", n): sound}
    return found


@torch.inference_mode()
def measure(work: dict[Any, Work], rounds: int) -> dict[Any, list[tuple[float, float]]]:
    """(CPU seconds, wall seconds) of each, in turns; the first round is not counted."""
    times: dict[Any, list[tuple[float, float]]] = {key: [] for key in work}
    for i in range(rounds + 1):
        for key, do in work.items():
            cpu, wall = time.thread_time(), time.perf_counter()
            do()
            if i:
                times[key].append((time.thread_time() - cpu, time.perf_counter() - wall))
    return times


def table(times: dict[tuple[str, str, int], list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """By type and rows: milliseconds of CPU time for one stream's frame, and how many cores real
    time takes."""
    lines = []
    for dtype, n in dict.fromkeys((dtype, n) for dtype, _, n in times):

        def each(part: str, frames: int = 1, dtype: str = dtype, n: int = n) -> float:
            return 1000 * quantile((cpu for cpu, _ in times[dtype, part, n]), 0.5) / (n * frames)

        frame, predictor, vocoder = each("frame"), each("predictor"), each("vocoder", PUSH)
        lines.append({
            "dtype": dtype, "rows": n, "talker_ms": frame - predictor, "predictor_ms": predictor,
            "vocoder_ms": vocoder, "cores_for_real_time": (frame + vocoder) / 1000 / FRAME_S,
        })  # fmt: skip
    return lines


def main(given: Sequence[str]) -> int:
    p = parser("steps --parts cpu", __doc__)
    p.add_argument(
        "--model", default="tts-0.6b", help=f"{', '.join(SPEAKING)}, or a checkpoint directory"
    )
    p.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    p.add_argument(
        "--rows", type=int, nargs="+", default=[1, 4], metavar="N", help="streams in a step"
    )
    p.add_argument(
        "--frames", type=int, default=12, metavar="N", help="timed of each (default: %(default)s)"
    )
    args = p.parse_args(given)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"env": describe(), "arguments": arguments(args)}
    work: dict[tuple[str, str, int], Work] = {}
    with checkpoint(args.model) as directory:
        for dtype in args.dtypes:
            made = parts(directory, load_format(args.model), getattr(torch, dtype), args.rows)
            work |= {(dtype, part, n): do for (part, n), do in made.items()}
    times = measure(work, args.frames)
    result["table"] = table(times)
    result["load_average_after"] = describe()["load_average"]
    result["samples"] = [[*key, *sample] for key, taken in times.items() for sample in taken]
    for line in result["table"]:
        print(
            " ".join(
                f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in line.items()
            )
        )
    write(args.out, result)
    return 0

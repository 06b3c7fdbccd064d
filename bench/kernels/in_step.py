"""Decode kernels inside a whole step, where they overlap their neighbours: finds launch parameters
there.

    python -m bench kernels --parts in_step --stage thinker --batch 8 --tuned tuned.json  # 2 min

The part `alone` times each kernel by itself; its candidates are tried here one kernel at a time in
a captured step of a model with fewer layers (random weights), against the step as it stands: both
in turns, on the same inputs. A candidate stays if the step is faster by 0.3 % in two measurements,
and if its output is the same but for rounding. Processes with a model of two layers compile (and
try) candidates first. Without `--tuned` nothing is saved.

`--tiny` tries the program itself: on a CPU in Triton's interpreter (TRITON_INTERPRET=1), where a
step is timed without a graph and times mean nothing."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness.env import describe
from bench.harness.results import parser, write
from bench.kernels.cases import Candidates
from bench.steps.decode import seated
from stretto.kernels.triton import tuning
from stretto.kernels.triton.descent import Descent, Table, TrialFailed
from stretto.layers.decoder import Decoder
from stretto.layers.fused import FusedLayers
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker, ThinkerAdapter
from stretto.models.tune_steps import EventTimer, Run, StepTrials, failing
from stretto.stage.runner.adapter import decode_step
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.testing.qwen3_omni import released_config, tiny_config
from stretto.types import ExpertWeights

# layers in which every variant of a layer's kernels occurs: the first and the last differ from
# others
SHALLOW = 2
INPUTS = 16  # different ones, so that steps choose different experts
# of them, for the output: a single row may choose another expert or code by rounding alone
CHECKED = 5


@dataclass(frozen=True, slots=True)
class What:
    """The step to tune."""

    stage: str
    batch: int
    context: int = 1024
    layers: int = 12
    expert_weights: ExpertWeights = "full"
    tiny: bool = False

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def config(self) -> OmniConfig:
        raw = tiny_config() if self.tiny else released_config()
        thinker, talker = raw["thinker_config"], raw["talker_config"]
        for part in (thinker, talker):
            part["text_config"]["num_hidden_layers"] = self.layers
        talker["accept_hidden_layer"] = min(talker["accept_hidden_layer"], self.layers)
        # Encoders take no part in a decode step; processes that compile need the memory.
        thinker["audio_config"]["encoder_layers"] = 1
        thinker["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": [0]}
        if self.tiny:  # sizes that the kernels take
            talker["text_config"] |= {
                "hidden_size": 64, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 64,
            }  # fmt: skip
            talker["code_predictor_config"]["hidden_size"] = 64
        return parse(raw)

    def model(self) -> Thinker | Talker:
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        source = Source.open(self.config(), self.device, dtype, "dummy", False, self.expert_weights)
        model = source.thinker() if self.stage == "thinker" else source.talker()
        for decoder in decoders(model):
            if decoder.fused is None and self.device == "cpu":
                decoder.fused = FusedLayers(decoder, torch.device("cpu"))
            assert decoder.fused is not None, "kernels are switched off"
        return model


def decoders(model: Thinker | Talker) -> list[Decoder]:
    return (
        [model.model] if isinstance(model, Thinker) else [model.model, model.code_predictor.model]
    )


class HostTimer:
    """The host's clock, where there is no GPU and a step is done when its launch is."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, stop: float) -> float:
        return (stop - start) * 1e3


class WholeStep(StepTrials):
    """The step of a model of the released sizes, with all its rows in use."""

    def __init__(self, what: What, replays: int = 30, compilers: Compilers | None = None) -> None:
        torch.manual_seed(1)
        self.what = what
        self.compilers = compilers
        self.model = what.model()
        self.adapter, self.mode = seated(self.model, what.batch, what.context, sampled=False)
        timer = EventTimer() if what.device == "cuda" else HostTimer()
        super().__init__(self.adapter.rows, timer, replays)
        self.host = np.zeros((3, what.batch), np.int64)  # rows, positions, values
        self.host[0], self.host[1] = np.arange(what.batch), what.context - 1
        self.place = (
            self.adapter.next
            if isinstance(self.adapter, ThinkerAdapter)
            else self.adapter.embedding
        )
        with self.on_stream():
            self.device_inputs = torch.from_numpy(self.host).to(what.device)
            self.inputs = [self._random_inputs() for _ in range(INPUTS)]

    def _random_inputs(self) -> torch.Tensor:
        shape = self.place[: self.what.batch].shape
        if isinstance(self.adapter, ThinkerAdapter):
            return torch.randint(0, 150_000 if not self.what.tiny else 1000, shape).to(self.place)
        return torch.randn(shape).mul(0.02).to(self.place)

    def set_inputs(self, i: int) -> None:
        self.place[: self.what.batch].copy_(self.inputs[i % INPUTS])

    def run(self) -> None:
        decode_step(self.adapter, *self.device_inputs, self.mode)

    def capture(self, stream: torch.cuda.Stream) -> Run:
        graphs = DecodeGraphs(self.adapter, sizes=(self.what.batch,), modes=[self.mode])
        graphs.capture(stream)
        return lambda: graphs.replay(self.host, self.mode)

    def checked(self) -> AbstractContextManager[None]:
        """A few layers only: each further layer adds to the rounding error."""
        return shallow(self.model)

    @property
    def num_checked(self) -> int:
        return CHECKED

    def precompile(self, tables: Sequence[Table]) -> list[str | None]:
        if self.compilers is not None:
            try:
                return self.compilers.try_all(tables)
            except BrokenProcessPool:
                print(
                    "a process that compiles died; kernels are compiled as they come now",
                    flush=True,
                )
                self.compilers = None
        return super().precompile(tables)


@contextmanager
def shallow(model: Thinker | Talker) -> Iterator[None]:
    """The first layers only (of a decoder with experts)."""
    fused = model.model.fused
    assert fused is not None
    layers, fused.layers = fused.layers, fused.layers[:SHALLOW]
    try:
        yield
    finally:
        fused.layers = layers


_mine: WholeStep | None = None  # in a process that compiles; None after its device went bad


@torch.inference_mode()
def start_compiling(what: What, started: Semaphore) -> None:
    global _mine
    torch.set_num_threads(1)
    _mine = WholeStep(replace(what, layers=SHALLOW))
    _mine.questions({})  # what all candidates have in common
    started.release()


@torch.inference_mode()
def try_one(changes: Table) -> str | None:
    """Run a step once with these parameters, so that its kernels are on disk. Says why that is not
    possible."""
    global _mine
    if _mine is None:
        return None
    try:
        with failing():
            _mine.questions(changes)
    except TrialFailed as e:
        if isinstance(
            e.__cause__, torch.OutOfMemoryError
        ):  # many processes share the device: says nothing
            return None
        try:
            _mine.finish()
        except RuntimeError:  # a wrong access: nothing runs in this process any more
            _mine = None
        return str(e)
    return None


def nothing() -> None:
    """A process that has run this has been started."""


class Compilers:
    """Processes that compile. All of them start at once, while the caller fills its own model."""

    def __init__(self, what: What, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.jobs, self.started = jobs, context.Semaphore(0)
        self.pool = ProcessPoolExecutor(
            jobs, context, initializer=start_compiling, initargs=(what, self.started)
        )
        self.asked = [self.pool.submit(nothing) for _ in range(jobs)]

    def wait(self, seconds: float = 180.0) -> None:
        """Until all have started: they would disturb measurements."""
        end, left = time.monotonic() + seconds, self.jobs
        while (
            left
            and time.monotonic() < end
            and not any(f.done() and f.exception() for f in self.asked)
        ):
            left -= self.started.acquire(timeout=1.0)

    def try_all(self, tables: Sequence[Table]) -> list[str | None]:
        return list(self.pool.map(try_one, tables))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def show(name: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        print(f"{name}: nothing to try", flush=True)
        return
    print(name)
    for row in sorted(rows, key=lambda r: -r.get("gain", -9.0)):
        if "failed" in row:
            said = f"cannot run: {row['failed'].splitlines()[0][:90]}"
        elif "refused" in row:
            said = f"refused: another output (error {row['refused']})"
        else:
            said = f"{row['ms']:8.4f} ms beside {row['base_ms']:8.4f}  {row['gain']:+7.2%}"
            said += f" {row['again']:+7.2%} again" if "again" in row else ""
        mark = "kept" if row.get("adopted") else "now" if row["current"] else ""
        print(f"  {mark:4} {said}  {row['config']}")
    print(end="", flush=True)


def options(given: Sequence[str]) -> argparse.Namespace:
    p = parser("kernels --parts in_step", __doc__)
    p.add_argument("--stage", choices=["thinker", "talker"], default="thinker")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument(
        "--layers", type=int, default=12, help="of the decoder; more than the cache holds"
    )
    p.add_argument(
        "--expert-weights", choices=["full", "float8"], default="full", help="of the thinker"
    )
    p.add_argument("--kernels", default="", help="names begin with one of these: decode,up")
    p.add_argument(
        "--per-kernel", type=int, default=12, help="candidates, the current one among them"
    )
    p.add_argument(
        "--rounds", type=int, default=1, help="times through all kernels, while something changes"
    )
    p.add_argument("--replays", type=int, default=30)
    p.add_argument("--jobs", type=int, default=14, help="processes that compile")
    p.add_argument(
        "--limit", type=float, default=400.0, help="seconds after which nothing more is tried"
    )
    p.add_argument("--tiny", action="store_true", help="the tiny model, to try the program")
    p.add_argument(
        "--tuned", type=Path, help="where better parameters go, as `tuning.save` keeps them"
    )
    return p.parse_args(given)


@torch.inference_mode()
def tuned(given: Sequence[str]) -> Descent:
    args = options(given)
    begin, env = time.perf_counter(), describe()
    what = What(args.stage, args.batch, args.context, args.layers, args.expert_weights, args.tiny)
    compilers = Compilers(what, args.jobs) if args.jobs else None
    try:
        step = WholeStep(what, args.replays, compilers)
        print("kernels:", *step.questions({}), flush=True)
        if compilers is not None:
            compilers.wait()
        print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
        prefixes = tuple(args.kernels.split(","))
        descent = Descent(
            step,
            Candidates(what.batch, what.tiny, args.per_kernel),
            selects=lambda name: name.startswith(prefixes),
            late=lambda: time.perf_counter() - begin > args.limit,
        )

        def after(name: str, rows: list[dict[str, Any]]) -> None:
            show(name, rows)
            if descent.changes and args.tuned is not None:
                tuning.save(args.tuned, descent.changes)
            found = {"env": env, "seconds": time.perf_counter() - begin, "changes": descent.changes}
            write(args.out, found | {"rows": descent.rows})
            if step.stream is not None:
                torch.cuda.empty_cache()  # of graphs that are gone

        for _ in range(args.rounds):
            if not descent.round(after):
                break
        if descent.late():
            print("out of time", flush=True)
        if descent.changes:
            total = step.pair(
                {name: descent.before[name] for name in descent.changes}, descent.changes
            )
            print(
                f"all together: {total.ms:.4f} ms beside {total.base_ms:.4f} ({total.gain:+.2%})",
                flush=True,
            )
    finally:
        if compilers is not None:
            compilers.close()
    return descent


def main(given: Sequence[str]) -> int:
    tuned(given)
    return 0

"""The engine under a benchmark: its command line, its checkpoint, and a way to send it a workload.

Shared by latency.py, throughput.py and ablation.py. The engine's hosts run as in service (processes of their own);
the benchmark is the process that would be the server, without HTTP. Times are taken when an event leaves the engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bench.env import describe
from bench.workload import Workload
from stretto.client.bench import Bench, Level, Limits, Load, Send, SystemClock
from stretto.client.report import record, table
from stretto.client.wire import Ended, Piece, RequestFailed, Sound, Used, Words
from stretto.errors import Invalid, StrettoError
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.models.qwen3_omni.tiny import released_config, tiny_config, write_tiny
from stretto.orchestrator.api import AudioChunk, Event, Finished, TextDelta
from stretto.orchestrator.engine import PipelineEngine
from stretto.orchestrator.settings import EngineConfig, HostSettings, parse_placement
from stretto.prompt.template import Tokenizer
from stretto.server.command import find_device

PREBUFFERS = (0.0, 0.2)


def add_engine_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--model", default="tiny", help="checkpoint directory, or `tiny`, or `released` (its shape, random weights)"
    )
    p.add_argument("--device", default=None, help="cpu, cuda ... (default: cuda if there is one)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU")
    p.add_argument("--load-format", choices=["safetensors", "dummy"], help="default: dummy for `released`")
    p.add_argument("--placement", default="one", help="one, two, processes, or such as thinker,talker+code2wav")
    p.add_argument("--connector", help="between processes: shm, tcp, mooncake (default: by placement)")
    p.add_argument("--replicas", type=int, default=1)
    p.add_argument("--max-requests", type=int, default=64, help="running at once; more are refused")
    p.add_argument("--min-pace", type=float, default=0.0, help="refuse while a stream is slower than this x real time")
    p.add_argument(
        "--host", action="append", default=[], metavar="NAME=VALUE",
        help="a field of HostSettings, such as max_rows=64; may be repeated",
    )  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="of the arrivals")
    p.add_argument("--out", type=Path, help="everything, every sample included, as JSON")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    host = HostSettings(
        device=args.device or find_device(),
        dtype=args.dtype,
        load_format=args.load_format or ("dummy" if args.model == "released" else "safetensors"),
    )
    return EngineConfig(
        parse_placement(args.placement),
        args.connector,
        replicas=args.replicas,
        max_requests=args.max_requests,
        min_pace=args.min_pace,
        host=replace(host, **host_fields(args.host)),
    )


def host_fields(given: list[str]) -> dict[str, Any]:
    """`max_rows=64` and so on; values are JSON."""
    known, values = {f.name for f in fields(HostSettings)}, {}
    for item in given:
        name, _, value = item.partition("=")
        if name not in known:
            raise Invalid(f"HostSettings has no field {name!r}", "host")
        try:
            values[name] = json.loads(value)
        except ValueError:
            raise Invalid(f"--host {item}: the value must be JSON", "host") from None
    return values


@contextmanager
def checkpoint(model: str) -> Iterator[Path]:
    """The directory to open: as given, or one that is written for the occasion."""
    if model not in ("tiny", "released"):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        directory = Path(folder) / model
        write_tiny(directory) if model == "tiny" else write_released(directory)
        yield directory


def write_released(directory: Path) -> None:
    """The released shape without weights, for `load_format="dummy"`. The words are the tiny model's, so only the
    config's token ids differ from the released ones; all sizes, the vocabulary's included, are the same."""
    write_tiny(directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    config = _with_ids(released_config(), tiny_config())
    _fill_vocabulary(directory / "tokenizer.json", config["thinker_config"]["text_config"]["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _fill_vocabulary(path: Path, size: int) -> None:
    """Words for all ids, so that random tokens make as much text on its way to a client as real ones do."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    vocab = spec["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in spec["added_tokens"])}
    vocab.update({f"Ġw{i}": i for i in range(size) if i not in taken})
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def _with_ids(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`base` with the token ids of `other`."""
    result = dict(base)
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = _with_ids(base[key], value)
        elif key.endswith("_token_id") and not key.startswith("codec"):
            result[key] = value
    return result


@dataclass(frozen=True, slots=True)
class Heard(Sound):
    """A packet whose length is known without decoding it."""

    length_s: float = 0.0

    def seconds(self) -> float:
        return self.length_s


def pieces(event: Event) -> list[Piece]:
    """An event as the client's measurements know it."""
    match event:
        case TextDelta(ids=ids, text=text) if ids:
            return [Words(text)]
        case AudioChunk(samples=samples):
            return [Heard("", len(samples) / SAMPLE_RATE_OUT)]
        case Finished(usage=usage, text=text, audio=audio):
            used = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.text_tokens}
            return [Used(used), Ended(audio or text)]
    return []


async def stream(events: AsyncIterator[Event], clock: SystemClock) -> AsyncIterator[tuple[float, Piece]]:
    try:
        async for event in events:
            now = clock.now()
            for piece in pieces(event):
                yield now, piece
    except StrettoError as e:
        raise RequestFailed(type(e).__name__, str(e)) from None


@dataclass(slots=True)
class Questions:
    """A workload's messages, made before they are sent: making a sound takes longer than a token."""

    workload: Workload
    tokenizer: Tokenizer
    made: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text)) if text else 0

    def prepare(self, start: int, num: int) -> None:
        for i in range(start, start + num):
            self.made[i] = self.workload.messages(i, self.count)

    def take(self, index: int) -> list[dict[str, Any]]:
        made = self.made.pop(index, None)
        return made if made is not None else self.workload.messages(index, self.count)


def sender(engine: PipelineEngine, questions: Questions, clock: SystemClock) -> Send:
    def send(index: int) -> AsyncIterator[tuple[float, Piece]]:
        params = questions.workload.params(index)
        return stream(engine.generate(questions.take(index), params=params), clock)

    return send


async def run_levels(
    args: argparse.Namespace, workloads: list[Workload], levels: list[tuple[Load, Limits]]
) -> dict[str, Any]:
    """Every workload at every load on one engine; prints a table for each and returns the whole record."""
    config, clock, runs = engine_config(args), SystemClock(), []
    with checkpoint(args.model) as directory:
        tokenizer = Tokenizer.open(directory)
        start = clock.now()
        async with PipelineEngine.open(directory, config) as engine:
            ready = clock.now() - start
            for workload in workloads:
                questions = Questions(workload, tokenizer)
                bench = Bench(sender(engine, questions, clock), clock)
                begun = 0
                for load, limits in levels:
                    num = limits.warmup + (limits.requests or 0)
                    questions.prepare(begun, num)
                    begun += num
                    level = await bench.run(load, limits)
                    print(f"{workload.name}, {table(level, PREBUFFERS)}\n", flush=True)
                    runs.append((workload, level))
            settled = await idle(engine)
    return result(args, config, runs) | {"ready_s": ready, "running_after": settled}


async def idle(engine: PipelineEngine) -> float:
    await engine.drain(5.0)
    return engine.metrics()["stretto_engine_running"]


def result(args: argparse.Namespace, config: EngineConfig, runs: list[tuple[Workload, Level]]) -> dict[str, Any]:
    env = describe()
    levels = record([level for _, level in runs], PREBUFFERS, {}, {}, env["date"])["levels"]
    for (workload, _), level in zip(runs, levels, strict=True):
        level["workload"] = workload.name
        level["refused"] = level["errors"].get("Busy", 0)
    used = {w.name: asdict(w) for w, _ in runs}
    return {"env": env, "arguments": plain(args), "config": asdict(config), "workloads": used, "levels": levels}


def plain(args: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}


def write(path: Path | None, value: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(value)) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def rounded(value: Any) -> Any:
    """Times to the microsecond: enough, and half the size."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def failures(found: dict[str, Any]) -> int:
    """The exit status: 1 if a level brought no whole answer."""
    return 0 if all(any(s["error"] is None for s in level["samples"]) for level in found["levels"]) else 1


def main_levels(args: argparse.Namespace, workloads: list[Workload], levels: list[tuple[Load, Limits]]) -> int:
    found = asyncio.run(run_levels(args, workloads, levels))
    write(args.out, found)
    return failures(found)

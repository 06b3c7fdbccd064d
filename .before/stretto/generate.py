"""`stretto generate`: answer one conversation, or a file of them, through the pipeline and write what came out."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import Invalid, StrettoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.orchestrator.api import Event, Finished, Modality, Params
    from stretto.orchestrator.engine import PipelineEngine
    from stretto.orchestrator.settings import EngineConfig


def add_generate_parser(jobs: Any) -> None:
    gen = jobs.add_parser("generate", help="answer a conversation, aloud")
    gen.add_argument("model", type=Path, help="checkpoint directory")
    what = gen.add_argument_group("what to answer (one of)").add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="a user's message")
    what.add_argument("--messages", type=Path, metavar="FILE.json", help="a conversation in OpenAI chat format")
    what.add_argument(
        "--batch", type=Path, metavar="FILE.jsonl", help="one conversation a line; answers go to --out-dir"
    )
    out = gen.add_argument_group("where the answer goes")
    out.add_argument("--out", type=Path, metavar="A.wav", help="the speech, 16 bit, 24 kHz")
    out.add_argument("--samples", type=Path, metavar="A.npy", help="float32 samples before any conversion")
    out.add_argument("--codes", type=Path, metavar="CODES.npy", help="codec frames [frames, 16]")
    out.add_argument("--json", type=Path, metavar="OUT.json", help="ids, text, counts, finish reasons, timings")
    out.add_argument("--trace", type=Path, metavar="T.json", help="the stages' timeline, for ui.perfetto.dev")
    out.add_argument("--out-dir", type=Path, metavar="DIR", help="for --batch: answers as 0.wav, 0.json, ...")
    out.add_argument("--text-only", action="store_true", help="do not speak")
    how = gen.add_argument_group("how")
    how.add_argument("--voice", help="one of the model's voices (case does not matter)")
    how.add_argument("--greedy", action="store_true", help="no chance in any stage")
    how.add_argument("--temperature", type=float, default=0.0, help="of the text; 0 is greedy (default)")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--top-k", type=int, default=0)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--max-text-tokens", type=int, default=1024, metavar="N")
    how.add_argument("--max-frames", type=int, default=4095, metavar="N", help="12.5 frames are a second")
    how.add_argument("--first-frames", type=int, default=1, metavar="N", help="frames in the first packet")
    how.add_argument("--each-frames", type=int, default=None, metavar="N", help="frames in the others")
    run = gen.add_argument_group("running")
    run.add_argument("--device", default=None, help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    run.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU")
    run.add_argument("--load-format", choices=["safetensors", "dummy"], default="safetensors")
    run.add_argument(
        "--expert-weights", choices=["full", "float8"], default="full", help="of the thinker; float8: half the bytes"
    )
    run.add_argument("--placement", default="one", help="one, two, processes, or such as thinker,talker+code2wav")
    run.add_argument("--connector", help="between processes: shm, tcp, mooncake (default: by placement)")
    run.add_argument("--concurrency", type=int, default=8, metavar="N", help="of --batch")
    gen.set_defaults(job=run_generate)


@dataclass(slots=True, eq=False)
class Result:
    """One answer, collected."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    codes: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    end: Finished | None = None

    def take(self, event: Event, since: float) -> str:
        """Add an event; returns text to show."""
        from stretto.orchestrator.api import AudioChunk, CodeFrames, Finished, TextDelta

        now = time.perf_counter() - since
        match event:
            case TextDelta(ids=ids, text=text):
                self.first.setdefault("text", now)
                self.ids += ids
                self.text += text
                return text
            case CodeFrames(codes=codes):
                self.codes.append(codes)
            case AudioChunk(samples=samples):
                self.first.setdefault("audio", now)
                self.samples.append(samples)
            case Finished():
                self.end, self.total = event, now
        return ""

    def report(self, load_s: float) -> dict[str, Any]:
        assert self.end is not None
        return {
            "prompt_ids": list(self.end.prompt_ids),
            "text_ids": self.ids,
            "text": self.text,
            "frames": self.end.usage.frames,
            "samples": self.end.usage.samples,
            "finish": {"text": self.end.text, "audio": self.end.audio},
            "seed": self.end.seed,
            "timings": {
                "load_s": load_s,
                "first_text_s": self.first.get("text"),
                "first_audio_s": self.first.get("audio"),
                "total_s": self.total,
            },
        }

    def write(
        self, out: Path | None, samples: Path | None, codes: Path | None, report: Path | None, load: float
    ) -> None:
        import numpy as np
        import soundfile

        from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT

        wave = np.concatenate([np.zeros(0, np.float32), *self.samples])
        for path in (out, samples, codes, report):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if out is not None:
            soundfile.write(out, wave, SAMPLE_RATE_OUT, subtype="PCM_16")
        if samples is not None:
            np.save(samples, wave)
        if codes is not None:
            np.save(codes, np.concatenate([np.zeros((0, 16), np.int32), *self.codes]))
        if report is not None:
            report.write_text(json.dumps(self.report(load), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def settings(args: argparse.Namespace) -> tuple[EngineConfig, Params]:
    from stretto.orchestrator.api import ChunkSizes, Params
    from stretto.orchestrator.settings import EngineConfig, HostSettings, parse_placement
    from stretto.server.command import find_device

    host = HostSettings(
        device=args.device or find_device(),
        dtype=args.dtype,
        load_format=args.load_format,
        expert_weights=args.expert_weights,
    )
    each = args.each_frames if args.each_frames is not None else args.first_frames
    params = Params(
        temperature=0.0 if args.greedy else args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        greedy_speech=args.greedy,
        max_text_tokens=args.max_text_tokens,
        max_frames=args.max_frames,
        packets=ChunkSizes(args.first_frames, each, None),
        want_codes=args.codes is not None,
    )
    return EngineConfig(parse_placement(args.placement), args.connector, host=host), params


def read_messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.text is not None:
        return [{"role": "user", "content": args.text}]
    return _messages(_json(args.messages, args.messages.read_text), str(args.messages))


def _json(path: Path, read: Any) -> Any:
    try:
        return json.loads(read(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise Invalid(f"{path}: cannot be read as JSON ({e})", "messages") from None


def _messages(raw: Any, where: str) -> list[dict[str, Any]]:
    messages = raw.get("messages") if isinstance(raw, dict) else raw
    if not isinstance(messages, list):
        raise Invalid(f"{where}: must hold a list of messages", "messages")
    return messages


def run_generate(args: argparse.Namespace) -> int:
    if args.batch is not None and args.out_dir is None:
        raise Invalid("--batch needs --out-dir", "out_dir")
    return asyncio.run(_generate(args))


async def _generate(args: argparse.Namespace) -> int:
    from stretto.orchestrator.engine import PipelineEngine

    config, params = settings(args)
    start = time.perf_counter()
    async with PipelineEngine.open(args.model, config) as engine:
        load = time.perf_counter() - start
        if args.batch is not None:
            return await _batch(args, engine, params, load)
        return await _one(args, engine, params, load)


async def _answer(
    engine: PipelineEngine, messages: list[dict[str, Any]], args: Any, params: Params, show: bool
) -> Result:
    result, since = Result(), time.perf_counter()
    modalities: Sequence[Modality] = ("text",) if args.text_only else ("text", "audio")
    events = engine.generate(messages, modalities=modalities, voice=args.voice, params=params, allow_paths=True)
    async for event in events:
        text = result.take(event, since)
        if show and text:
            sys.stdout.write(text)
            sys.stdout.flush()
    return result


async def _one(args: argparse.Namespace, engine: PipelineEngine, params: Params, load: float) -> int:
    from stretto.orchestrator.timeline import trace

    result = await _answer(engine, read_messages(args), args, params, show=True)
    sys.stdout.write("\n")
    result.write(args.out, args.samples, args.codes, args.json, load)
    assert result.end is not None
    if args.trace is not None:
        args.trace.write_text(json.dumps(trace([("request", result.end.timeline)])) + "\n")
    usage = result.end.usage
    heard = "" if args.text_only else f", {usage.samples / engine.info.sample_rate:.2f} s of speech"
    first = result.first.get("audio")
    sooner = f", first sound after {first:.3f} s" if first is not None else ""
    _say(f"{usage.text_tokens} tokens{heard} in {result.total:.2f} s{sooner} (ready after {load:.1f} s)")
    for path in (args.out, args.samples, args.codes, args.json, args.trace):
        if path is not None:
            _say(f"wrote {path}")
    return 0


async def _batch(args: argparse.Namespace, engine: PipelineEngine, params: Params, load: float) -> int:
    """Every line of the file, a few at a time. A line that fails is reported and the others go on."""
    from tqdm import tqdm

    lines = [line for line in args.batch.read_text(encoding="utf-8").splitlines() if line.strip()]
    gate, failed = asyncio.Semaphore(args.concurrency), 0
    bar = tqdm(total=len(lines), desc="answers", unit="answer", disable=None)

    async def work(i: int, line: str) -> None:
        nonlocal failed
        async with gate:
            try:
                where = f"{args.batch}:{i + 1}"
                raw = _json(args.batch, lambda encoding: line)
                result = await _answer(
                    engine, _messages(raw, where), args, replace(params, seed=args.seed + i), show=False
                )
                base = args.out_dir / str(i)
                wav = None if args.text_only else base.with_suffix(".wav")
                result.write(wav, None, None, base.with_suffix(".json"), load)
            except StrettoError as e:
                failed += 1
                _say(f"line {i + 1}: {e}")
            bar.update()

    await asyncio.gather(*(work(i, line) for i, line in enumerate(lines)))
    bar.close()
    _say(f"{len(lines) - failed} of {len(lines)} answered, in {args.out_dir}")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")

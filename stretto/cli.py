"""The command line: one subcommand per job. Heavy imports happen inside the job that needs them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from stretto import __version__
from stretto.errors import Invalid, StrettoError


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        code: int = args.job(args)
        return code
    except StrettoError as e:
        print(f"stretto: {e}", file=sys.stderr)
        return 2 if isinstance(e, Invalid) else 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="stretto", description="A serving engine for omni-modal models.")
    top.add_argument("--version", action="version", version=f"stretto {__version__}")
    jobs = top.add_subparsers(required=True, metavar="JOB")

    tiny = jobs.add_parser("tiny", help="write a small random checkpoint in the released format")
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(job=run_tiny)

    gen = jobs.add_parser("generate", help="answer one conversation, aloud")
    gen.add_argument("model", type=Path, help="checkpoint directory")
    what = gen.add_argument_group("what to answer (one of)").add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="a user's message")
    what.add_argument("--messages", type=Path, metavar="FILE.json", help="a conversation in OpenAI chat format")
    out = gen.add_argument_group("where the answer goes")
    out.add_argument("--out", type=Path, metavar="A.wav", help="the speech, 16 bit, 24 kHz")
    out.add_argument("--samples", type=Path, metavar="A.npy", help="float32 samples before any conversion")
    out.add_argument("--codes", type=Path, metavar="CODES.npy", help="codec frames [frames, 16]")
    out.add_argument("--json", type=Path, metavar="OUT.json", help="ids, text, counts, finish reasons, timings")
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
    run = gen.add_argument_group("running")
    run.add_argument("--device", default=None, help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    run.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU")
    run.add_argument("--load-format", choices=["safetensors", "dummy"], default="safetensors")
    gen.set_defaults(job=run_generate)
    return top


def run_tiny(args: argparse.Namespace) -> int:
    from stretto.models.qwen3_omni.tiny import write_tiny

    write_tiny(args.directory, args.seed)
    print(f"wrote a tiny checkpoint to {args.directory}")
    return 0


def read_messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.text is not None:
        return [{"role": "user", "content": args.text}]
    try:
        raw = json.loads(args.messages.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise Invalid(f"{args.messages}: cannot be read as JSON ({e})", "messages") from None
    messages = raw.get("messages") if isinstance(raw, dict) else raw
    if not isinstance(messages, list):
        raise Invalid(f"{args.messages}: must hold a list of messages", "messages")
    return messages


def run_generate(args: argparse.Namespace) -> int:
    from dataclasses import replace

    import numpy as np
    import soundfile
    import torch

    from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, OmniConfig
    from stretto.models.qwen3_omni.load import Models, Source
    from stretto.prompt.build import PromptBuilder
    from stretto.prompt.template import TextStream
    from stretto.solo import Audio, Done, Frame, Options, Solo, TextToken
    from stretto.types import GREEDY

    text = replace(GREEDY, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    options = Options(
        voice=args.voice, speak=not args.text_only, text=text, max_text_tokens=args.max_text_tokens,
        max_frames=args.max_frames,
    ).seeded(args.seed)  # fmt: skip
    if args.greedy:
        options = options.greedy()
    config = OmniConfig.read(args.model)
    builder = PromptBuilder.open(args.model, config)
    prompt = builder.build(read_messages(args), allow_paths=True)

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    start = time.perf_counter()
    solo = Solo(Models.open(Source.open(args.model, device, dtype, args.load_format)))
    events = solo.run(prompt, options)
    loaded = time.perf_counter()

    ids: list[int] = []
    frames: list[Any] = []
    audio: list[Any] = []
    words, first = TextStream(builder.tokenizer), dict[str, float]()
    end: Done | None = None
    for event in events:
        match event:
            case TextToken(id=token):
                first.setdefault("text", time.perf_counter() - loaded)
                ids.append(token)
                print(words.push([token]), end="", flush=True)
            case Frame(codes=row):
                frames.append(row)
            case Audio(samples=part):
                first.setdefault("audio", time.perf_counter() - loaded)
                audio.append(part)
            case Done():
                end = event
    print(words.finish())
    total = time.perf_counter() - loaded
    assert end is not None
    samples = np.concatenate(audio) if audio else np.zeros(0, np.float32)
    if args.samples:
        np.save(args.samples, samples)
    if args.codes:
        np.save(args.codes, np.array(frames, dtype=np.int64).reshape(-1, config.talker.num_code_groups))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(args.out, samples, SAMPLE_RATE_OUT, subtype="PCM_16")
    timings = {"load_s": loaded - start, "first_text_s": first.get("text"), "first_audio_s": first.get("audio")}
    timings |= {"total_s": total}
    if args.json:
        report = {
            "prompt_ids": list(prompt.ids), "text_ids": ids, "text": builder.tokenizer.decode(ids),
            "frames": len(frames), "samples": len(samples), "finish": {"text": end.text, "audio": end.audio},
            "timings": timings,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    heard = f", {len(samples) / SAMPLE_RATE_OUT:.2f} s of speech" if options.speak else ""
    print(f"{len(ids)} tokens{heard} in {total:.2f} s (loaded in {loaded - start:.2f} s)", file=sys.stderr)
    if args.out:
        print(f"wrote {args.out}", file=sys.stderr)
    return 0

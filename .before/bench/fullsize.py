"""The released configuration with random weights: load every stage, run one request from text to sound.

python bench/fullsize.py [--device cuda] [--text-tokens 16] [--frames 24] [--out bench/results/fullsize.json]"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.env import describe
from stretto.models.qwen3_omni.config import audio_tokens, parse
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.tiny import released_config
from stretto.prompt.prompt import AudioClip, Patches, Prompt
from stretto.solo import Audio, Frame, Options, Solo, TextToken


def prompt(kind: str, config) -> Prompt:
    t, rng = config.tokens, np.random.default_rng(0)
    media: dict = {}
    body = rng.integers(0, 100_000, 80).tolist()
    if kind == "audio":
        media["audios"] = (AudioClip(rng.standard_normal((128, 1000)).astype(np.float32) * 0.5),)
        body = [t.audio_start, *[t.audio_pad] * audio_tokens(1000), 151670, *body[:10]]
    if kind == "image":
        media["images"] = (Patches(rng.standard_normal((40 * 40, 1536)).astype(np.float32), (1, 40, 40)),)
        body = [t.vision_start, *[t.image_pad] * 400, 151653, *body[:10]]
    ids = [t.im_start, t.user, 198, *body, t.im_end, 198, t.im_start, t.assistant, 198]
    return Prompt(tuple(ids), **media)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cuda")
    p.add_argument("--text-tokens", type=int, default=16)
    p.add_argument("--frames", type=int, default=24)
    p.add_argument("--out", type=Path, default=Path("bench/results/fullsize.json"))
    args = p.parse_args()

    config = parse(released_config())
    start = time.perf_counter()
    source = Source.open(config, args.device, torch.bfloat16, "dummy")
    models = Models.open(source)
    torch.cuda.synchronize()
    loaded = time.perf_counter() - start
    params = sum(p.numel() for m in (models.thinker, models.talker, models.code2wav) for p in m.parameters())
    result = {"env": describe(), "parameters": params, "load_s": loaded, "runs": []}
    result["memory_gib"] = torch.cuda.memory_allocated() / 2**30
    print(f"{params:,} parameters in {loaded:.1f} s, {result['memory_gib']:.1f} GiB", flush=True)
    for kind in ("text", "text", "audio", "image"):
        options = replace(Options().seeded(1), max_text_tokens=args.text_tokens, max_frames=args.frames)
        begin, first = time.perf_counter(), {}
        ids, frames, samples = [], [], []
        for e in Solo(models).run(prompt(kind, config), options):
            name = type(e).__name__
            first.setdefault(name, time.perf_counter() - begin)
            if isinstance(e, TextToken):
                ids.append(e.id)
            elif isinstance(e, Frame):
                frames.append(e.codes.tolist())
            elif isinstance(e, Audio):
                samples.append(e.samples)
        wave = np.concatenate(samples) if samples else np.zeros(0, np.float32)
        run = {
            "prompt": kind, "prompt_tokens": len(prompt(kind, config).ids), "text_tokens": len(ids),
            "frames": len(frames), "samples": len(wave), "finite": bool(np.isfinite(wave).all()),
            "rms": float(np.sqrt((wave.astype(np.float64) ** 2).mean())) if len(wave) else 0.0,
            "distinct_codes": len({c for f in frames for c in f}),
            "first_text_s": first.get("TextToken"), "first_audio_s": first.get("Audio"),
            "total_s": time.perf_counter() - begin,
        }  # fmt: skip
        assert run["finite"], "the waveform has bad numbers"
        assert len(wave) == max(0, 1920 * len(frames) - 555), "samples do not add up"
        result["runs"].append(run)
        print(json.dumps(run), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The released configuration with random weights: how long loading takes, and one request from text
to sound.

    python -m bench engine --parts fullsize --out bench/results/fullsize_h200.json

Runs through the plain driver, without scheduler and graphs. Checks that everything loads, fits and
runs, and that the waveform is finite and as long as its frames say."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.harness.env import describe
from bench.harness.results import parser, write
from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens, parse
from stretto.models.qwen3_omni.load import Models, Source
from stretto.preprocess.prompt import AudioClip, Patches, Prompt
from stretto.testing.qwen3_omni import released_config
from tests.solo import Audio, Frame, Options, Solo, TextToken


def prompt(kind: str, config: OmniConfig) -> Prompt:
    t, rng = config.tokens, np.random.default_rng(0)
    media: dict[str, Any] = {}
    body = rng.integers(0, 100_000, 80).tolist()
    if kind == "audio":
        media["audios"] = (AudioClip.of(rng.standard_normal((128, 1000)).astype(np.float32) * 0.5),)
        body = [t.audio_start, *[t.audio_pad] * audio_tokens(1000), 151670, *body[:10]]
    if kind == "image":
        media["images"] = (
            Patches.of(rng.standard_normal((40 * 40, 1536)).astype(np.float32), (1, 40, 40)),
        )
        body = [t.vision_start, *[t.image_pad] * 400, 151653, *body[:10]]
    ids = [t.im_start, t.user, 198, *body, t.im_end, 198, t.im_start, t.assistant, 198]
    return Prompt(tuple(ids), **media)


def main(given: Sequence[str]) -> int:
    p = parser("engine --parts fullsize", __doc__)
    p.add_argument("--device", default="cuda")
    p.add_argument("--text-tokens", type=int, default=16)
    p.add_argument("--frames", type=int, default=24)
    args = p.parse_args(given)

    config = parse(released_config())
    start = time.perf_counter()
    source = Source.open(config, args.device, torch.bfloat16, "dummy")
    models = Models.open(source)
    torch.cuda.synchronize()
    loaded = time.perf_counter() - start
    params = sum(
        p.numel() for m in (models.thinker, models.talker, models.code2wav) for p in m.parameters()
    )
    result: dict[str, Any] = {"env": describe(), "parameters": params, "load_s": loaded, "runs": []}
    result["memory_gib"] = torch.cuda.memory_allocated() / 2**30
    print(f"{params:,} parameters in {loaded:.1f} s, {result['memory_gib']:.1f} GiB", flush=True)
    for kind in ("text", "text", "audio", "image"):
        options = replace(
            Options().seeded(1), max_text_tokens=args.text_tokens, max_frames=args.frames
        )
        begin = time.perf_counter()
        first: dict[str, float] = {}
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
    write(args.out, result)
    return 0

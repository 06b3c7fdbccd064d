"""What a benchmark of the pipeline asks: a data file in bench/workloads, turned into messages and lengths.

Every request of a run is different (its text begins with its number, its sound and picture come from its number), so
that no prefix cache helps; only what `system_tokens` states is shared. Lengths are fixed whatever the weights say, so
that random weights do the work of trained ones."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from stretto.client.workload import COMMON
from stretto.errors import Invalid
from stretto.orchestrator.api import ChunkSizes, Params

FOLDER = Path(__file__).parent / "workloads"
RATE = 16_000
CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Question:
    """What one prompt holds. Token counts are of its words, without the template around them."""

    text_tokens: int = 0
    audio_s: float = 0.0
    image: tuple[int, int] | None = None  # width, height
    system_tokens: int = 0  # the same for all requests


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str
    prompt: Question
    text_tokens: int  # of the answer
    frames: int  # 80 ms of speech each
    packets: ChunkSizes = field(default_factory=ChunkSizes)

    def params(self, index: int) -> Params:
        """Exactly `text_tokens` and `frames`, sampled as the model was made to be, seeded by the request's number."""
        return Params(
            temperature=0.7,
            top_k=20,
            top_p=0.8,
            seed=index,
            max_text_tokens=self.text_tokens,
            ignore_eos=True,
            min_frames=self.frames,
            max_frames=self.frames,
            packets=self.packets,
        )

    def messages(self, index: int, count: CountTokens) -> list[dict[str, Any]]:
        q, parts = self.prompt, []
        if q.audio_s:
            parts.append(sound(q.audio_s, index))
        if q.image is not None:
            parts.append(picture(q.image, index))
        if q.text_tokens:
            parts.append({"type": "text", "text": words(q.text_tokens, str(index), index, count)})
        system = words(q.system_tokens, "", 0, count) if q.system_tokens else ""
        head = [{"role": "system", "content": system}] if system else []
        return [*head, {"role": "user", "content": parts}]


def read(name: str) -> Workload:
    """A workload by its name in bench/workloads, or from a file of that form."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        prompt, packets = dict(raw["prompt"]), dict(raw["packets"])
        if prompt.get("image") is not None:
            width, height = prompt["image"]
            prompt["image"] = (int(width), int(height))
        if set(raw) - {"about", "prompt", "text_tokens", "frames", "packets"}:
            raise ValueError(f"unknown fields in {sorted(raw)}")
        return Workload(
            path.stem,
            str(raw["about"]),
            Question(**prompt),
            int(raw["text_tokens"]),
            int(raw["frames"]),
            ChunkSizes(**packets),
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Invalid(f"{path}: not a workload ({e})", "workload") from None


def words(tokens: int, opening: str, seed: int, count: CountTokens) -> str:
    """Everyday words that make exactly `tokens` tokens (more only if the opening alone has more)."""
    rng, text = random.Random(seed), opening
    while (missing := tokens - count(text)) > 0:
        more = [rng.choice(COMMON) for _ in range(max(1, missing // 4))]  # a word may be several tokens
        longer = " ".join([text, *more] if text else more)
        # Where the next word is too long, the shortest one fills the line: it is a token in any tokenizer.
        text = longer if count(longer) <= tokens else text + " a" * missing
    return text


def sound(seconds: float, seed: int) -> dict[str, Any]:
    """A voice-like hum of a wandering pitch."""
    rng, num = np.random.default_rng(seed), int(RATE * seconds)
    knots = np.arange(0, num + RATE // 8, RATE // 8)
    pitch = np.interp(np.arange(num), knots, rng.uniform(90.0, 300.0, len(knots)))
    wave = 0.3 * np.sin(np.cumsum(2 * np.pi * pitch / RATE)) + 0.02 * rng.standard_normal(num)
    out = io.BytesIO()
    soundfile.write(out, wave.astype(np.float32), RATE, format="WAV", subtype="PCM_16")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def picture(size: tuple[int, int], seed: int) -> dict[str, Any]:
    """A grid of colours, different for each number. Small as a file, so that decoding does not stand out."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.NEAREST).save(out, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}

"""What a benchmark asks: workloads by name, turned into messages and lengths.

Every request of a run is different (its text begins with its number, its sound and picture come
from its number), so that no prefix cache helps; only what `system_tokens` states is shared. Lengths
are fixed for any weights, so that random weights do the same work as trained ones."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from stretto.loadtest.workload import COMMON
from stretto.params import ChunkSizes, Params

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
        """Exactly `text_tokens` and `frames`, sampled as the model was made to be, seeded by the
        request's number."""
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


TEN_S: dict[str, Any] = {"text_tokens": 64, "frames": 125}
SHORT: dict[str, Any] = {"text_tokens": 24, "frames": 38}
EACH = ChunkSizes(first=1, each=1)

WORKLOADS = {
    w.name: w
    for w in (
        Workload("text-20", "a short question, 64 tokens of answer, 10 s of speech", Question(20),
        **TEN_S),
        Workload("text-100", "a question of 100 tokens, else as text-20", Question(100), **TEN_S),
        Workload("text-2000", "a question of 2,000 tokens, else as text-20", Question(2000),
        **TEN_S),
        Workload("long-60s", "as text-100, 300 tokens of answer, 60 s of speech", Question(100),
        300, 750),
        Workload("audio-2s", "as text-20 with two seconds of sound", Question(20, audio_s=2.0),
        **TEN_S),
        Workload("audio-10s", "as text-20 with ten seconds of sound", Question(20, audio_s=10.0),
        **TEN_S),
        Workload("audio-10s-5s", "as audio-10s with 32 tokens of answer, 5 s of speech",
        Question(20, audio_s=10.0), 32, 63),
        Workload("image", "as text-20 with a picture", Question(20, image=(640, 480)), **TEN_S),
        Workload("shared-500", "as text-20 behind a system prompt of 500 tokens that all requests "
                               "share: what the "
                 "prefix caches are for", Question(20, system_tokens=500), **TEN_S),
        Workload("frames", "as text-100, a packet for each frame: the most that a client can ask "
                           "of a server",
                 Question(100), **TEN_S, packets=EACH),
        Workload("read", "20 tokens to be read aloud, 5 s of speech", Question(20), 24, 63),
        Workload("small", "for the tiny model on a CPU: a short question, 24 tokens of answer, 3 s "
                          "of speech",
                 Question(20), **SHORT, packets=EACH),
        Workload("small-audio", "as small with two seconds of sound", Question(20, audio_s=2.0),
        **SHORT, packets=EACH),
    )
}  # fmt: skip


def words(tokens: int, opening: str, seed: int, count: CountTokens) -> str:
    """Everyday words that make exactly `tokens` tokens (more only if the opening alone has
    more)."""
    rng, text = random.Random(seed), opening
    while (missing := tokens - count(text)) > 0:
        more = [
            rng.choice(COMMON) for _ in range(max(1, missing // 4))
        ]  # a word may be several tokens
        longer = " ".join([text, *more] if text else more)
        # Where the next word is too long, the shortest one fills the line: it is a token in any
        # tokenizer.
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
    """A grid of colours, different for each number. Small as a file, so that decoding takes little
    time."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.NEAREST).save(out, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}

"""A benchmark's requests: their bodies and arrival times. Pure but for reading files."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import Invalid
from stretto.loadtest.dialect import Dialect, speech_fields

Messages = list[dict[str, Any]]

# Everyday words, each a token of its own in the tokenizers we know.
COMMON = [
    "the", "time", "of", "day", "and", "night", "is", "long", "when", "you", "wait", "for", "a",
    "train", "that",
    "will", "not", "come", "so", "we", "walk", "home", "in", "rain", "past", "old", "houses",
    "with", "green", "doors",
    "talk", "about", "music", "food", "work", "what", "want", "to", "do", "next", "year",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: tuple[str | Messages, ...] = ("Tell me something about the sea.",)
    prompt_tokens: int | None = None  # instead of `prompts`: about this many, different each time
    sound: str | None = None  # base64 of a WAV or MP3 file that goes with each prompt
    sound_format: str = "wav"
    system: str | None = None
    speak: bool = True
    audio_format: str | None = None  # None: as the dialect has it
    voice: str | None = None
    max_tokens: int = 128
    temperature: float | None = None
    dialect: Dialect = "openai"
    extra: Mapping[str, Any] = field(default_factory=dict)  # goes into each request as it is

    def body(self, index: int, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "messages": self.messages(index),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens,
            "modalities": ["text", "audio"] if self.speak else ["text"],
        }
        if self.speak:
            body |= speech_fields(self.dialect, self.audio_format, self.voice)
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body | dict(self.extra)

    def messages(self, index: int) -> Messages:
        prompt = (
            self.prompts[index % len(self.prompts)]
            if self.prompt_tokens is None
            else self._filler(index)
        )
        if not isinstance(prompt, str):
            return prompt
        content: Any = prompt
        if self.sound is not None:
            part = {
                "type": "input_audio",
                "input_audio": {"data": self.sound, "format": self.sound_format},
            }
            content = [part, {"type": "text", "text": prompt}] if prompt else [part]
        system: Messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]

    def _filler(self, index: int) -> str:
        """Begins with the request's number, so that no server finds it in a cache of prefixes."""
        assert self.prompt_tokens is not None
        rng = random.Random(index)
        return " ".join([str(index), *(rng.choice(COMMON) for _ in range(self.prompt_tokens - 1))])


def read_prompts(path: Path) -> tuple[str | Messages, ...]:
    """A prompt a line; in a `.jsonl` file each line is a string, a list of messages, or
    {"messages": [...]}."""
    lines = [line for line in _read(path).decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise Invalid(f"{path}: holds no prompt", "prompts")
    return (
        tuple(_read_line(path, n, line) for n, line in enumerate(lines, 1))
        if path.suffix == ".jsonl"
        else tuple(lines)
    )


def _read_line(path: Path, number: int, line: str) -> str | Messages:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise Invalid(f"{path}:{number}: not JSON ({e})", "prompts") from None
    prompt = value.get("messages") if isinstance(value, dict) else value
    if isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    ):
        return prompt
    raise Invalid(f"{path}:{number}: want a string or messages", "prompts")


def read_sound(path: Path) -> tuple[str, str]:
    """(base64, format) of a sound file. What is neither WAV nor MP3 is turned into WAV."""
    raw = _read(path)
    if raw.startswith(b"RIFF"):
        return base64.b64encode(raw).decode(), "wav"
    if path.suffix.lower() == ".mp3":
        return base64.b64encode(raw).decode(), "mp3"
    import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(raw), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as e:
        raise Invalid(f"{path}: not a sound file ({e})", "file") from None
    out = io.BytesIO()
    soundfile.write(out, samples.mean(axis=1), rate, format="WAV", subtype="PCM_16")
    return base64.b64encode(out.getvalue()).decode(), "wav"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise Invalid(f"{path}: {e.strerror}", "file") from None


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times from 0, `rate` a second on average, as if many people came
    independently."""
    rng, at = random.Random(seed), 0.0
    while True:
        yield at
        at += rng.expovariate(rate)

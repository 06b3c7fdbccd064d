"""Turns what is to be said, and a clip of a voice, into a `Prompt`. There is no chat template:
fixed strings stand around the instructions, and what a client writes is encoded as plain text.

The front end keeps one builder per model and calls it from any thread: it holds no state of a
request. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.errors import CheckpointError, Invalid
from stretto.models.qwen3_tts.config import SAMPLE_RATE, TtsConfig
from stretto.preprocess.media import Budget, MediaLimits
from stretto.preprocess.messages import Kind, Medium, Reader
from stretto.preprocess.prompt import Array, AudioClip, Prompt
from stretto.preprocess.template import Tokenizer

SHORTEST_S, LONGEST_S = 1.0, 30.0
"""Of the clip that a voice is made of."""
LIMITS = MediaLimits(file_bytes=16 << 20, audio_seconds=LONGEST_S, media=1, sample_rate=SAMPLE_RATE)
MAX_INSTRUCTIONS = 1024
"""Tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SpeechBuilder:
    config: TtsConfig
    tokenizer: Tokenizer
    user: int
    newline: int

    @classmethod
    def open(cls, directory: str | Path, config: TtsConfig) -> SpeechBuilder:
        t = config.tokens
        tokenizer = Tokenizer.open(
            directory, [t.im_start, t.im_end, t.tts_pad, t.tts_bos, t.tts_eos]
        )
        for token in (t.im_start, t.im_end):
            if token not in tokenizer.added:
                raise CheckpointError(
                    f"{directory}: config.json names token {token}, which the tokenizer lacks"
                )
        role, user, line = (tokenizer.encode(word) for word in ("assistant", "user", "\n"))
        if role != [t.assistant] or len(user) != 1 or len(line) != 1:
            raise CheckpointError(
                f"{directory}: the tokenizer does not have the role words as one token each"
            )
        return cls(config, tokenizer, user[0], line[0])

    def build(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        *,
        allow_paths: bool = False,
    ) -> Prompt:
        """What comes before a text that is read aloud: its instructions, from a system message, and
        the role. Or, of a message with a clip, the clip's samples and the tokens of what is said in
        it."""
        clips: list[Array] = []

        def found(medium: Medium, kind: Kind) -> None:
            if not isinstance(medium, np.ndarray):
                raise Invalid("a voice is made of sound", "audio")
            clips.append(medium)

        reader = Reader(Budget(LIMITS), allow_paths, False, lambda h, w, n: (h, w), found)
        turns = reader.read(messages)
        if clips:
            return self._clip(clips[0], turns[-1]["content"])
        instructions = "".join(t["content"] for t in turns if t["role"] == "system")
        return Prompt(tuple(self._instruct(instructions) + self._role()))

    def _role(self) -> list[int]:
        return [self.config.tokens.im_start, self.config.tokens.assistant, self.newline]

    def _instruct(self, text: str) -> list[int]:
        if not text.strip():
            return []
        if not self.config.takes_instructions:
            raise Invalid("this model follows no instructions", "instructions")
        t = self.config.tokens
        # in one go, as the model was made: line breaks join
        words = self.tokenizer.encode(f"\n{text}")
        if len(words) > MAX_INSTRUCTIONS:
            raise Invalid(
                f"instructions have {len(words)} tokens; at most {MAX_INSTRUCTIONS} are",
                "instructions",
            )
        return [t.im_start, self.user, *words, t.im_end, self.newline]

    def _clip(self, samples: Array, content: Any) -> Prompt:
        seconds = len(samples) / SAMPLE_RATE
        if seconds < SHORTEST_S:
            raise Invalid(
                f"the clip is too short: {seconds:.2f} s, at least {SHORTEST_S:g} s are needed",
                "audio",
            )
        text = "".join(part.get("text", "") for part in content if part["type"] == "text").strip()
        return Prompt(
            tuple(self.tokenizer.encode(text)) if text else (), (AudioClip.of(samples[None]),)
        )


def open_builder(directory: Path) -> SpeechBuilder:
    return SpeechBuilder.open(directory, TtsConfig.read(directory))

"""The rows of a talker's prompt: each is a text token, and with it a codec part: an id, the voice's
vector, a frame of the reference sound, or nothing.

A prompt is the instructions, the role, the language, the voice and the text's begin, then by
layout:

- *streaming*: the codec's begin beside the first text token; the other tokens follow one per frame.
- *whole*: all of the text beside padding, then the codec's begin.
- *in context*: the reference's frames follow the codec's begin, and its text stands before the text
  that is to be spoken. Streaming, words and frames stand side by side, so the first words are
  needed before the first frame; whole, frames follow words.

The last row is made like a generated one (see `speech/adapter.py`). Pure, host data; made by the
talker's stage on the loop thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stretto.models.qwen3_tts.config import TtsConfig

NONE = -1
"""No text, or no codec part."""
VECTOR = 1 << 20
"""The codec part that is the voice's vector."""
FRAME = VECTOR + 1
"""And from here on, frames of the reference."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A cloned voice. Without frames, its vector alone."""

    vector: npt.NDArray[np.float32]  # [hidden]
    frames: npt.NDArray[np.int64]  # [frames, groups]
    text: tuple[int, ...] = ()  # what it says
    digest: bytes = b""

    @property
    def in_context(self) -> bool:
        return len(self.frames) > 0


@dataclass(slots=True, eq=False)
class SpeechPrompt:
    """One request's prompt. `take` and `end` add the text that is to be spoken, as it comes."""

    whole: bool
    pad: int  # text ids
    eos: int
    codec_pad: int
    codec_bos: int
    reference: Reference | None
    opening: int  # rows before the layouts differ
    texts: list[int]  # of the rows that are known by now: text ids
    codecs: list[int]  # and codec parts
    # that came and have no row yet, or will have none
    words: list[int] = field(default_factory=list)
    ended: bool = False  # no more will come
    complete: bool = False  # all rows are known but the last
    placed: int = 0  # words that have a row of the prompt

    @property
    def frames(self) -> int:
        """Of the reference."""
        return len(self.reference.frames) if self.reference is not None else 0

    @property
    def num_known(self) -> int:
        return len(self.texts)

    def __len__(self) -> int:
        """Rows, the last included. Of a whole text, known when it has ended."""
        return len(self.texts) + 1 if self.whole else self.opening + self.frames + 1

    def length(self, spoken: int) -> int:
        """Rows, the last included, when so many tokens are to be spoken."""
        return len(self.texts) + spoken + 1 + self.frames + 1 if self.whole else len(self)

    @property
    def first_decode(self) -> float:
        return float(len(self))

    @property
    def last_codec(self) -> int:
        return FRAME + self.frames - 1 if self.frames else self.codec_bos

    def take(self, tokens: Sequence[int]) -> None:
        self.words.extend(tokens)
        self._grow()

    def end(self) -> None:
        self.ended = True
        self._grow()

    def _grow(self) -> None:
        if self.complete:
            return
        if self.whole:
            self._grow_whole()
        else:
            self._grow_with_sound()

    def _grow_whole(self) -> None:
        for word in self.words[self.placed :]:
            self._row(word, self.codec_pad)
        self.placed = len(self.words)
        if self.ended:
            self._row(self.eos, self.codec_pad)
            for codec in self._sounds()[:-1]:
                self._row(self.pad, codec)
            self.complete = True

    def _grow_with_sound(self) -> None:
        """All sounds but the last have a word beside them; when words run out, the end mark once,
        then padding."""
        sounds = self._sounds()[:-1]
        while self.placed < len(sounds):
            if self.placed < len(self.words):
                text = self.words[self.placed]
            elif self.ended:
                text = self.eos if self.placed == len(self.words) else self.pad
            else:
                return
            self._row(text, sounds[self.placed])
            self.placed += 1
        self.complete = True

    def _sounds(self) -> list[int]:
        return [self.codec_bos, *range(FRAME, FRAME + self.frames)]

    def _row(self, text: int, codec: int) -> None:
        self.texts.append(text)
        self.codecs.append(codec)

    def row(self, i: int) -> tuple[int, int]:
        """The text id and codec part of a row; of the last one, once its text is known."""
        if i < len(self.texts):
            return self.texts[i], self.codecs[i]
        return next(iter(self.spoken), self.after), self.last_codec

    @property
    def spoken(self) -> list[int]:
        """The tokens from the last row on, one per frame."""
        return [] if self.whole else self.words[self.placed :]

    @property
    def after(self) -> int:
        """What follows these, once."""
        return self.pad if self.whole or self.placed > len(self.words) else self.eos

    def cache_ids(self, start: int, stop: int) -> list[int]:
        """Ids by which the prefix cache tells rows apart. (Voices differ in the cache's root.)"""
        rows = (self.row(i) for i in range(start, stop))
        return [(codec - NONE) << 32 | (text - NONE) for text, codec in rows]


def speech_prompt(
    config: TtsConfig,
    ids: Sequence[int],
    voice: str | None,
    language: str | None,
    reference: Reference | None,
    whole: bool,
) -> SpeechPrompt:
    """The prompt before any text. `ids`: the instructions' tokens, if there are some, and the
    role's three."""
    t, codec = config.tokens, config.talker.codec
    spoken = config.language_id(language, voice if reference is None else None)
    if spoken is None:
        marks = [codec.nothink, codec.think_bos, codec.think_eos]
    else:
        marks = [codec.think, codec.think_bos, spoken, codec.think_eos]
    if reference is not None:
        marks.append(VECTOR)
    elif voice is not None:
        marks.append(config.speaker_id(voice))
    texts = [*ids, *(t.tts_pad for _ in marks), t.tts_bos]
    codecs = [*(NONE for _ in ids), *marks, codec.pad]
    prompt = SpeechPrompt(
        whole, t.tts_pad, t.tts_eos, codec.pad, codec.bos, reference, len(texts), texts, codecs
    )
    prompt.take(reference.text if reference is not None and reference.in_context else ())
    return prompt

"""Turns chat messages into a `Prompt`: template, tokens, media features, and a pad for every row of the encoders.

The front end keeps one `PromptBuilder` per model and calls it from its worker threads: it holds no state of a
request. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stretto.errors import CheckpointError, TooLong
from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens
from stretto.prompt.images import PatchRule, fit_video, image_patches, video_patches
from stretto.prompt.media import Budget, MediaLimits
from stretto.prompt.mel import mel
from stretto.prompt.messages import Medium, Reader
from stretto.prompt.prompt import Array, AudioClip, Patches, Prompt
from stretto.prompt.template import ChatTemplate, Tokenizer, encode_rendered
from stretto.prompt.video import Video

DEFAULT_LIMITS = MediaLimits()


@dataclass(frozen=True, slots=True, eq=False)
class PromptBuilder:
    config: OmniConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    rule: PatchRule
    limits: MediaLimits
    audio_end: int

    @classmethod
    def open(cls, directory: str | Path, config: OmniConfig, limits: MediaLimits = DEFAULT_LIMITS) -> PromptBuilder:
        """Reads tokenizer, chat template and image sizes of a checkpoint, and checks that they fit its config."""
        t = config.tokens
        markers = [
            t.im_start,
            t.im_end,
            t.audio_start,
            t.vision_start,
            *t.media_pads,
            t.tts_pad,
            t.tts_bos,
            t.tts_eos,
        ]
        tokenizer = Tokenizer.open(directory, markers)
        for token in markers:
            if token not in tokenizer.added:
                raise CheckpointError(f"{directory}: config.json names token {token}, which the tokenizer lacks")
        builder = cls(
            config=config,
            tokenizer=tokenizer,
            template=ChatTemplate.open(directory, tokenizer.markers),
            rule=PatchRule.read(directory, config.thinker.vision, config.thinker.text.max_positions),
            limits=limits,
            audio_end=tokenizer.marker("<|audio_end|>"),
        )
        builder._check_template(directory)
        return builder

    def build(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        *,
        allow_paths: bool = False,
    ) -> Prompt:
        """The prompt for messages in OpenAI's chat format, ending where the assistant's answer begins.

        `use_audio_in_video`: videos are heard as well as seen. `allow_paths`: messages may name local files; only
        for callers who could read them anyway."""
        media = _Media(self)
        reader = Reader(
            budget=Budget(self.limits),
            allow_paths=allow_paths,
            sound_in_video=use_audio_in_video,
            fit=lambda height, width, frames: fit_video(height, width, frames, self.rule),
            found=media.add,
        )
        declared = reader.read_tools(tools)
        turns = reader.read(messages)
        ids = encode_rendered(self.template.render(turns, declared), self.tokenizer)
        expanded = media.expand(ids)
        self.check_length(len(expanded))
        return Prompt(
            ids=tuple(expanded),
            audios=tuple(media.audios),
            images=tuple(media.images),
            videos=tuple(media.videos),
            audio_in_video=use_audio_in_video and bool(media.videos),
        )

    def check_length(self, num_tokens: int, *, so_far: bool = False) -> None:
        """Refuses a prompt that leaves no room for an answer."""
        most = self.config.thinker.text.max_positions
        if num_tokens >= most:
            count = f"at least {num_tokens:,}" if so_far else f"{num_tokens:,}"
            raise TooLong(
                f"the prompt has {count} tokens; it must leave room for an answer in the model's {most:,}",
                "messages",
            )

    def _check_template(self, directory: str | Path) -> None:
        """The talker counts on an answer starting with exactly these three tokens."""
        ids = encode_rendered(self.template.render([{"role": "user", "content": "Hello"}]), self.tokenizer)
        start = [self.config.tokens.im_start, self.config.tokens.assistant, *self.tokenizer.encode("\n")]
        if ids[-len(start) :] != start or len(start) != 3:
            raise CheckpointError(f"{directory}: the chat template does not end in <|im_start|>assistant and a newline")


@dataclass(slots=True)
class _Media:
    """The media of one prompt, as features, and what each one's pad becomes."""

    builder: PromptBuilder
    audios: list[AudioClip] = field(default_factory=list)
    images: list[Patches] = field(default_factory=list)
    videos: list[Patches] = field(default_factory=list)
    num_tokens: int = 0
    _pads: list[tuple[int, list[int]]] = field(default_factory=list)  # the template's pad, and the ids in its place

    def add(self, medium: Medium) -> None:
        ids = self.builder.config.tokens
        if isinstance(medium, Video):
            self._put(ids.video_pad, self._video(medium))
        elif isinstance(medium, Image.Image):
            patches = image_patches(medium, self.builder.rule)
            self.images.append(patches)
            self._put(ids.image_pad, [ids.image_pad] * self._rows(patches))
        else:
            self._put(ids.audio_pad, [ids.audio_pad] * self._audio(medium))

    def _put(self, pad: int, tokens: list[int]) -> None:
        self._pads.append((pad, tokens))
        self.num_tokens += len(tokens)
        # Checked as it grows: the features of a thousand images must not pile up before the request is refused.
        self.builder.check_length(self.num_tokens, so_far=True)

    def _audio(self, samples: Array) -> int:
        config = self.builder.config.thinker.audio
        features = mel(samples, config.num_mel_bins)
        self.audios.append(AudioClip(features))
        return audio_tokens(features.shape[1], config.chunk_frames)

    def _rows(self, patches: Patches) -> int:
        t, h, w = patches.grid
        return t * h * w // self.builder.rule.merge**2

    def _video(self, video: Video) -> list[int]:
        """Pads of a video; with sound, both by time: <|audio_start|>, the earlier first, <|audio_end|>."""
        ids, rule = self.builder.config.tokens, self.builder.rule
        patches = video_patches(video.frames, video.fps, rule, fitted=True)
        self.videos.append(patches)
        rows = self._rows(patches)
        if video.sound is None:
            return [ids.video_pad] * rows
        frames = np.repeat(np.arange(patches.grid[0]), rows // patches.grid[0])
        seen = frames * patches.seconds_per_grid * self.builder.config.thinker.positions_per_second
        heard = np.arange(self._audio(video.sound))
        # Stable, with the video in front: what is seen and heard at the same moment is seen first.
        order = np.argsort(np.concatenate((seen, heard)), kind="stable")
        merged = np.where(order < rows, ids.video_pad, ids.audio_pad)
        return [ids.audio_start, *merged.tolist(), self.builder.audio_end]

    def expand(self, ids: list[int]) -> list[int]:
        """The rendered prompt with every medium's pad replaced by as many as it has rows."""
        pads = set(self.builder.config.tokens.media_pads)
        expected = [pad for pad, _ in self._pads]
        if [i for i in ids if i in pads] != expected:
            raise CheckpointError("the chat template does not place one pad per medium, in order")
        rest = iter(self._pads)
        return [i for token in ids for i in (next(rest)[1] if token in pads else (token,))]

"""The media of a prompt: their features, and a pad for every row that the encoders make of them.
Used by `prompts.py`, wherever prompts are built; needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from stretto.errors import CheckpointError
from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens
from stretto.models.qwen3_omni.patches import PatchRule, fit, image_patches, video_patches
from stretto.preprocess.mel import mel
from stretto.preprocess.messages import Kind, Medium
from stretto.preprocess.prompt import Array, AudioClip, Patches
from stretto.preprocess.video import Video


@dataclass(slots=True)
class PromptMedia:
    """The media of one prompt, as features, and what each one's pad becomes."""

    config: OmniConfig
    rule: PatchRule
    audio_end: int
    check_length: Callable[..., None]  # `PromptBuilder.check_length`
    audios: list[AudioClip] = field(default_factory=list)
    images: list[Patches] = field(default_factory=list)
    videos: list[Patches] = field(default_factory=list)
    num_tokens: int = 0
    expected: int = 0  # tokens of pictures that are not decoded yet, and of those that are
    # the template's pad, and the ids in its place
    _pads: list[tuple[int, list[int]]] = field(default_factory=list)

    def expect_picture(self, height: int, width: int) -> None:
        """A picture of this size is going to be added: refused before any is decoded, if all of
        them have too many tokens together."""
        rule = self.rule
        h, w = fit(height, width, rule.factor, rule.min_pixels, rule.max_pixels)
        self.expected += h * w // rule.factor**2
        self.check_length(self.expected, so_far=True)

    def add(self, medium: Medium, kind: Kind) -> None:
        ids = self.config.tokens
        if isinstance(medium, Video):
            self._put(ids.video_pad, self._video(medium))
        elif isinstance(medium, Patches) and kind == "video":
            self.videos.append(medium)
            self._put(ids.video_pad, [ids.video_pad] * self._rows(medium))
        elif isinstance(medium, Image.Image | Patches):
            patches = medium if isinstance(medium, Patches) else image_patches(medium, self.rule)
            self.images.append(patches)
            self._put(ids.image_pad, [ids.image_pad] * self._rows(patches))
        else:
            self._put(ids.audio_pad, [ids.audio_pad] * self._audio(medium))

    def _put(self, pad: int, tokens: list[int]) -> None:
        self._pads.append((pad, tokens))
        self.num_tokens += len(tokens)
        # Checked as it grows: the features of a thousand images must not pile up before the request
        # is refused.
        self.check_length(self.num_tokens, so_far=True)

    def _audio(self, sound: Array | AudioClip) -> int:
        config = self.config.thinker.audio
        if not isinstance(sound, AudioClip):
            sound = AudioClip.of(mel(sound, config.num_mel_bins), config.window_frames)
        self.audios.append(sound)
        return audio_tokens(sound.num_frames, config.chunk_frames)

    def _rows(self, patches: Patches) -> int:
        t, h, w = patches.grid
        return t * h * w // self.rule.merge**2

    def _video(self, video: Video) -> list[int]:
        """Pads of a video; with sound, both by time: <|audio_start|>, the earlier first,
        <|audio_end|>."""
        ids, rule = self.config.tokens, self.rule
        patches = video_patches(video.frames, video.fps, rule, fitted=True)
        self.videos.append(patches)
        rows = self._rows(patches)
        if video.sound is None:
            return [ids.video_pad] * rows
        frames = np.repeat(np.arange(patches.grid[0]), rows // patches.grid[0])
        seen = frames * patches.seconds_per_grid * self.config.thinker.positions_per_second
        sound_positions = np.arange(self._audio(video.sound))
        # Stable, with the video in front: what is seen and heard at the same moment is seen first.
        order = np.argsort(np.concatenate((seen, sound_positions)), kind="stable")
        merged = np.where(order < rows, ids.video_pad, ids.audio_pad)
        return [ids.audio_start, *merged.tolist(), self.audio_end]

    def expand(self, ids: list[int]) -> list[int]:
        """The rendered prompt with every medium's pad replaced by as many as it has rows."""
        pads = set(self.config.tokens.media_pads)
        expected = [pad for pad, _ in self._pads]
        if [i for i in ids if i in pads] != expected:
            raise CheckpointError("the chat template does not place one pad per medium, in order")
        rest = iter(self._pads)
        return [i for token in ids for i in (next(rest)[1] if token in pads else (token,))]

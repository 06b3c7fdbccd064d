"""Prompts with made-up media, for any tiny model: one of each mix of modalities."""

from __future__ import annotations

import numpy as np

from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens
from stretto.preprocess.prompt import AudioClip, Patches, Prompt

NEWLINE = 10 + 188  # byte-level BPE shifts the control bytes; only consistency matters here
KINDS = ("text", "multi-turn", "audio", "image", "video", "audio+image", "audio-in-video")


class Maker:
    """Builds prompts token by token; media features are seeded noise of the right shape."""

    def __init__(self, config: OmniConfig, seed: int = 0) -> None:
        self.config, self.t = config, config.tokens
        self.rng = np.random.default_rng(seed)
        self.ids: list[int] = []
        self.audios: list[AudioClip] = []
        self.images: list[Patches] = []
        self.videos: list[Patches] = []
        self.merged = False

    def words(self, n: int) -> list[int]:
        special = {getattr(self.t, f) for f in self.t.__dataclass_fields__}
        low = min(special - {self.t.system, self.t.user, self.t.assistant})
        return [int(i) for i in self.rng.integers(0, low, n) if int(i) not in special]

    def turn(self, role: str, *content: list[int]) -> Maker:
        self.ids += [
            self.t.im_start,
            getattr(self.t, role),
            NEWLINE,
            *(i for c in content for i in c),
        ]
        self.ids += [self.t.im_end, NEWLINE]
        return self

    def audio(self, frames: int) -> list[int]:
        mel = (
            self.rng.standard_normal((self.config.thinker.audio.num_mel_bins, frames)).astype(
                np.float32
            )
            * 0.5
        )
        self.audios.append(AudioClip.of(mel, self.config.thinker.audio.window_frames))
        return [self.t.audio_start, *[self.t.audio_pad] * audio_tokens(frames), self.words(1)[0]]

    def patches(self, t: int, h: int, w: int, seconds: float = 1.0) -> Patches:
        v = self.config.thinker.vision
        size = v.channels * v.temporal_patch * v.patch_size**2
        return Patches.of(
            self.rng.standard_normal((t * h * w, size)).astype(np.float32), (t, h, w), seconds
        )

    def image(self, h: int, w: int) -> list[int]:
        self.images.append(self.patches(1, h, w))
        return [
            self.t.vision_start,
            *[self.t.image_pad] * (h * w // self.config.thinker.vision.merge**2),
            *self.words(1),
        ]

    def video(self, t: int, h: int, w: int, seconds: float) -> list[int]:
        self.videos.append(self.patches(t, h, w, seconds))
        count = t * h * w // self.config.thinker.vision.merge**2
        return [self.t.vision_start, *[self.t.video_pad] * count, *self.words(1)]

    def video_with_sound(self, t: int, h: int, w: int, seconds: float, frames: int) -> list[int]:
        """Video and sound pads merged by time: video first while it is not later than the sound."""
        per_frame = h * w // self.config.thinker.vision.merge**2
        self.videos.append(self.patches(t, h, w, seconds))
        self.audio(frames)
        self.merged = True
        rate = self.config.thinker.positions_per_second
        video = [f * seconds * rate for f in range(t) for _ in range(per_frame)]
        sound = [float(i) for i in range(audio_tokens(frames))]
        pads = sorted(
            [(x, 0, self.t.video_pad) for x in video] + [(x, 1, self.t.audio_pad) for x in sound]
        )
        end = self.words(2)
        return [self.t.vision_start, self.t.audio_start, *[p for _, _, p in pads], *end]

    def prompt(self) -> Prompt:
        ids = [*self.ids, self.t.im_start, self.t.assistant, NEWLINE]
        return Prompt(
            tuple(ids), tuple(self.audios), tuple(self.images), tuple(self.videos), self.merged
        )


def make(kind: str, config: OmniConfig, seed: int = 0) -> Prompt:
    m = Maker(config, seed)
    m.turn("system", m.words(7))
    match kind:
        case "text":
            m.turn("user", m.words(12))
        case "multi-turn":
            m.turn("user", m.words(9)).turn("assistant", m.words(11)).turn("user", m.words(6))
        case "audio":
            m.turn("user", m.audio(930), m.words(5))  # more than one attention window, and a tail
        case "image":
            m.turn("user", m.words(3), m.image(6, 10), m.words(4))
        case "video":
            m.turn("user", m.video(3, 4, 6, 0.7), m.words(4))
        case "audio+image":
            m.turn("user", m.audio(150), m.words(2), m.image(4, 6), m.words(4))
        case "audio-in-video":
            m.turn("user", m.words(2), m.video_with_sound(4, 4, 6, 1.0, 330), m.words(4))
        case _:
            raise ValueError(kind)
    return m.prompt()

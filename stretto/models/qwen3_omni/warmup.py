"""Qwen3-Omni's warm-up (see `stage/warmup.py`): words, a sound and a picture are answered aloud. On
a GPU twice, since what is kept of the prompt the first time is put to use the second time, and then
words alone. Used when its stages are built."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stretto.models.qwen3_omni.config import OmniConfig, audio_tokens
from stretto.models.qwen3_omni.params import stage_params
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.pieces import runs_of
from stretto.models.speech.warmup import WORD, packets, params
from stretto.params import RequestOptions
from stretto.preprocess.prompt import AudioClip, Patches, Prompt
from stretto.stage.payload import Payload
from stretto.stage.warmup import WarmUpRequest
from stretto.types import Span


def warm_up(
    config: OmniConfig, device: torch.device, dtype: torch.dtype
) -> Sequence[WarmUpRequest]:
    told = stage_params(RequestOptions("speech", params(device)))
    frames = packets(config.talker.num_code_groups)

    def asked(prompt: Prompt) -> WarmUpRequest:
        arriving: dict[str, Sequence[Payload]] = {
            "thinker>talker": answer(prompt, config, device, dtype),
            "talker>code2wav": frames,
        }
        return WarmUpRequest(told, prompt, arriving)

    seen = asked(question(config, media=True))
    return [seen, seen, asked(question(config, media=False))] if device.type == "cuda" else [seen]


def question(config: OmniConfig, media: bool) -> Prompt:
    """A user's turn of words and, if so, of two clips (one is shorter than what the encoder takes
    at least) and a small picture; then the answer's opening."""
    t, audio, vision = config.tokens, config.thinker.audio, config.thinker.vision
    opening, turn = (t.im_start, t.assistant, WORD), (t.im_start, t.user, WORD)
    if not media:
        return Prompt((*turn, WORD, WORD, t.im_end, WORD, *opening))
    lengths = audio.chunk_frames, audio.chunk_frames // 2
    clips = [AudioClip.of(np.zeros((audio.num_mel_bins, n), np.float32)) for n in lengths]
    heard = [
        i
        for n in lengths
        for i in (t.audio_start, *[t.audio_pad] * audio_tokens(n, audio.chunk_frames), WORD)
    ]
    side = 2 * vision.merge
    patch = vision.channels * vision.temporal_patch * vision.patch_size**2
    picture = Patches.of(np.zeros((side * side, patch), np.float32), (1, side, side))
    ids = *turn, *heard, t.vision_start, *[t.image_pad] * 4, WORD, t.im_end, WORD, *opening
    return Prompt(ids, tuple(clips), (picture,))


def answer(
    prompt: Prompt, config: OmniConfig, device: torch.device, dtype: torch.dtype
) -> Sequence[ThinkerRows]:
    """What the thinker sends of a prompt and of its own words, for a talker whose thinker is
    elsewhere."""
    n = len(prompt.ids)
    ids = torch.tensor(prompt.ids, dtype=torch.int32)
    runs = runs_of([i for i, id in enumerate(prompt.ids) if id in config.tokens.media_pads])
    hidden = torch.zeros(
        sum(map(len, runs)), config.talker.thinker_hidden_size, device=device, dtype=dtype
    )
    words = ThinkerRows(Span(n, n + 2), torch.full((2,), WORD, dtype=torch.int32), (), hidden[:0])
    return ThinkerRows(Span(0, n), ids, tuple(runs), hidden), words

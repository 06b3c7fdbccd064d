"""Qwen3-TTS's warm-up (see `stage/warmup.py`): a text is read aloud; where voices are cloned, twice
with one that nobody has, since what is kept of it the first time is put to use the second time.
Used when its stages are built."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from stretto.models.qwen3_tts.config import SAMPLE_RATE, TtsConfig
from stretto.models.qwen3_tts.params import RESIDUAL, ClonedVoice, stage_params
from stretto.models.speech.warmup import WORD, packets, params
from stretto.params import Params, RequestOptions, SpeechStyle
from stretto.preprocess.prompt import AudioClip, Prompt
from stretto.stage.warmup import WarmUpRequest

FRAMES = 2
"""Of the cloned voice's reference."""


def warm_up(config: TtsConfig, device: torch.device) -> Sequence[WarmUpRequest]:
    requests = [reading(config, params(device))]
    if config.kind == "base":
        requests *= 2
        if device.type == "cuda":  # on a CPU there is little to be made, and it takes long
            requests.append(enrolment(config))
    return requests


def reading(config: TtsConfig, p: Params) -> WarmUpRequest:
    style = SpeechStyle()
    if config.kind == "base":
        vector = np.zeros(config.talker.decoder.hidden_size, np.float32)
        codes = np.zeros((FRAMES, config.talker.num_code_groups), np.int16)
        style = SpeechStyle(
            voice=msgspec.msgpack.encode(ClonedVoice(vector.tobytes(), codes.tobytes(), (WORD,)))
        )
    options = RequestOptions("tts", p, style=style, tts_ids=(WORD,) * 4)
    told = stage_params(config, options, RESIDUAL)
    role = config.tokens.im_start, config.tokens.assistant, WORD
    return WarmUpRequest(
        told, Prompt(role), {"talker>code2wav": packets(config.talker.num_code_groups)}
    )


def enrolment(config: TtsConfig) -> WarmUpRequest:
    """A voice of a second of noise."""
    noise = 0.1 * np.random.default_rng(0).standard_normal((1, SAMPLE_RATE), dtype=np.float32)
    told = stage_params(config, RequestOptions("enrolment"), RESIDUAL)
    return WarmUpRequest(told, Prompt((WORD,), (AudioClip.of(noise),)))

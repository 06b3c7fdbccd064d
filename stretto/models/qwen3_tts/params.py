"""Parameters of a request for each stage of Qwen3-TTS, and the defaults of its
generation_config.json, which is read once when the model is opened. Imports no torch.

Plain names of that file (`temperature` and others) are about code 0 of a frame, those with
`subtalker_` about other codes."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from stretto.errors import Bug, CheckpointError, Invalid
from stretto.messages.requests import TokenId
from stretto.models.generation import DRAWN, GenerationFile
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.rows import Reference
from stretto.models.speech.params import FrameParams, StageParams, VocoderParams
from stretto.params import Params, RequestOptions
from stretto.types import SamplingParams, stage_seed

RESIDUAL = SamplingParams(temperature=0.9, top_k=50)
"""How the code predictor picks codes other than a frame's first, where the checkpoint says nothing
of it."""
MIN_FRAMES = 2
"""The model was made to say at least so much."""


class ClonedVoice(StageParams, frozen=True):
    """A voice of its own, as the enroller made it: what users keep, and give back with a
    request."""

    vector: bytes  # float32
    codes: bytes = b""  # int16 [frames, groups]; none: the vector alone
    text: tuple[TokenId, ...] = ()


class TalkerParams(FrameParams, frozen=True):
    language: str | None = None
    cloned: ClonedVoice | None = None
    whole: bool = False  # the layout, see `rows.py`


class EnrollerParams(StageParams, frozen=True):
    pass


class PrimedParams(VocoderParams, frozen=True):
    codes: bytes = b""  # of the cloned voice: heard before the first frame


def reference(config: TtsConfig, cloned: ClonedVoice) -> Reference:
    """A cloned voice as arrays, if it is one of this model's."""
    groups, width = config.talker.num_code_groups, config.talker.decoder.hidden_size
    if len(cloned.vector) != 4 * width or len(cloned.codes) % (2 * groups):
        raise Invalid("this voice was made by another model", "voice")
    vector = np.frombuffer(cloned.vector, np.float32).copy()
    codes = np.frombuffer(cloned.codes, np.int16).astype(np.int64).reshape(-1, groups)
    if not np.isfinite(vector).all() or (len(codes) and not 0 <= codes.min() <= codes.max() < 2048):
        raise Invalid("this voice is damaged", "voice")
    digest = blake2b(
        cloned.vector + cloned.codes + repr(cloned.text).encode(), digest_size=16
    ).digest()
    return Reference(vector, codes, cloned.text, digest)


def read_voice(config: TtsConfig, data: bytes) -> ClonedVoice:
    try:
        voice = msgspec.msgpack.decode(data, type=ClonedVoice)
    except msgspec.MsgspecError:
        raise Invalid("this is not a voice", "voice") from None
    reference(config, voice)
    return voice


def stage_params(
    config: TtsConfig, options: RequestOptions, residual: SamplingParams
) -> dict[str, msgspec.Struct]:
    """`residual`: how the checkpoint's other codes are drawn; those of codebook 0 as the request
    says."""
    if options.capability == "enrolment":
        return {"enroller": EnrollerParams()}
    if options.capability != "tts":
        raise Bug(f"{options.capability} is not what this model does")
    p = options.params
    style = options.style
    seed = stage_seed(options.seed, "talker")
    drawn = p.speech_temperature, p.speech_top_k, p.speech_top_p, p.speech_repetition_penalty
    code0, residual = SamplingParams(*drawn, seed=seed), replace(residual, seed=seed)
    if p.greedy_speech:
        code0, residual = replace(code0, temperature=0.0), replace(residual, temperature=0.0)
    cloned = read_voice(config, style.voice) if style.voice else None
    voice = options.voice
    if voice is None and cloned is None and config.talker.speakers:
        voice = default_voice(config)
    talker = TalkerParams(
        code0,
        residual,
        p.max_frames,
        voice,
        max(p.min_frames, min(MIN_FRAMES, p.max_frames)),
        p.packets.first,
        p.packets.each,
        p.packets.ramp,
        p.want_codes,
        options.tts_ids,
        options.tts_streaming,
        style.language,
        cloned,
        # As the released models are used; text that is still being written can only be streamed.
        whole=config.kind != "base" and not options.tts_streaming,
    )
    return {"talker": talker, "code2wav": PrimedParams(cloned.codes if cloned is not None else b"")}


def default_voice(config: TtsConfig) -> str:
    speakers = config.talker.speakers
    return "ryan" if "ryan" in speakers else next(iter(speakers), "")


def read_defaults(file: GenerationFile) -> Params:
    """The parameters of a request that states none."""
    values: dict[str, Any] = {
        f"speech_{name}": file.number((name,), kind) for name, kind in DRAWN.items()
    }
    if file.raw.get("do_sample") is False:
        values["speech_temperature"] = 0.0
    if (picks := file.number(("max_new_tokens",), int)) is not None:
        values["max_frames"] = max(1, picks - 1)  # the last one is the end
    return file.params(values)


def read_residual(file: GenerationFile) -> SamplingParams:
    """How codes other than a frame's first are drawn."""
    names = [name for name in DRAWN if name != "repetition_penalty"]
    values = {name: file.number((f"subtalker_{name}",), DRAWN[name]) for name in names}
    if file.raw.get("subtalker_dosample") is False:
        values["temperature"] = 0.0
    try:
        return replace(
            RESIDUAL, **{name: value for name, value in values.items() if value is not None}
        )
    except Invalid as e:
        raise CheckpointError(f"{file.path}: subtalker_{e}") from None

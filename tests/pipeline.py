"""Qwen3-Omni's pipeline by its parts, and announcements to its stages, for tests that speak to
hosts themselves."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stretto.messages.hosts import Configure
from stretto.messages.requests import Admit
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.params import TalkerParams, ThinkerParams
from stretto.models.speech.params import VocoderParams
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.types import RequestId, SamplingParams

STAGES = PIPELINE.names
LINKS = {link.name: (link.sender, link.receiver) for link in PIPELINE.links}
ONE_HOST: Literal["one"] = "one"
TWO_HOSTS: Literal["two"] = "two"
PROCESSES: Literal["processes"] = "processes"


def announcement(
    request: RequestId,
    prompt: PackedPrompt,
    speak: bool,
    voice: str | None,
    text: SamplingParams,
    code0: SamplingParams,
    residual: SamplingParams,
    max_text_tokens: int,
    max_frames: int,
    *,
    min_text_tokens: int = 0,
    logit_bias: tuple[tuple[int, float], ...] = (),
    spoken: tuple[int, ...] | None = None,
    priority: int = 0,
    cache_root: bytes = b"",
    **talker: Any,
) -> Admit:
    """A request for all stages that it needs."""
    told: dict[str, msgspec.Struct] = {}
    if spoken is None:
        told["thinker"] = ThinkerParams(text, max_text_tokens, min_text_tokens, logit_bias, speak)
    if speak:
        told["talker"] = TalkerParams(code0, residual, max_frames, voice, spoken=spoken, **talker)
        told["code2wav"] = VocoderParams()
    stages = {stage: msgspec.Raw(msgspec.msgpack.encode(params)) for stage, params in told.items()}
    return Admit(request, prompt.for_host(with_features=True), stages, priority, cache_root)


def params_of(a: Admit, stage: str) -> Any:
    kinds = {"thinker": ThinkerParams, "talker": TalkerParams, "code2wav": VocoderParams}
    return msgspec.msgpack.decode(a.stages[stage], type=kinds[stage])


def configure(model: str, stages: tuple[str, ...], settings: dict[str, Any]) -> Configure:
    return Configure(model, PIPELINE.build, stages, settings, tuple(LINKS.values()))

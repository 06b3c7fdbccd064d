"""Parameters of a request for each stage of Qwen3-Omni, and the defaults of its
generation_config.json, which is read once when the model is opened. Imports no torch.

The released file speaks of the talker alone (`talker_temperature` and others) and leaves the
thinker to the library's own default, which is greedy. A file may state the thinker's too, with the
prefix `thinker_` or with none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stretto.errors import Bug
from stretto.messages.requests import Positive, TokenId
from stretto.models.generation import DRAWN, GenerationFile
from stretto.models.speech.params import FrameParams, StageParams, VocoderParams
from stretto.params import MAX_GRAMMAR, MAX_LOGPROBS, Params, RequestOptions
from stretto.types import SamplingParams, stage_seed

RESIDUAL = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)
"""How the code predictor was made to pick the other codes."""


class ThinkerParams(StageParams, frozen=True):
    sampling: SamplingParams
    max_tokens: Positive
    min_tokens: int = 0
    logit_bias: Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=1024)] = ()
    speak: bool = True  # rows go to the talker
    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)] = ""  # that the text follows
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TalkerParams(FrameParams, frozen=True):
    prefill_only: bool = False  # the beginning of a prompt: take its rows, and say nothing


def stage_params(options: RequestOptions) -> dict[str, msgspec.Struct]:
    """Each stage has draws of its own from the request's one seed."""
    p = options.params
    text = SamplingParams(
        p.temperature, p.top_k, p.top_p, p.repetition_penalty, stage_seed(options.seed, "thinker")
    )
    speech = stage_seed(options.seed, "talker")
    drawn = p.speech_temperature, p.speech_top_k, p.speech_top_p, p.speech_repetition_penalty
    code0, residual = SamplingParams(*drawn, seed=speech), replace(RESIDUAL, seed=speech)
    if p.greedy_speech:
        code0, residual = replace(code0, temperature=0.0), replace(residual, temperature=0.0)
    thinker = ThinkerParams(
        text,
        p.max_text_tokens,
        p.max_text_tokens if p.ignore_eos else p.min_text_tokens,
        tuple(p.logit_bias.items()),
        speak=options.capability in ("speech", "speech_prefill"),
        grammar=p.grammar,
        min_p=p.min_p,
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        logprobs=p.logprobs,
    )
    talker = TalkerParams(
        code0,
        residual,
        p.max_frames,
        options.voice,
        p.min_frames,
        p.packets.first,
        p.packets.each,
        p.packets.ramp,
        p.want_codes,
        options.tts_ids,
        prefill_only=options.capability == "speech_prefill",
    )
    match options.capability:
        case "text" | "text_prefill":
            return {"thinker": thinker}
        case "speech_prefill":
            return {"thinker": thinker, "talker": talker}
        case "speech":
            return {"thinker": thinker, "talker": talker, "code2wav": VocoderParams()}
        case "tts":
            if options.tts_ids is None:
                raise Bug("nothing to be read")
            return {"talker": talker, "code2wav": VocoderParams()}
        case "enrolment":
            raise Bug("this model makes no voices")


def read_defaults(directory: Path) -> Params:
    """The parameters of a request that states none."""
    file = GenerationFile.open(directory)
    values: dict[str, Any] = {}
    for name, kind in DRAWN.items():
        values[name] = file.number((f"thinker_{name}", name), kind)
        values[f"speech_{name}"] = file.number((f"talker_{name}",), kind)
    values["min_p"] = file.number(("thinker_min_p", "min_p"), float)
    draws = file.first(("thinker_do_sample", "do_sample"))
    if draws is False:
        values["temperature"] = 0.0
    elif draws is True and values["temperature"] is None:
        values["temperature"] = 1.0
    if file.raw.get("talker_do_sample") is False:
        values["speech_temperature"] = 0.0
    values["max_text_tokens"] = file.number(("thinker_max_new_tokens", "max_new_tokens"), int)
    if (picks := file.number(("talker_max_new_tokens",), int)) is not None:
        values["max_frames"] = max(1, picks - 1)  # the last one is the end
    return file.params(values)
